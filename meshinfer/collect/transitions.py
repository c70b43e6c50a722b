"""The way of transitions from a worker to the driver: a ring of rows for each, filled and emptied without a lock.

Every word has one writer. A worker fills the row behind the last one and counts it; the driver copies whole rows out
and counts them. Neither waits for the other unless the ring is full, or all rings together have too little.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from meshinfer.layout import PayloadLayout
from meshinfer.memory import BlockHandle, SharedBlock
from meshinfer.semaphore import SEMAPHORE_BYTES, Semaphore, memory_fence

__all__ = [
    "CLOSING",
    "LOOK_SECONDS",
    "RESETTING",
    "STEPPING",
    "Ring",
    "RingHandle",
    "Rings",
    "array_of",
]

LOOK_SECONDS: Final = 0.25
"""How often a waiter looks whether the other side lives. Nobody is woken by a death."""

RESETTING: Final = 1
STEPPING: Final = 2
CLOSING: Final = 3
"""What a worker has called of its environment, see :meth:`Ring.enter`."""

_LINE = 64
_WORDS_BYTES = 2 * _LINE
_HEAD_BYTES = _WORDS_BYTES + SEMAPHORE_BYTES
# Written by the worker; then, in the next cache line, by the driver.
_WRITTEN, _ASLEEP, _CALL, _SINCE = 0, 1, 2, 3
_READ, _WANTED, _STOP = 8, 9, 10
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def array_of(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The memory of ``tensor`` as an array to copy from and to; of integers, where NumPy lacks its dtype."""
    try:
        return tensor.numpy()
    except TypeError:
        return tensor.view(_INTEGERS[tensor.element_size()]).numpy()


class Ring:
    """Rows of one worker, as either side sees them.

    Args:
        memory: uint8 ``[Ring.nbytes(layout, capacity)]`` at a multiple of 64 bytes.
        bell: rings at the driver.
        layout: of a row, which is what one step gave.
        capacity: rows.
        create: the memory is new.
    """

    def __init__(
        self,
        memory: Tensor,
        bell: Semaphore,
        layout: PayloadLayout,
        capacity: int,
        *,
        create: bool = False,
    ) -> None:
        self._memory = memory
        self._bell = bell
        self.capacity = capacity
        self._words = memoryview(memory[:_WORDS_BYTES].numpy().data).cast("B").cast("q")
        self._room = Semaphore(memory.data_ptr() + _WORDS_BYTES, create=create)
        nbytes = capacity * layout.row_bytes
        self.rows = memory[_HEAD_BYTES : _HEAD_BYTES + nbytes].view(capacity, layout.row_bytes)

    @staticmethod
    def nbytes(layout: PayloadLayout, capacity: int) -> int:
        """Bytes of ``memory``, a multiple of 64."""
        return -(-(_HEAD_BYTES + capacity * layout.row_bytes) // _LINE) * _LINE

    @property
    def written(self) -> int:
        """Rows that the worker has filled since the beginning."""
        return self._words[_WRITTEN]

    @property
    def read(self) -> int:
        """Rows that the driver has taken since the beginning."""
        return self._words[_READ]

    # For the worker.

    def next_row(self) -> int | None:
        """Index of the row to fill, once the driver has made room for it; ``None`` when told to stop."""
        words = self._words
        while not words[_STOP]:
            if words[_WRITTEN] - words[_READ] < self.capacity:
                return words[_WRITTEN] % self.capacity
            words[_ASLEEP] = 1
            if words[_WRITTEN] - words[_READ] >= self.capacity and not words[_STOP]:
                self._room.wait(LOOK_SECONDS)
            words[_ASLEEP] = 0
        return None

    def enter(self, call: int) -> None:
        """The environment is called now: :data:`RESETTING`, :data:`STEPPING` or :data:`CLOSING`."""
        self._words[_SINCE] = time.monotonic_ns()
        self._words[_CALL] = call

    def leave(self) -> None:
        """It has returned."""
        self._words[_CALL] = 0

    def publish(self) -> None:
        """The row has been filled; rings if the driver waits for as many as there are now."""
        words = self._words
        written = words[_WRITTEN] + 1
        memory_fence()
        words[_WRITTEN] = written
        # Had the driver just begun to wait without our seeing it, it would look again by itself.
        if 0 < words[_WANTED] <= written:
            self.ring()

    def ring(self) -> None:
        """Wake the driver."""
        self._bell.post()

    # For the driver.

    @property
    def call(self) -> tuple[int, int]:
        """What the worker has called of its environment, 0 for nothing, and the ``time.monotonic_ns()`` since when."""
        return self._words[_CALL], self._words[_SINCE]

    def want(self, rows: int) -> None:
        """Have the driver's bell rung when ``rows`` more have been filled; 0 for not at all."""
        self._words[_WANTED] = min(self.written + rows, self.read + self.capacity) if rows else 0

    def take(self, most: int, *, keep: int = 0) -> Iterator[Tensor]:
        """At most ``most`` of the oldest rows, uint8 ``[n, row_bytes]`` each; they are free when the next is asked for.

        Args:
            most: rows.
            keep: rows to leave there, the newest ones.
        """
        words = self._words
        ready = min(most, words[_WRITTEN] - words[_READ] - keep)
        memory_fence()
        while ready > 0:
            begin = words[_READ] % self.capacity
            count = min(ready, self.capacity - begin)
            yield self.rows[begin : begin + count]
            memory_fence()
            words[_READ] += count
            ready -= count
            if words[_ASLEEP]:
                self._room.post()

    def stop(self) -> None:
        """Tell the worker to stop when its step is over."""
        self._words[_STOP] = 1
        self._room.post()


@dataclass(frozen=True)
class RingHandle:
    """A ring, for the worker. Picklable where it is shared between processes."""

    memory: Tensor | BlockHandle
    offset: int
    layout: PayloadLayout
    capacity: int

    def open(self) -> Ring:
        """The ring; errors as in :meth:`~meshinfer.memory.BlockHandle.open`."""
        whole = self.memory.open().memory if isinstance(self.memory, BlockHandle) else self.memory
        part = whole[self.offset : self.offset + Ring.nbytes(self.layout, self.capacity)]
        return Ring(part, Semaphore(whole.data_ptr()), self.layout, self.capacity)


class Rings:
    """The rings of all workers and the driver's bell, in one memory.

    Args:
        layout: of a row.
        capacity: rows of each ring.
        count: workers.
        shared: whether workers are processes.

    Raises:
        OSError: there is not enough memory, or no descriptor; says what is needed and what is there.
    """

    def __init__(self, layout: PayloadLayout, capacity: int, count: int, *, shared: bool) -> None:
        size = Ring.nbytes(layout, capacity)
        nbytes = SEMAPHORE_BYTES + count * size
        self._block = SharedBlock.create(nbytes, "a collector's buffer") if shared else None
        self._memory = self._block.memory if self._block is not None else _private(nbytes)
        self.bell = Semaphore(self._memory.data_ptr(), create=True)
        self._offsets = [SEMAPHORE_BYTES + index * size for index in range(count)]
        self._layout, self._capacity = layout, capacity
        parts = [self._memory[offset : offset + size] for offset in self._offsets]
        self.rings = [Ring(part, self.bell, layout, capacity, create=True) for part in parts]

    def handle(self, index: int) -> RingHandle:
        """The ring of one worker."""
        memory = self._memory if self._block is None else self._block.handle
        return RingHandle(memory, self._offsets[index], self._layout, self._capacity)


def _private(nbytes: int) -> Tensor:
    with torch.inference_mode(False):
        memory = torch.zeros(nbytes + _LINE, dtype=torch.uint8, device="cpu")
    offset = -memory.data_ptr() % _LINE
    return memory[offset : offset + nbytes]
