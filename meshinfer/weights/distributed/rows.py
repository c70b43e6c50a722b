"""Memory for whole versions, used again once nobody has it."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

from torch import Tensor

from meshinfer.weights.layout import WeightLayout

__all__ = ["RowPool", "Snapshot", "WeightRow"]

_SPARE_ROWS = 2
"""One to write, one to read: more are made while more are in use, and dropped afterwards."""


class WeightRow:
    """One row and its weights by name."""

    __slots__ = ("tensor", "views")

    def __init__(self, layout: WeightLayout) -> None:
        self.tensor: Tensor = layout.new_row()
        self.views: Mapping[str, Tensor] = layout.views(self.tensor)


class RowPool:
    """Rows of one layout; for any thread. A new row has no pages until it is written."""

    def __init__(self, layout: WeightLayout) -> None:
        self._layout = layout
        self._spare: list[WeightRow] = []

    def take(self) -> WeightRow:
        """A row that nobody has."""
        try:
            return self._spare.pop()
        except IndexError:
            return WeightRow(self._layout)

    def give_back(self, row: WeightRow) -> None:
        """Nobody reads it any more. Takes no lock: the garbage collector may call."""
        if len(self._spare) < _SPARE_ROWS:
            self._spare.append(row)


class Snapshot:
    """One published version; its row is used again when the last one lets go of this object.

    Args:
        row: of ``pool``, written, and never again while this lives.
        origin: of the publisher, different for each.
        version: as :meth:`WeightPublisher.publish <meshinfer.weights.protocol.WeightPublisher.publish>` returns it.
    """

    __slots__ = ("__weakref__", "origin", "row", "version")

    def __init__(self, pool: RowPool, row: WeightRow, origin: int, version: int) -> None:
        self.row = row
        self.origin = origin
        self.version = version
        weakref.finalize(self, pool.give_back, row).atexit = False
