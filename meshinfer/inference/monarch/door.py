"""Those who want to join a server and have not proved yet that they may."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from meshinfer.inference.monarch.frames import NOBODY, TOKEN_BYTES, Signal, read_facts, signal
from meshinfer.inference.monarch.locate import MonarchAddress
from meshinfer.inference.monarch.mortality import ProcessName
from meshinfer.inference.monarch.ports import Outlet
from meshinfer.inference.queues.proof import REPLY_BYTES, make_hello, verdict
from meshinfer.inference.queues.wire import BadFrameError, Frame

__all__ = ["Door", "Guest"]

_JOIN_SECONDS: Final = 10.0
_MOST_STRANGERS: Final = 4096


@dataclass(frozen=True)
class Guest:
    """Who has answered a challenge.

    Attributes:
        token: given to it.
        outlet: to it.
        answer: the verdict to send.
        objection: why it is none of us; empty if it has proved to be.
        process: that it is in; ``None`` with an objection.
        serves: where it serves, if it does.
    """

    token: bytes
    outlet: Outlet
    answer: bytes
    objection: str
    process: ProcessName | None = None
    serves: MonarchAddress | None = None


@dataclass(frozen=True)
class _Stranger:
    outlet: Outlet
    hello: bytes
    since: float


class Door:
    """Challenges strangers. For the thread of a hub.

    Args:
        secret: of the job.
        reach: makes a way to an address.
    """

    def __init__(self, secret: bytes, reach: Callable[[str], Outlet]) -> None:
        self._secret = secret
        self._reach = reach
        self._strangers: dict[bytes, _Stranger] = {}

    def challenge(self, frame: Frame) -> None:
        """Somebody knocks.

        Raises:
            BadFrameError: it does not say where to answer, or too many are here.
        """
        if len(self._strangers) >= _MOST_STRANGERS:
            raise BadFrameError(f"{len(self._strangers)} others are joining")
        try:
            outlet = self._reach(bytes(frame.body).decode())
        except ValueError as error:
            raise BadFrameError(f"no address to answer to: {error}") from error
        token = NOBODY
        while token == NOBODY or token in self._strangers:
            token = secrets.token_bytes(TOKEN_BYTES)
        stranger = self._strangers[token] = _Stranger(outlet, make_hello(), time.monotonic())
        outlet.send(*signal(token, Signal.CHALLENGE, stranger.hello))

    def judge(self, token: bytes, frame: Frame) -> Guest | None:
        """Somebody has answered a challenge; ``None`` if it is nobody that we know.

        Raises:
            BadFrameError: it says nothing of itself.
        """
        stranger = self._strangers.pop(token, None)
        if stranger is None or frame.kind != Signal.PROOF:
            return None
        reply, rest = bytes(frame.body[:REPLY_BYTES]), frame.body[REPLY_BYTES:]
        answer, objection = verdict(self._secret, stranger.hello, reply)
        if objection:
            return Guest(token, stranger.outlet, answer, objection)
        process, serves = self._read(read_facts(rest))
        return Guest(token, stranger.outlet, answer, objection, process, serves)

    def forget_late(self) -> int:
        """Forget those who have not answered for ten seconds: how many."""
        until = time.monotonic() - _JOIN_SECONDS
        late = [token for token, stranger in self._strangers.items() if stranger.since < until]
        for token in late:
            del self._strangers[token]
        return len(late)

    def _read(self, facts: Mapping[str, Any]) -> tuple[ProcessName, MonarchAddress | None]:
        try:
            process, serves = ProcessName.read(facts["process"]), facts["serves"]
        except (KeyError, TypeError, ValueError) as error:
            raise BadFrameError(f"it does not say who it is: {error!r}") from error
        return process, None if serves is None else MonarchAddress.read(serves, self._secret)
