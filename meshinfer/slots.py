"""Rows of requests and replies, side by side, so that a whole batch moves in one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tensordict import TensorDictBase
from torch import Tensor

from meshinfer.layout import PayloadLayout, RowViews

__all__ = ["RowBlock"]


class RowBlock:
    """Staging for up to ``capacity`` rows of one layout, reused from batch to batch.

    The views of its first ``n`` rows are made once for each ``n``, so that a batch costs no view operations.

    Args:
        layout: of each row.
        capacity: the largest number of rows.
    """

    def __init__(self, layout: PayloadLayout, capacity: int) -> None:
        self.layout = layout
        self.capacity = capacity
        self._rows = layout.new_rows(capacity)
        self.rows: tuple[Tensor, ...] = self._rows.unbind(0)
        self._first: dict[int, tuple[Tensor, RowViews]] = {}

    def gather(self, rows: Sequence[Tensor]) -> TensorDictBase:
        """Copy ``rows`` (each uint8[row_bytes]) into the first rows here; the payloads as one TensorDict.

        The TensorDict is a view: it is valid until the next call.
        """
        count = len(rows)
        block, views = self._views(count)
        torch.stack(list(rows), out=block)
        return self.layout.unpack_rows(views, count)

    def pack(self, results: TensorDictBase, count: int) -> None:
        """Write ``count`` payloads into the first rows; errors as in :meth:`PayloadLayout.pack_rows`."""
        self.layout.pack_rows(results, self._views(count)[1], count)

    def _views(self, count: int) -> tuple[Tensor, RowViews]:
        found = self._first.get(count)
        if found is None:
            block = self._rows[:count]
            found = self._first[count] = block, self.layout.views(block)
        return found
