"""A client's slot as the place where its requests are written and its replies are read."""

from __future__ import annotations

import time
from collections.abc import Iterator

from meshinfer.errors import ClosedError
from meshinfer.inference.interaction import current_interaction
from meshinfer.inference.shared.board import LOOK_SECONDS, Board, Kind, Request, Response
from meshinfer.inference.shared.future import read_error
from meshinfer.layout import RowViews
from meshinfer.semaphore import memory_fence

__all__ = ["BoardCall"]

_ID, _INTERACTION, _SUBMITTED = (int(field) for field in Request)
_ANSWERED, _KIND, _VERSION = int(Response.ID), int(Response.KIND), int(Response.VERSION)
_RESULT = int(Kind.RESULT)


class BoardCall:
    """A :class:`~meshinfer.inference.rowcall.RowCall` in one slot, which the client holds for it.

    Args:
        board: as this process sees it.
        slot: held by this process.
        identifiers: of requests, each used once.
    """

    def __init__(self, board: Board, slot: int, identifiers: Iterator[int]) -> None:
        self._identifiers = identifiers
        self._board = board
        self._slot = slot
        self._interaction = current_interaction()
        self._frame, answer = board.requests[slot], board.responses[slot]
        self._answer = answer.header
        self._bell = board.replied[slot]
        self._identifier = 0
        self._closed = False
        self.request: RowViews = self._frame.views
        self.reply: RowViews = answer.views

    def send(self) -> None:
        """As :meth:`~meshinfer.inference.rowcall.RowCall.send`."""
        board, frame, slot = self._board, self._frame, self._slot
        if self._closed:
            raise ClosedError("this client was closed; make a new one with transport.client()")
        header = frame.header
        header[_INTERACTION] = self._interaction
        frame.floats[_SUBMITTED] = time.perf_counter()
        self._identifier = identifier = next(self._identifiers)
        memory_fence()
        header[_ID] = identifier
        memory_fence()
        board.posted[slot] = (board.posted[slot] + 1) & 0xFFFFFFFF
        board.work.post()

    def receive(self) -> int:
        """As :meth:`~meshinfer.inference.rowcall.RowCall.receive`."""
        answer, identifier = self._answer, self._identifier
        try:
            while answer[_ANSWERED] != identifier:
                if not self._bell.wait(LOOK_SECONDS) or self._closed or self._board.closed:
                    self._check(answer)
            memory_fence()
            if answer[_KIND] == _RESULT:
                return answer[_VERSION]
            raise read_error(self._board, self._slot, identifier)
        finally:
            self._frame.header[_ID] = 0  # from here on the row is written again

    def fail(self, error: BaseException) -> bool:
        """For the client, when it is closed: whoever waits finds out."""
        self._closed = True
        self._bell.post()
        return True

    def take(self) -> bool:
        """Its reply is not for others to take."""
        return False

    def _check(self, answer: memoryview[int]) -> None:
        """Raise if no reply will come."""
        error = self._board.error()
        if self._closed:
            error = ClosedError("the client was closed with this request in flight")
        if error is not None and answer[_ANSWERED] != self._identifier:
            raise error
