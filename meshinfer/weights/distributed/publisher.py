"""The trainer's end of :class:`~meshinfer.weights.distributed.transport.DistributedWeights`."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping

from torch import Tensor

from meshinfer.errors import ClosedError
from meshinfer.weights.distributed.desk import Desk
from meshinfer.weights.distributed.rows import RowPool, Snapshot
from meshinfer.weights.layout import WeightLayout
from meshinfer.weights.publishing import PublisherBase

__all__ = ["DistributedPublisher"]

_ORIGIN_BITS = 62


class DistributedPublisher(PublisherBase):
    """Made by :meth:`DistributedWeights.publisher
    <meshinfer.weights.distributed.transport.DistributedWeights.publisher>`.

    :meth:`publish` copies the weights once, and announces them to whoever waits; what comes from a GPU is copied to the
    memory of this process.
    """

    def __init__(
        self,
        layout: WeightLayout,
        desk: Desk,
        pool: RowPool,
        is_closed: Callable[[], bool],
        source: object,
        version: int,
        cast: bool,
    ) -> None:
        super().__init__(layout, source, version, cast)
        self._desk = desk
        self._pool = pool
        self._transport_is_closed = is_closed
        self._origin = secrets.randbits(_ORIGIN_BITS)
        self._last: Snapshot | None = None

    @property
    def is_open(self) -> bool:
        """Whether it can publish."""
        return not (self._closed or self._transport_is_closed())

    @property
    def subscribers(self) -> int:
        """How many are connected now."""
        return self._desk.subscribers

    def _store(self, version: int, given: Mapping[str, Tensor]) -> None:
        row = self._pool.take()
        self.layout.write(row.views, given, None if self._last is None else self._last.row.views)
        self._last = Snapshot(self._pool, row, self._origin, version)
        self._desk.publish(self._last)

    def _wait(self, version: int, timeout: float) -> None:
        if self._last is None:
            return
        late = self._desk.wait(self._origin, version, timeout, lambda: self._closed)
        self._check_open()
        if late:
            raise TimeoutError(
                f"version {version} was not served within {timeout:g} s by {', '.join(late)}"
            )

    def _close(self) -> None:
        self._last = None
        self._desk.note_change()

    def _check_open(self) -> None:
        if self._transport_is_closed():
            raise ClosedError("this weight transport was closed")
        super()._check_open()
