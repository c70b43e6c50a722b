"""Slots: a place for one request, or one reply, of each client, side by side in one block of memory."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from meshinfer.layout import PayloadLayout, RowViews
from meshinfer.rows import Row

__all__ = ["HEADER_BYTES", "Slot", "SlotBank"]

HEADER_BYTES: Final = 64
"""A cache line: who writes one slot's header does not slow down who reads the next one's."""


class Slot:
    """One header and one row of a :class:`SlotBank`, in every form in which they are used.

    Attributes:
        header: eight int64.
        floats: the same bytes as eight float64.
        words: the same bytes as a tensor, int64 ``[8]``.
        row: the packed payload.
        views: of the row's leaves, for one payload.
        block: the row as a block of one, uint8 ``[1, row_bytes]``.
        block_views: of the block, for a batch of one.
    """

    __slots__ = ("block", "block_views", "floats", "header", "row", "views", "words")

    def __init__(self, layout: PayloadLayout, frame: Tensor) -> None:
        octets = memoryview(frame[:HEADER_BYTES].numpy().data).cast("B")
        self.header = octets.cast("q")
        self.floats = octets.cast("d")
        self.words = frame[:HEADER_BYTES].view(torch.int64)
        self.row = Row(frame[HEADER_BYTES : HEADER_BYTES + layout.row_bytes])
        self.views: RowViews = layout.views(self.row.tensor)
        self.block = self.row.tensor.unsqueeze(0)
        self.block_views: RowViews = layout.views(self.block)


class SlotBank:
    """A frame for each slot, all of one layout: private memory, or memory that other processes see too.

    Args:
        layout: of each row.
        num_slots: number of frames.
        memory: uint8 ``[nbytes(layout, num_slots)]`` at a multiple of 64 bytes; zeroed private memory by default.
        min_row_bytes: room for a row, where something larger than a payload must fit.
    """

    def __init__(
        self,
        layout: PayloadLayout,
        num_slots: int,
        memory: Tensor | None = None,
        *,
        min_row_bytes: int = 0,
    ) -> None:
        self.layout = layout
        self.num_slots = num_slots
        stride = _stride(layout, min_row_bytes)
        if memory is None:
            with torch.inference_mode(False):  # of whoever is first: everybody writes to it
                memory = torch.zeros(num_slots * stride, dtype=torch.uint8, device="cpu")
        self.frames = memory.view(num_slots, stride)
        self._slots: list[Slot | None] = [None] * num_slots

    @staticmethod
    def nbytes(layout: PayloadLayout, num_slots: int, *, min_row_bytes: int = 0) -> int:
        """Bytes of ``memory`` for such a bank."""
        return num_slots * _stride(layout, min_row_bytes)

    def __getitem__(self, index: int) -> Slot:
        """The slot, made when it is first used: a client needs one of many."""
        found = self._slots[index]
        if found is None:
            found = self._slots[index] = Slot(self.layout, self.frames[index])
        return found

    def octets(self, index: int) -> memoryview:
        """All room for a row in one slot, for what is no payload."""
        return memoryview(self.frames[index, HEADER_BYTES:].numpy().data).cast("B")


def _stride(layout: PayloadLayout, min_row_bytes: int) -> int:
    room = HEADER_BYTES + max(layout.row_bytes, min_row_bytes)
    return -(-room // HEADER_BYTES) * HEADER_BYTES
