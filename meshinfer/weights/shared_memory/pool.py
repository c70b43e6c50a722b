"""The publisher's blocks: as many as its subscribers keep from being written, and one more."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final, NamedTuple

from torch import Tensor

from meshinfer.memory import SharedBlock
from meshinfer.weights.layout import WeightLayout
from meshinfer.weights.shared_memory.board import Record, WeightBoard

__all__ = ["BlockPool"]

WINDOW: Final = 16
"""Publications after which blocks are given back that none of them needed."""


class _Pooled(NamedTuple):
    block: SharedBlock
    views: Mapping[str, Tensor]


class BlockPool:
    """Memory for versions; it grows when none is free, and is written again and again, since warm memory is faster.

    Args:
        board: of the transport.
        layout: of its weights.
    """

    def __init__(self, board: WeightBoard, layout: WeightLayout) -> None:
        self.pid = os.getpid()
        self._board = board
        self._layout = layout
        self._pooled: dict[int, _Pooled] = {}
        self._spare: list[int] = []

    def __len__(self) -> int:
        return len(self._pooled)

    def take(self) -> int:
        """A block that nobody reads.

        Raises:
            OSError: a further one is needed, and there is no memory or no descriptor for it.
        """
        used = self._board.used()
        free = sorted(self._pooled.keys() - used)
        if free:
            return self._shrink(free)
        self._spare = []
        index = next(i for i in range(self._board.num_records) if i not in used)
        purpose = f"version buffer {len(self._pooled) + 1} of a weight transport"
        remedy = "release the updates that are not needed any more"
        block = SharedBlock.create(self._layout.row_bytes, purpose, remedy)
        self._pooled[index] = _Pooled(block, self._layout.views(block.memory))
        return index

    def views(self, index: int) -> Mapping[str, Tensor]:
        """The weights in a block."""
        return self._pooled[index].views

    def record(self, index: int, session: int, version: int) -> Record:
        """What to tell subscribers of a block."""
        handle = self._pooled[index].block.handle
        return Record(handle.pid, handle.descriptor, handle.token, session, version)

    def keep_newest(self) -> None:
        """Give all others back."""
        self._give_back(self._pooled.keys() - {self._board.newest_index})

    def _shrink(self, free: list[int]) -> int:
        """The first of ``free``; of the others those go that were not needed for long."""
        self._spare.append(len(free) - 1)
        if len(self._spare) >= WINDOW:
            surplus, self._spare = min(self._spare), []
            self._give_back(set(free[len(free) - surplus :]))
        return free[0]

    def _give_back(self, indices: set[int]) -> None:
        for index in indices:
            self._board.forget(index)
            del self._pooled[index]
