"""What clients of both slot transports do alike: one request through a slot."""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from tensordict import TensorDictBase
from torch import Tensor

from meshinfer.arguments import as_seconds
from meshinfer.errors import ClosedError, TransportError
from meshinfer.inference.future import reply_by
from meshinfer.inference.interaction import current_interaction
from meshinfer.inference.shared.board import (
    Board,
    BoardHandle,
    Request,
    Response,
    new_identifier,
)
from meshinfer.inference.shared.future import SlotFuture
from meshinfer.inference.shared.rowcall import BoardCall
from meshinfer.layout import PayloadLayout
from meshinfer.semaphore import memory_fence
from meshinfer.slots import Slot

__all__ = ["SlotClient", "version_stamp"]

_ID, _INTERACTION, _SUBMITTED = (int(field) for field in Request)
_VERSION = int(Response.VERSION)
_KEPT = 0
"""In place of a request's number: the slot is kept for all that follow."""


class SlotClient(ABC):
    """Sends requests through the slots of a board. Picklable; finds the memory again on first use.

    Implements :class:`~meshinfer.inference.protocol.InferenceClient`.
    """

    _kept: ClassVar[tuple[str, ...]]
    """What travels to another process."""

    def __init__(self, handle: BoardHandle, timeout: float) -> None:
        self._handle = handle
        self._timeout = timeout
        self._closed = False
        self._board: Board | None = None
        self._reset()

    def __call__(self, payload: TensorDictBase, timeout: float | None = None) -> TensorDictBase:
        """The policy's reply to ``payload``.

        Args:
            payload: a TensorDict as the request spec declares it; extra keys are left out, and it stays unchanged.
            timeout: seconds for everything; ``None`` waits while the server is alive.

        Returns:
            A TensorDict with the keys of the response spec and the policy version.

        Raises:
            ValueError, TypeError: the payload does not match the request spec; nothing was sent.
            TimeoutError: the request is given up.
            ServerClosedError, PeerLostError, ClosedError: see :mod:`meshinfer.errors`.
            Exception: what the policy raised.
        """
        if timeout is None:
            return self.submit(payload).result()
        deadline = time.monotonic() + as_seconds("timeout", timeout, zero=True)
        return reply_by(deadline, self.submit(payload, timeout), timeout)

    def submit(self, payload: TensorDictBase, timeout: float | None = None) -> SlotFuture:
        """Put ``payload`` into a slot and return a future; it is copied before this returns.

        Args:
            payload: as in :meth:`__call__`.
            timeout: seconds to wait for a free slot; by default the transport's.

        Raises:
            TimeoutError: no slot became free.
            ValueError, TypeError, ServerClosedError, PeerLostError, ClosedError: as in :meth:`__call__`.
        """
        board = self._ready_board()
        slot = self._take_slot(board, self._timeout if timeout is None else timeout)
        try:
            identifier = self._write(board, slot, payload)
            future = SlotFuture(self, slot, identifier)
        except BaseException:
            self._give_back(slot)
            raise
        self._flying[slot] = identifier, weakref.ref(future)
        if self._closed:  # meanwhile, by another thread
            future.fail(ClosedError("the client was closed with this request in flight"))
        return future

    def row_call(self, request: PayloadLayout, response: PayloadLayout) -> BoardCall | None:
        """As :meth:`~meshinfer.inference.rowcall.RowCalling.row_call`: a slot that is kept until the client leaves."""
        handle = self._handle
        if (handle.request_layout, handle.response_layout) != (request, response):
            return None
        board = self._ready_board()
        slot = self._take_slot(board, self._timeout)
        call = BoardCall(board, slot, self._identifiers)
        self._flying[slot] = _KEPT, weakref.ref(call)
        return call

    @property
    def in_flight(self) -> int:
        """Requests of this client whose replies have been neither collected nor given up."""
        return len(self._flying)

    def close(self) -> None:
        """Leave; requests in flight raise :class:`~meshinfer.errors.ClosedError`. Idempotent."""
        self._closed = True
        for slot, (identifier, reference) in list(self._flying.items()):
            future = reference()
            if future is not None:
                future.fail(ClosedError("the client was closed with this request in flight"))
            if identifier == _KEPT:
                self.vacate(slot, _KEPT)
        self._finalizer()

    def __enter__(self) -> SlotClient:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        self._check_open()
        return {name: getattr(self, name) for name in self._kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._closed = False
        self._reset()

    # For futures.

    @property
    def board(self) -> Board:
        """As this process sees it."""
        assert self._board is not None
        return self._board

    def read(self, board: Board, slot: int) -> TensorDictBase:
        """The result in a slot's response."""
        reader = self._readers.get(slot)
        if reader is None:
            # The server sets the key before it answers anybody, and after clients were made.
            reader = self._readers[slot] = self._make_reader(
                board.responses[slot], board.version_key
            )
        return reader()

    def vacate(self, slot: int, identifier: int) -> None:
        """The request is over: answered, given up, or forgotten. Nothing happens if the slot has another one by now."""
        flying = self._flying.get(slot)
        if flying is not None and flying[0] == identifier and self._pid == os.getpid():
            del self._flying[slot]
            self._give_back(slot)

    @abstractmethod
    def _take_slot(self, board: Board, timeout: float) -> int:
        """A slot for the next request."""

    @abstractmethod
    def _give_back(self, slot: int) -> None:
        """The slot's request is over."""

    def _make_reader(
        self, frame: Slot, version_key: tuple[str, ...] | None
    ) -> Callable[[], TensorDictBase]:
        layout = self._handle.response_layout
        return layout.reader(frame.views, version_stamp(frame, layout, version_key))

    def _write(self, board: Board, slot: int, payload: TensorDictBase) -> int:
        """Ask: write the request into the slot, then its number, then tell the server; the number."""
        frame = board.requests[slot]
        header = frame.header
        header[_ID] = 0  # while the row is neither the last request nor this one
        memory_fence()
        self._handle.request_layout.pack(payload, frame.views)
        header[_INTERACTION] = current_interaction()
        frame.floats[_SUBMITTED] = time.perf_counter()
        identifier = next(self._identifiers)
        memory_fence()
        header[_ID] = identifier
        memory_fence()
        board.posted[slot] = (board.posted[slot] + 1) & 0xFFFFFFFF
        board.work.post()
        return identifier

    def _ready_board(self) -> Board:
        board = self._board
        if board is None or self._closed or self._pid != os.getpid():
            board = self._open()
        if board.closed:
            raise board.error() or TransportError("the transport is closed")
        return board

    def _open(self) -> Board:
        """The board, in this process for the first time, or an error."""
        self._check_open()
        if self._pid != os.getpid():  # forked: what it has is the parent's
            self._finalizer.detach()
            self._reset()
        with self._opening:
            if self._board is None:
                board = self._handle.open()
                self._attach(board)
                self._board = board
            return self._board

    @abstractmethod
    def _attach(self, board: Board) -> None:
        """Called once in each process, before the first request."""

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._opening = threading.Lock()
        self._board = None
        self._identifiers = itertools.count(new_identifier())
        self._flying: dict[int, tuple[int, Callable[[], Any]]] = {}
        self._readers: dict[int, Callable[[], TensorDictBase]] = {}
        self._submitting = threading.Lock()
        self._finalizer: Any = weakref.finalize(self, _nothing)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this client was closed; make a new one with transport.client()")


def version_stamp(
    frame: Slot, layout: PayloadLayout, key: tuple[str, ...] | None
) -> dict[tuple[str, ...], Tensor]:
    """Where a reply's version goes, and the tensor that it is copied from."""
    return {} if key is None else {key: frame.words[_VERSION].expand(layout.batch_size)}


def _nothing() -> None:
    """What a client that has no slot leaves."""
