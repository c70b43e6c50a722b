"""Rows of requests and replies, side by side, so that a whole batch moves in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from meshinfer.layout import PayloadLayout, RowViews
from meshinfer.streams import mark

__all__ = ["Row", "RowBlock", "copy_row", "read_rows"]

_SMALL_ROW = 1 << 14


class Row:
    """One packed payload: the same bytes as a tensor and as a buffer.

    Attributes:
        tensor: uint8 ``[row_bytes]``, on any device.
        on_host: whether it lies in CPU memory.
        octets: the same bytes as a ``memoryview``; ``None`` on a device.
    """

    __slots__ = ("octets", "on_host", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.on_host = tensor.device.type == "cpu"
        self.octets: Any = memoryview(tensor.numpy().data).cast("B") if self.on_host else None


def copy_row(source: Row, target: Row) -> None:
    """Copy a row in CPU memory into another of the same layout.

    A small one without torch, whose every call lets go of the interpreter lock: under load, each time, to a thread that
    has received a request. A large one with it, so that others run meanwhile.
    """
    if len(source.octets) <= _SMALL_ROW:
        target.octets[:] = source.octets
    else:
        target.tensor.copy_(source.tensor)


class RowBlock:
    """Staging for up to ``capacity`` rows of one layout, reused from batch to batch.

    The views of its first ``n`` rows are made once for each ``n``, so that a batch costs no view
    operations. Whole rows are gathered, and their leaves viewed: measured with 16 requests, as fast
    as a gather for each leaf where there is one leaf, three times faster where there are eight.

    Args:
        layout: of each row.
        capacity: the largest number of rows.
        device: where the rows lie; :meth:`gather` is for those in CPU memory.
        pinned: page-locked, so that copies to and from a GPU run while Python goes on.

    Raises:
        ValueError: so many do not fit into memory.
    """

    def __init__(
        self,
        layout: PayloadLayout,
        capacity: int,
        *,
        device: torch.device | str = "cpu",
        pinned: bool = False,
    ) -> None:
        self.layout = layout
        self.capacity = capacity
        try:
            self._rows = _zeros((capacity, layout.row_bytes), device, pinned)
        except (RuntimeError, MemoryError) as error:
            where = " page-locked" if pinned else "" if str(device) == "cpu" else f" {device}"
            raise ValueError(
                f"staging for {capacity} {layout.name} rows of {layout.row_bytes} bytes does not "
                f"fit into{where} memory; lower max_batch_size"
            ) from error
        self.rows = [Row(row) for row in self._rows.unbind(0)]
        self._first: dict[int, tuple[Tensor, RowViews]] = {}

    def gather(self, rows: Sequence[Row]) -> TensorDictBase:
        """Copy ``rows`` into the first rows here; the payloads as one batch.

        The TensorDict is a view: it is valid until the next call.
        """
        block, views = self._views(len(rows))
        if self.layout.row_bytes <= _SMALL_ROW:
            for row, target in zip(rows, self.rows, strict=False):
                target.octets[:] = row.octets
        else:
            torch.stack([row.tensor for row in rows], out=block)
        return read_rows(self.layout, views, block)

    def pack(self, results: TensorDictBase, count: int) -> None:
        """Write ``count`` payloads into the first rows; errors as in ``PayloadLayout.pack_rows``."""
        self.layout.pack_rows(results, self._views(count)[1], count)

    def head(self, count: int) -> Tensor:
        """The first ``count`` rows, uint8 ``[count, row_bytes]``."""
        return self._views(count)[0]

    def batch(self, count: int) -> TensorDictBase:
        """The payloads in the first ``count`` rows, as :meth:`gather` gives them."""
        block, views = self._views(count)
        return read_rows(self.layout, views, block)

    def _views(self, count: int) -> tuple[Tensor, RowViews]:
        found = self._first.get(count)
        if found is None:
            block = self._rows[:count]
            found = self._first[count] = block, self.layout.views(block)
        return found


def read_rows(layout: PayloadLayout, views: RowViews, block: Tensor) -> TensorDictBase:
    """The payloads in ``block`` as a policy's input, which shares its memory.

    The policy gets the views that we keep, so what it did to the last ones in place is undone first:
    ``requires_grad_()`` would forbid our next write, ``squeeze_()`` would change the next batch.
    """
    for tensor, shape in zip(views.tensors, views.shapes, strict=True):
        if tensor.requires_grad or tensor.shape != shape:
            views.tensors[:] = layout.views(block).tensors
            break
    return layout.unpack_rows(views)


def _zeros(shape: tuple[int, int], device: torch.device | str, pinned: bool) -> Tensor:
    """Bytes that can be written in and outside inference mode, wherever they were made."""
    with torch.inference_mode(False):
        rows = torch.zeros(shape, dtype=torch.uint8, device=device, pin_memory=pinned)
    mark(rows.device).wait()  # another thread, whose stream may be another one, writes here next
    return rows
