"""A pool of slots: any number of clients, several requests of each in flight."""

from __future__ import annotations

import os
import time

from tensordict import TensorDictBase

from meshinfer.inference.shared.board import LOOK_SECONDS, Board
from meshinfer.inference.shared.client import SlotClient
from meshinfer.inference.shared.future import SlotFuture
from meshinfer.inference.shared.transport import SharedTransport

__all__ = ["PoolClient", "SharedMemoryTransport"]


class PoolClient(SlotClient):
    """A client that takes a slot of the pool for each request, and gives it back with the reply.

    Threads may share it. Args as for :class:`ProcessSlotClient`.
    """

    _kept = ("_handle", "_timeout")

    def __repr__(self) -> str:
        return f"PoolClient(of {self._handle.num_slots} slots{', closed' if self._closed else ''})"

    def _attach(self, board: Board) -> None:
        self._hint = 0

    def _take_slot(self, board: Board, timeout: float) -> int:
        slot = self._find_free(board)
        if slot is None:
            slot = self._wait_for_slot(board, timeout)
        self._hint = slot
        board.busy[slot] = 1
        board.replied[slot].drain()
        return slot

    def _find_free(self, board: Board) -> int | None:
        """A slot that is marked as free, the last one again if possible."""
        busy, slot = board.busy.tobytes(), self._hint
        for begin, end in ((slot, len(busy)), (0, slot)):
            slot = busy.find(0, begin, end)
            while slot >= 0:
                if board.hold_slot(slot):
                    return slot
                slot = busy.find(0, slot + 1, end)
        return None

    def _wait_for_slot(self, board: Board, timeout: float) -> int:
        now = time.monotonic()
        deadline, look = now + timeout, now
        while True:
            left = min(LOOK_SECONDS, max(deadline - now, 0.0))
            found = None
            if self._collect_own(left) or board.vacancy.wait(left):
                found = self._find_free(board)
            now = time.monotonic()
            if found is None and now >= look:
                # Nobody rings for a process that died with slots, and nobody unmarks them.
                found, look = self._find_abandoned(board), now + LOOK_SECONDS
            if found is not None:
                return found
            self._check_open()
            error = board.error()
            if error is not None:
                raise error
            if now >= deadline:
                raise TimeoutError(
                    f"all {board.num_slots} slots were in use for {timeout:g} s: collect the replies that are in "
                    "flight, or make the transport with more slots"
                )

    def close(self) -> None:
        """As in :meth:`SlotClient.close`; a thread that waits for a slot raises too."""
        super().close()
        if self._board is not None and self._pid == os.getpid():
            self._board.vacancy.post()

    def _collect_own(self, timeout: float) -> bool:
        """Take replies of this client out of their slots, for their futures to keep: whether one came.

        So a thread that submits more requests than there are slots, and collects afterwards, gets on.
        """
        found = [reference() for _, reference in list(self._flying.values())]
        futures = [future for future in found if future is not None]
        if not futures or [future for future in futures if future.take()]:
            return bool(futures)
        try:
            futures[0].exception(timeout)  # the oldest
        except TimeoutError:
            return False
        return True

    @staticmethod
    def _find_abandoned(board: Board) -> int | None:
        return next((slot for slot in range(board.num_slots) if board.hold_slot(slot)), None)

    def _give_back(self, slot: int) -> None:
        board = self._board
        if board is None:
            return
        board.void(slot)
        board.busy[slot] = 0
        board.release_slot(slot)
        if board.vacancy.value < board.num_slots:
            board.vacancy.post()


class SharedMemoryTransport(SharedTransport[PoolClient]):
    """Requests of any number of clients on this host, through a pool of slots in shared memory.

    A client takes a slot for each request, and gives it back when it has collected the reply, so several requests of
    one client may be in flight. While all slots are in use, ``submit`` waits. What a killed process held comes back to
    the pool. Implements :class:`~meshinfer.inference.protocol.BatchedTransport`.

    Args:
        request_spec: example of one request: a TensorDict (or tensorclass) whose leaves have the shapes and dtypes of
            the real ones; ``batch_size=[B]`` for clients that step ``B`` environments at once. CPU tensors.
        response_spec: example of one reply, with the same ``batch_size``.
        num_slots: requests that can be in flight, of all clients.
        timeout: seconds that ``submit`` waits for a free slot.
        ctx: start method (or context) for a process that serves it, see
            :class:`~meshinfer.server.process.ProcessInferenceServer`; clients may be in processes of any kind.

    Raises:
        ValueError, TypeError: an argument cannot work; names it.
        OSError: there is not enough memory, or no descriptor; says what is needed and what is there.
    """

    transport_kind = "shared_memory"
    _own_client: PoolClient | None = None

    def client(self) -> PoolClient:
        """A new client: picklable, usable by several threads, finds the memory on first use."""
        self._check_open()
        return PoolClient(self._board.handle, self.timeout)

    def submit(self, payload: TensorDictBase) -> SlotFuture:
        """Send a request through a client that the transport keeps for itself."""
        self._check_open()
        if self._own_client is None:
            self._own_client = self.client()
        return self._own_client.submit(payload)

    @property
    def num_clients(self) -> int:
        """Slots in use: the pool does not know whose they are."""
        return self.num_slots - self._board.busy.tobytes().count(0)
