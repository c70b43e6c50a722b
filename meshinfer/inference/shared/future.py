"""The reply to one request in a slot, waited for by whoever asks for it."""

from __future__ import annotations

import asyncio
import logging
import os
import struct
import threading
import time
from collections.abc import Generator
from typing import Any, Protocol

from tensordict import TensorDictBase

from meshinfer.errors import TransportError
from meshinfer.inference.future import mark
from meshinfer.inference.remote_errors import decode_exception
from meshinfer.inference.shared.board import LOOK_SECONDS, Board, Kind, Response
from meshinfer.memory import open_through
from meshinfer.semaphore import memory_fence

__all__ = ["SlotFuture", "read_error"]

logger = logging.getLogger("meshinfer.shared")

_ANSWERED, _KIND = int(Response.ID), int(Response.KIND)
_RESULT = int(Kind.RESULT)

_settling = threading.RLock()
"""Guards the one transition that a waiting and a cancelling thread may race for; held for a few instructions.

Reentrant, because the garbage collector may run in between, and drop other futures.
"""


class SlotOwner(Protocol):
    """What a future needs of its client."""

    @property
    def board(self) -> Board:
        """As this process sees it."""

    def read(self, board: Board, slot: int) -> TensorDictBase:
        """The result in a slot's response."""

    def vacate(self, slot: int, identifier: int) -> None:
        """The request is over, and the slot free, unless it has another one by now."""


class SlotFuture:
    """The reply to one request. No thread brings it: who waits sleeps on the slot's own semaphore.

    Of several threads that wait for it one sleeps there, the others behind it, each with its own deadline. A future
    that is dropped gives its slot back.
    """

    __slots__ = (
        "__weakref__",
        "_board",
        "_error",
        "_finished",
        "_header",
        "_identifier",
        "_owner",
        "_result",
        "_turn",
        "slot",
    )

    def __init__(self, owner: SlotOwner, slot: int, identifier: int) -> None:
        self._finished = False  # first, since an interrupt may come between any two
        self._owner = owner
        self.slot = slot
        self._identifier = identifier
        self._board = owner.board  # its own: in a forked process the client begins anew
        self._header = self._board.responses[slot].header
        self._turn = threading.Lock()
        self._result: TensorDictBase | None = None
        self._error: BaseException | None = None

    def done(self) -> bool:
        """Whether the reply, or an error, is here. Never waits."""
        if self._finished or self._header[_ANSWERED] == self._identifier:
            return True
        return self._lose_if_lost()

    def result(self, timeout: float | None = None) -> TensorDictBase:
        """The reply.

        Args:
            timeout: seconds to wait; ``None`` waits while the server is alive.

        Raises:
            TimeoutError: no reply yet; the request stays in flight and ``result`` may be called again.
            PeerLostError, ServerClosedError, ClosedError: it will never come.
            Exception: what the policy raised, with the remote traceback as its cause.
        """
        if not self._finished:
            self._wait(timeout)
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What :meth:`result` would raise, or ``None``; raises :class:`TimeoutError` like it."""
        if not self._finished:
            self._wait(timeout)
        return self._error

    def cancel(self) -> bool:
        """Give the reply up; ``False`` when it had already come."""
        return not self.take() and self.fail(TransportError("the request was cancelled"))

    def fail(self, error: BaseException) -> bool:
        """For clients: the reply will not be used."""
        if not self._settle(None, error):
            return False
        # Whoever sleeps for this reply must learn that it is over.
        if self._turn.locked():
            self._board.replied[self.slot].post()
        return True

    def take(self) -> bool:
        """For clients: settle it now if the reply is here; whether it is settled."""
        if not self._finished and self._header[_ANSWERED] == self._identifier:
            self._fetch()
        return self._finished

    def _wait(self, timeout: float | None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout
        patience = -1 if timeout is None else min(max(timeout, 0.0), threading.TIMEOUT_MAX)
        if not self._turn.acquire(blocking=False) and not self._turn.acquire(timeout=patience):
            raise _too_late(timeout)
        try:
            self._sleep(timeout, deadline)
        finally:
            self._turn.release()

    def _sleep(self, timeout: float | None, deadline: float | None) -> None:
        """With the turn: until the reply is here."""
        bell = self._board.replied[self.slot]
        while not self._finished:
            if self._header[_ANSWERED] == self._identifier:
                return self._fetch()
            left = LOOK_SECONDS
            if deadline is not None:
                left = min(left, deadline - time.monotonic())
            if bell.wait(left) and not self._board.closed:
                continue
            if self.take() or self._lose_if_lost():
                continue
            if deadline is not None and time.monotonic() >= deadline:
                raise _too_late(timeout)

    def _fetch(self) -> None:
        """The response is ours: read it, unless the request was given up meanwhile."""
        memory_fence()
        if self._header[_KIND] == _RESULT:
            self._settle(self._owner.read(self._board, self.slot), None)
        else:
            self._settle(None, read_error(self._board, self.slot, self._identifier))

    def _lose_if_lost(self) -> bool:
        error = self._board.error()
        if error is None:
            return False
        if not self.take():  # it may have been answered just before
            self._settle(None, error)
        return True

    def _settle(self, result: TensorDictBase | None, error: BaseException | None) -> bool:
        with _settling:
            if self._finished:
                return False
            self._result, self._error = result, error
            self._finished = True
        self._owner.vacate(self.slot, self._identifier)
        return True

    def __del__(self) -> None:
        if not self._finished:
            self._finished = True
            self._owner.vacate(self.slot, self._identifier)

    def __await__(self) -> Generator[Any, None, TensorDictBase]:
        if not self.done():
            # No thread brings the reply that could tell the loop, so one of its own waits for it.
            loop = asyncio.get_running_loop()
            arrived: asyncio.Future[None] = loop.create_future()
            threading.Thread(
                target=self._watch, args=(loop, arrived), name="meshinfer-await", daemon=True
            ).start()
            yield from arrived
        return self.result()

    def _watch(self, loop: asyncio.AbstractEventLoop, arrived: asyncio.Future[None]) -> None:
        while not arrived.done() and not loop.is_closed():
            try:
                self.exception(LOOK_SECONDS)
            except TimeoutError:
                continue
            break
        try:
            loop.call_soon_threadsafe(mark, arrived)
        except RuntimeError as error:  # the loop was closed meanwhile
            logger.debug("nobody awaits a reply any more: %s", str(error))


def read_error(board: Board, slot: int, identifier: int) -> BaseException:
    """The exception in a slot's response, which answers request ``identifier``."""
    header, place = board.responses[slot].header, board.responses.octets(slot)
    if header[_KIND] == Kind.LARGE_ERROR:
        data = _read_file(header, identifier)
        return decode_exception(data or bytes(place[: header[Response.SUMMARY]]))
    return decode_exception(bytes(place[: header[Response.LENGTH]]))


def _read_file(header: memoryview[int], identifier: int) -> bytes:
    """What the server keeps for this request; nothing if it does not any more."""
    try:
        descriptor = open_through(header[Response.PID], header[Response.DESCRIPTOR])
    except OSError as error:  # a lost peer is one too
        logger.debug("the details of an exception are gone: %s", str(error))
        return b""
    with open(descriptor, "rb"):
        ours = os.pread(descriptor, 8, 0) == struct.pack("<q", identifier)
        return os.pread(descriptor, header[Response.LENGTH], 8) if ours else b""


def _too_late(timeout: float | None) -> TimeoutError:
    assert timeout is not None
    return TimeoutError(f"no reply within {timeout:g} s; the request is still in flight")
