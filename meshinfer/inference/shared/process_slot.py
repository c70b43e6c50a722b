"""One fixed slot and one request in flight for each client: the shortest way between two processes."""

from __future__ import annotations

import itertools
import os
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.context import BaseContext
from typing import Any

from tensordict import TensorDictBase

from meshinfer.arguments import as_seconds
from meshinfer.errors import ClosedError, TransportError
from meshinfer.inference.shared.board import LOOK_SECONDS, Board, BoardHandle, Kind, Response
from meshinfer.inference.shared.client import SlotClient, version_stamp
from meshinfer.inference.shared.future import SlotFuture, read_error
from meshinfer.inference.shared.transport import SharedTransport
from meshinfer.semaphore import Semaphore, memory_fence
from meshinfer.slots import Slot

__all__ = ["ProcessSlotClient", "ProcessSlotTransport"]

_ANSWERED, _KIND = int(Response.ID), int(Response.KIND)
_RESULT = int(Kind.RESULT)
_CLOSED_MEANWHILE = "the client was closed with this request in flight"

ATTACHED, LEFT = 1, 2
"""States of a slot in ``Board.attached``, besides 0: nobody has come yet."""


class ProcessSlotClient(SlotClient):
    """The client of one fixed slot, with one request in flight.

    Args:
        handle: of the board.
        slot: its index; only one process at a time may use it.
        timeout: the transport's.
        copy_result: whether replies are the caller's own; without, a reply is a view that is valid until this
            client's next request.
    """

    _kept = ("_handle", "_slot", "_timeout", "_copy_result")

    def __init__(self, handle: BoardHandle, slot: int, timeout: float, copy_result: bool) -> None:
        super().__init__(handle, timeout)
        self._slot = slot
        self._copy_result = copy_result

    def __call__(self, payload: TensorDictBase, timeout: float | None = None) -> TensorDictBase:
        """As in :meth:`SlotClient.__call__`, in one piece: no future for who waits at once."""
        deadline = None
        if timeout is not None:
            deadline = time.monotonic() + as_seconds("timeout", timeout, zero=True)
        slot, board = self._slot, self._ready_board()
        self._enter()
        try:
            if self._flying:
                self._take_slot(board, 0.0)
            identifier = self._write(board, slot, payload)
            self._flying[slot] = identifier, self._caller
        finally:
            self._submitting.release()
        header = board.responses[slot].header
        try:
            if header[_ANSWERED] != identifier:
                self._wait(board, header, identifier, timeout, deadline)
            memory_fence()
            if header[_KIND] == _RESULT:
                return self.read(board, slot)
            raise read_error(board, slot, identifier)
        finally:
            self.vacate(slot, identifier)

    def _wait(
        self,
        board: Board,
        header: memoryview[int],
        identifier: int,
        timeout: float | None,
        deadline: float | None,
    ) -> None:
        bell = board.replied[self._slot]
        while header[_ANSWERED] != identifier:
            left = LOOK_SECONDS
            if deadline is not None:
                left = min(left, deadline - time.monotonic())
            if bell.wait(left) and not self._closed and not board.closed:
                continue
            error = ClosedError(_CLOSED_MEANWHILE) if self._closed else board.error()
            if header[_ANSWERED] == identifier:
                return  # just before
            if error is not None:
                raise error
            if deadline is not None and time.monotonic() >= deadline:
                raise TimeoutError(f"no reply within {timeout:g} s; the request is given up")

    def submit(self, payload: TensorDictBase, timeout: float | None = None) -> SlotFuture:
        """As in :meth:`SlotClient.submit`; ``RuntimeError`` while the last request is in flight."""
        self._ready_board()  # before the lock, which a forked process makes anew
        self._enter()
        try:
            return super().submit(payload, timeout)
        finally:
            self._submitting.release()

    def _enter(self) -> None:
        """Two threads, or a finalizer within a call, would write into one row."""
        if not self._submitting.acquire(blocking=False):
            raise self._in_use()

    def _in_use(self) -> RuntimeError:
        return RuntimeError(
            f"slot {self._slot} has a request in flight, and a client of this transport has one at a time: "
            "collect or cancel its future first, or use the shared_memory transport"
        )

    def __repr__(self) -> str:
        return f"ProcessSlotClient(slot={self._slot}{', closed' if self._closed else ''})"

    def on_unused(self, give_back: Callable[[int], None]) -> None:
        """For the transport: what to do when this client ends, and neither it nor a copy of it has used the slot."""
        self._finalizer = weakref.finalize(self, give_back, self._slot)
        self._finalizer.atexit = False

    def __getstate__(self) -> dict[str, Any]:
        if self._board is None:
            self._finalizer.detach()  # from now on the slot may be a copy's
        return super().__getstate__()

    def _take_slot(self, board: Board, timeout: float) -> int:
        flying = self._flying.get(self._slot)
        if flying is not None:
            future = flying[1]()
            if future is not None and not future.take():
                raise self._in_use()
        return self._slot

    def _give_back(self, slot: int) -> None:
        board = self._board
        if board is not None and slot not in self._flying:
            board.void(slot)

    def _make_reader(
        self, frame: Slot, version_key: tuple[str, ...] | None
    ) -> Callable[[], TensorDictBase]:
        if self._copy_result:
            return super()._make_reader(frame, version_key)
        layout = self._handle.response_layout
        stamps = version_stamp(frame, layout, version_key)

        def borrow() -> TensorDictBase:
            result = layout.unpack(frame.views, copy=False)
            for key, stamp in stamps.items():
                result.set(key, stamp.clone())
            return result

        return borrow

    def _attach(self, board: Board) -> None:
        slot = self._slot
        if not board.hold_slot(slot):
            raise TransportError(
                f"slot {slot} is in use by another client in process {board.slot_holder(slot)}; "
                "each environment needs a client of its own: call transport.client() for each"
            )
        board.attached[slot] = ATTACHED
        board.came[slot] += 1
        board.replied[slot].drain()
        self._finalizer.detach()
        self._caller = partial(_Caller, board.replied[slot])
        self._finalizer = weakref.finalize(self, _leave_slot, board, slot, os.getpid())


class _Caller:
    """In the place of a future: a thread that waits in a call."""

    def __init__(self, bell: Semaphore) -> None:
        self._bell = bell

    def take(self) -> bool:
        """Its reply is not for others to take."""
        return False

    def fail(self, error: BaseException) -> bool:
        """Wake it: it finds out itself."""
        self._bell.post()
        return True


def _leave_slot(board: Board, slot: int, pid: int) -> None:
    if pid == os.getpid():  # a forked process holds nothing
        board.void(slot)
        board.attached[slot] = LEFT
        board.release_slot(slot)
        board.left.post()


class ProcessSlotTransport(SharedTransport[ProcessSlotClient]):
    """Requests of processes on this host, one fixed slot in shared memory and one request in flight for each client.

    Implements :class:`~meshinfer.inference.protocol.BatchedTransport`. Of the requests that wait, those are served
    first that were asked first, so nobody starves.

    Args:
        request_spec: example of one request: a TensorDict (or tensorclass) whose leaves have the shapes and dtypes of
            the real ones; ``batch_size=[B]`` for clients that step ``B`` environments at once. CPU tensors.
        response_spec: example of one reply, with the same ``batch_size``.
        num_slots: clients at one time. The slot of a client that was closed, or whose process has ended, is given to
            the next.
        ctx: start method (or context) for a process that serves it, ``"spawn"`` by default, see
            :class:`~meshinfer.server.process.ProcessInferenceServer`; clients may be in processes of any kind.
        copy_result: whether replies are the clients' own; without, a reply is a view into the slot that is valid until
            that client's next request.
        timeout: seconds; kept for clients that set none for connecting.

    Raises:
        ValueError, TypeError: an argument cannot work; names it.
        OSError: there is not enough memory, or no descriptor; says what is needed and what is there.
    """

    transport_kind = "process_slot"

    def __init__(
        self,
        request_spec: Any,
        response_spec: Any,
        *,
        num_slots: int,
        ctx: BaseContext | str | None = None,
        copy_result: bool = True,
        timeout: float = 60.0,
        board: BoardHandle | None = None,
    ) -> None:
        super().__init__(
            request_spec, response_spec, num_slots=num_slots, timeout=timeout, ctx=ctx, board=board
        )
        self._copy_result = bool(copy_result)
        self._given = itertools.count()
        self._unused: deque[int] = deque()

    def client(self) -> ProcessSlotClient:
        """A client with a slot of its own: picklable, for one thread, finds the memory on first use.

        Raises:
            ValueError: all slots are taken.
        """
        self._check_open()
        slot = self._next_slot()
        client = ProcessSlotClient(self._board.handle, slot, self.timeout, self._copy_result)
        client.on_unused(self._unused.append)
        return client

    def submit(self, payload: TensorDictBase) -> SlotFuture:
        """Refused: requests go through a client, which has the slot."""
        raise TypeError(
            "ProcessSlotTransport has no client of its own: make one with transport.client()"
        )

    @property
    def copy_result(self) -> bool:
        """Whether replies are the clients' own."""
        return self._copy_result

    @property
    def num_clients(self) -> int:
        """Clients that have connected, and neither left nor died."""
        return sum(1 for _ in self._here())

    def wait_until_left(self, num_clients: int | None = None, timeout: float | None = None) -> bool:
        """Wait until every client has come and left, or died.

        Args:
            num_clients: how many must have come; at least one by default.
            timeout: seconds; ``None`` for no limit.

        Returns:
            ``False`` when ``timeout`` ran out.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._all_left(1 if num_clients is None else num_clients):
            if self._board.closed:
                return True
            left = LOOK_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                return False
            self._board.left.wait(min(left, LOOK_SECONDS))
        return True

    def _all_left(self, num_clients: int) -> bool:
        came = sum(self._board.came.tolist())
        return came >= num_clients and next(self._here(), None) is None

    def _here(self) -> Iterator[int]:
        """Slots whose clients are alive."""
        for slot, state in enumerate(self._board.attached.tobytes()):
            if state == ATTACHED and self._board.slot_holder(slot) is not None:
                yield slot

    def _next_slot(self) -> int:
        """One that nobody was given, or whose client has left or died."""
        slot = next(self._given)
        if slot < self.num_slots:
            return slot
        for slot, state in enumerate(self._board.attached.tobytes()):
            if state == LEFT or (state == ATTACHED and self._board.slot_holder(slot) is None):
                self._board.attached[slot] = 0  # given, and not yet taken
                return slot
        while self._unused:
            slot = self._unused.popleft()
            if self._board.slot_holder(slot) is None:  # a forked copy may use it
                return slot
        raise ValueError(
            f"all {self.num_slots} slots are taken; make the transport with a larger num_slots, or close a client"
        )

    def _options(self) -> dict[str, Any]:
        return {"copy_result": self._copy_result}
