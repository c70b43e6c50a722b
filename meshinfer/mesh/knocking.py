"""Looking for the beacon of a job: knocking at all of its ports at once, again and again, until a deadline."""

from __future__ import annotations

import errno
import hmac
import json
import os
import secrets
import selectors
import socket
import time
from collections.abc import Sequence
from typing import Any

from meshinfer.errors import MeshError
from meshinfer.mesh.beacon import HEAD, MAGIC, NONCE_BYTES, Key
from meshinfer.rendezvous import SECRET_VARIABLE

__all__ = ["Search"]

_SILENT_SECONDS = 5.0
_OTHER_SECRET_SECONDS = 1.0
_FIRST_PAUSE = 0.02
_LONGEST_PAUSE = 0.5
_LONGEST_PAUSE_ELSEWHERE = 2.0  # rank 0 is at its first port, unless a stranger was

NOTHING = "nothing listens"
SILENT = "no answer"
STRANGER = "something else listens"
OTHER_SECRET = "a beacon of this job with another secret"


class Search:
    """Where the beacon of a job is.

    Args:
        key: of the job.
        address: numeric address of the beacon's host.
        ports: see :func:`~meshinfer.mesh.beacon.candidate_ports`.
    """

    def __init__(self, key: Key, address: str, ports: Sequence[int]) -> None:
        self._selector = selectors.DefaultSelector()
        self._doors = [
            _Door(key, address, port, _LONGEST_PAUSE_ELSEWHERE if number else _LONGEST_PAUSE)
            for number, port in enumerate(ports)
        ]

    def run(self, timeout: float, *, once: bool = False) -> dict[str, Any] | None:
        """What the beacon tells, or ``None`` when it was not found within ``timeout`` seconds.

        Args:
            once: stop as soon as it is known of every port who is there.

        Raises:
            MeshError: there is a beacon of this job that holds another secret, and no other.
        """
        deadline = time.monotonic() + timeout
        try:
            while True:
                found = self._step(deadline)
                now = time.monotonic()
                if found is not None or now >= deadline or (once and self.settled):
                    return found
                self._check_secret(now)
        finally:
            for door in self._doors:
                self._leave(door)
            self._selector.close()

    @property
    def settled(self) -> bool:
        """Whether it is known of every port who is there."""
        return all(door.state not in ("", SILENT) for door in self._doors)

    @property
    def deserted(self) -> bool:
        """Whether it is known of every port that no beacon of this job is there."""
        return all(door.state in (NOTHING, STRANGER) for door in self._doors)

    def __str__(self) -> str:
        by_state: dict[str, list[str]] = {}
        for door in self._doors:
            by_state.setdefault(door.state, []).append(str(door.port))
        return "; ".join(f"{state} at {', '.join(ports)}" for state, ports in by_state.items())

    def _step(self, deadline: float) -> dict[str, Any] | None:
        now = time.monotonic()
        for door in self._doors:
            if door.socket is not None and now >= door.until:
                self._leave(door)
            if door.socket is None and now >= door.until:
                self._selector.register(door.knock(), selectors.EVENT_WRITE, door)
        next_at = min(deadline, *(door.until for door in self._doors))
        for key, _ in self._selector.select(max(next_at - now, 0.0)):
            door = key.data
            found = door.hear() if key.events == selectors.EVENT_READ else door.speak()
            if found is not None:
                return found  # type: ignore[no-any-return]
            if door.over:
                self._leave(door)
            else:
                self._selector.modify(key.fileobj, selectors.EVENT_READ, door)
        return None

    def _leave(self, door: _Door) -> None:
        if door.socket is not None:
            self._selector.unregister(door.socket)
            door.rest()

    def _check_secret(self, now: float) -> None:
        """A beacon with another secret may be a stranger's: the right one may yet come, but not much later."""
        for door in self._doors:
            if door.state == OTHER_SECRET and now - door.first_heard > _OTHER_SECRET_SECONDS:
                raise MeshError(
                    f"rank 0 of this job, at {door.address}:{door.port}, holds another secret than this rank, or only "
                    f"one of the two has a secret; give every rank the same {SECRET_VARIABLE} (or secret=)"
                )


class _Door:
    """One port: who is there, the connection while there is one, and until when nothing is to be done about it."""

    def __init__(self, key: Key, address: str, port: int, longest_pause: float) -> None:
        self.address = address
        self.port = port
        self.state = ""
        self.socket: socket.socket | None = None
        self.until = 0.0
        self.over = False
        self.first_heard = 0.0
        self._key = key
        self._longest_pause = longest_pause
        self._pause = _FIRST_PAUSE
        self._nonce = b""
        self._heard = b""
        self._failed = 0

    def knock(self) -> socket.socket:
        """Begin to connect."""
        family = socket.AF_INET6 if ":" in self.address else socket.AF_INET
        self.socket = socket.socket(family, socket.SOCK_STREAM)
        self.socket.setblocking(False)
        self._nonce, self._heard, self.over = secrets.token_bytes(NONCE_BYTES), b"", False
        self.until = time.monotonic() + _SILENT_SECONDS
        self._failed = self.socket.connect_ex((self.address, self.port))
        return self.socket

    def speak(self) -> None:
        """Connected, or not: say what a rank says."""
        assert self.socket is not None
        try:
            self.socket.send(MAGIC + self._nonce)
        except OSError as error:
            at_once = self._failed not in (0, errno.EINPROGRESS)
            number = self._failed if at_once else error.errno or errno.EIO
            self._settle(NOTHING if number == errno.ECONNREFUSED else os.strerror(number))
        else:
            self.state = self.state or SILENT

    def hear(self) -> dict[str, Any] | None:
        """What the beacon tells, once its answer is complete and proved."""
        assert self.socket is not None
        try:
            data = self.socket.recv(HEAD.size + 0xFFFF)
        except OSError:
            data = b""
        self._heard += data
        if not data or not self._heard.startswith(MAGIC[: len(self._heard)]):
            self._settle(STRANGER)
        elif len(self._heard) >= HEAD.size:
            _, of_identity, of_secret, length = HEAD.unpack_from(self._heard)
            content = self._heard[HEAD.size :]
            if len(content) >= length:
                return self._verify(of_identity, of_secret, content[:length])
        return None

    def rest(self) -> None:
        """Hang up, and stay away for a while."""
        assert self.socket is not None
        self.socket.close()
        self.socket = None
        if not self.over:
            self.state = SILENT
        self._pause = min(2 * self._pause, self._longest_pause)
        self.until = time.monotonic() + self._pause

    def _verify(
        self, of_identity: bytes, of_secret: bytes, content: bytes
    ) -> dict[str, Any] | None:
        identity, secret = self._key.proofs(self._nonce, content)
        if not hmac.compare_digest(of_identity, identity):
            self._settle(STRANGER)
        elif not hmac.compare_digest(of_secret, secret):
            self.first_heard = self.first_heard or time.monotonic()
            self._settle(OTHER_SECRET)
        else:
            told: dict[str, Any] = json.loads(content)
            return told
        return None

    def _settle(self, state: str) -> None:
        self.state, self.over = state, True
