"""Rows for a policy on a GPU, or of clients whose rows lie on one: one copy each way for a batch.

Rows in CPU memory are gathered into page-locked staging and copied to the device at once; results are packed there and
come back at once. Rows on the device never leave it. Everything is put into the calling thread's current stream. A pass
waits for one mark in that stream, after the copy back, and for nothing else that the device does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from tensordict import TensorDictBase
from torch import Tensor

from meshinfer.layout import PayloadLayout, RowViews
from meshinfer.rows import Row, RowBlock, copy_row, read_rows
from meshinfer.streams import PASSED, Mark, mark

__all__ = ["DeviceReplies", "DeviceRequests", "LandedRequests", "replace_broken"]

_Broken = Callable[[], Sequence[int]]
_Stamp = tuple[tuple[str, ...], int]


class _Staging:
    """A block of rows in page-locked memory, and one on the device.

    Args:
        layout: of each row.
        capacity: the largest number of rows.
        device: of the second block.

    Raises:
        ValueError: so many rows do not fit into memory.
    """

    def __init__(self, layout: PayloadLayout, capacity: int, device: torch.device) -> None:
        self._layout = layout
        self._host = RowBlock(layout, capacity, pinned=device.type == "cuda")
        self._block = RowBlock(layout, capacity, device=device)
        self.device = self._block.head(1).device  # with its index


class DeviceRequests(_Staging):
    """Staging for up to ``capacity`` requests to a policy on ``device``, reused from batch to batch.

    Args:
        layout, capacity, device: of the rows, and where the policy computes; see the base.
    """

    def __init__(self, layout: PayloadLayout, capacity: int, device: torch.device) -> None:
        super().__init__(layout, capacity, device)
        self._leaving: Mark = PASSED

    def lies_here(self, row: Row) -> bool:
        """Whether the policy can read ``row`` in place."""
        return not row.on_host and row.tensor.device == self.device

    def read(self, views: RowViews, block: Tensor) -> TensorDictBase:
        """The payloads in ``block``, on the policy's device, as its input; see :func:`~meshinfer.rows.read_rows`."""
        return read_rows(self._layout, views, block).auto_device_()

    def gather(self, rows: Sequence[Row], broken: _Broken) -> TensorDictBase:
        """The payloads in ``rows``, in their order, as one batch on the device. Valid until the next call.

        Rows in CPU memory may be written again on return, those on a device after what the stream has got by then.

        Args:
            rows: in CPU memory or on any device.
            broken: called when those in CPU memory have been copied: which of ``rows`` may be nonsense, because they
                were written meanwhile. The first whole one takes their places.
        """
        self._collect(rows, broken)
        return self._block.batch(len(rows)).auto_device_()

    def _collect(self, rows: Sequence[Row], broken: _Broken) -> None:
        """Bring ``rows`` into the first rows of the device's block."""
        held = [row for row in rows if row.on_host]
        if held:
            _wait_for(self._leaving)
        for row, target in zip(held, self._host.rows, strict=False):
            copy_row(row, target)
        block = self._block.head(len(rows))
        if len(held) == len(rows):
            replace_broken(self._host.rows, len(rows), broken())
            return self._upload(block)
        order = _order(len(rows), broken())
        sources = self._on_device(rows, len(held))
        torch.stack([sources[index] for index in order], out=block)

    def _on_device(self, rows: Sequence[Row], held: int) -> list[Tensor]:
        """Each row as a tensor on the device."""
        landed: Iterator[Tensor] = iter(())
        if held:
            block = torch.empty_like(self._block.head(held))
            self._upload(block)
            landed = iter(block.unbind(0))
        return [
            next(landed) if row.on_host else row.tensor.to(self.device, non_blocking=True)
            for row in rows
        ]

    def _upload(self, block: Tensor) -> None:
        """Begin to copy as many rows of the page-locked ones as ``block`` has."""
        block.copy_(self._host.head(block.shape[0]), non_blocking=True)
        self._leaving = mark(self.device)


class LandedRequests(DeviceRequests):
    """Staging for a policy on the CPU whose clients have rows on ``device``: one copy down for a batch, waited for."""

    def lies_here(self, row: Row) -> bool:
        """See :class:`DeviceRequests`."""
        return row.on_host

    def read(self, views: RowViews, block: Tensor) -> TensorDictBase:
        """See :class:`DeviceRequests`."""
        return read_rows(self._layout, views, block)

    def gather(self, rows: Sequence[Row], broken: _Broken) -> TensorDictBase:
        """See :class:`DeviceRequests`; the batch is in CPU memory."""
        if all(row.on_host for row in rows):
            _wait_for(self._leaving)
            for row, target in zip(rows, self._host.rows, strict=False):
                copy_row(row, target)
            replace_broken(self._host.rows, len(rows), broken())
            return self._host.batch(len(rows))
        self._collect(rows, broken)
        count = len(rows)
        self._host.head(count).copy_(self._block.head(count), non_blocking=True)
        mark(self.device).wait()
        return self._host.batch(count)


class DeviceReplies(_Staging):
    """Staging for up to ``capacity`` replies of a policy on ``device``, or to clients whose rows lie there.

    Results are packed where they are, on the device or in CPU memory.

    Args:
        layout, capacity, device: of the rows, and where the policy computes or the clients' rows lie; see the base.
    """

    def __init__(self, layout: PayloadLayout, capacity: int, device: torch.device) -> None:
        super().__init__(layout, capacity, device)
        self.rows = self._host.rows
        """In CPU memory."""
        self._on_host = False
        self._under_way: Mark = PASSED

    def pack(self, results: TensorDictBase, count: int, stamp: _Stamp | None = None) -> None:
        """Write ``count`` payloads into the first rows; errors as in ``PayloadLayout.pack_rows``.

        Args:
            results: leading dimension ``count`` times the layout's ``batch_size``.
            count: at most the capacity.
            stamp: a key and the policy version to write there instead of what ``results`` has.
        """
        key, version = stamp or (None, 0)
        self._on_host = self._lie_on_host(results, key)
        if key is not None:
            device = torch.device("cpu") if self._on_host else self.device
            versions = torch.full(results.batch_size, version, dtype=torch.int64, device=device)
            results = results.copy().set(key, versions)
        if self._on_host:
            _wait_for(self._under_way)
        (self._host if self._on_host else self._block).pack(results, count)

    def deliver(self, targets: Mapping[int, Row], count: int) -> None:
        """Write what was packed into those ``targets`` that lie on a device, each by its row's number.

        For the others, :attr:`rows` has it on return. They are waited for, if there are any, so that an error of the
        device is raised here, before anybody is answered.
        """
        away = {index: row.tensor for index, row in targets.items() if not row.on_host}
        fetched: Mark = PASSED
        if self._on_host and away:
            self._copy(self._host, self._block, count)
        elif not self._on_host and len(away) < len(targets):
            fetched = self._copy(self._block, self._host, count)
        if away:
            packed = [self._block.rows[index].tensor for index in away]
            torch._foreach_copy_(list(away.values()), packed)
        fetched.wait()

    def land(
        self, results: TensorDictBase, count: int, stamp: _Stamp | None = None
    ) -> TensorDictBase:
        """Pack, and give the declared leaves in CPU memory, as one batch, which is in :attr:`rows` too.

        Valid until the next call.
        """
        self.pack(results, count, stamp)
        if not self._on_host:
            self._copy(self._block, self._host, count).wait()
        return self._host.batch(count)

    def _copy(self, source: RowBlock, target: RowBlock, count: int) -> Mark:
        target.head(count).copy_(source.head(count), non_blocking=True)
        self._under_way = mark(self.device)
        return self._under_way

    def _lie_on_host(self, results: TensorDictBase, stamped: tuple[str, ...] | None) -> bool:
        """One leaf tells: a policy whose results are apart is served all the same, with more copies."""
        key = next((leaf.key for leaf in self._layout.leaves if leaf.key != stamped), None)
        try:
            leaf = None if key is None else results.get(key, None)
        except (AttributeError, LookupError, TypeError, ValueError, RuntimeError):
            return False  # packing says what is wrong
        return isinstance(leaf, Tensor) and leaf.device.type == "cpu" != self.device.type


def _wait_for(copied: Mark) -> None:
    """Until page-locked memory may be written. It may long since: only a policy that raised lets us come too early."""
    if not copied.passed():
        copied.wait()


def replace_broken(rows: Sequence[Row], count: int, broken: Sequence[int]) -> None:
    """Put the first whole one of the first ``count`` rows, in CPU memory, in the places of those that are broken."""
    if broken:
        for index, source in enumerate(_order(count, broken)):
            if source != index:
                copy_row(rows[source], rows[index])


def _order(count: int, broken: Sequence[int]) -> list[int]:
    """Which row goes where. Where all are broken, nobody has a neighbour to spoil."""
    order = list(range(count))
    if broken and len(broken) < count:
        whole = next(index for index in order if index not in broken)
        for index in broken:
            order[index] = whole
    return order
