"""What every transport with fixed-layout rows does alike, whatever its wire."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase
from torch import Tensor

from meshinfer.device_rows import DeviceReplies, DeviceRequests, LandedRequests, replace_broken
from meshinfer.inference.draining import Draining
from meshinfer.inference.remote_errors import encode_exception
from meshinfer.inference.version import declared_stamp, stamp_version
from meshinfer.layout import PayloadLayout, RowViews
from meshinfer.rows import Row, RowBlock, copy_row, read_rows

__all__ = ["RowFrame", "RowRequest", "RowwiseTransport", "row_layouts", "unpacked", "version_of"]


class RowFrame(Protocol):
    """Where one row lies, in the forms in which it is used; see :class:`~meshinfer.slots.Slot`.

    Of a client with rows on a device, all of them lie there; ``row.on_host`` tells.
    """

    row: Row
    views: RowViews
    block: Tensor
    block_views: RowViews


class RowRequest(Protocol):
    """One request at the server."""

    arrived: float
    interaction: int

    @property
    def frame(self) -> Any:
        """The :class:`RowFrame` with the packed request, until :meth:`release`."""

    @property
    def given_up(self) -> bool:
        """Whether nobody waits for the reply, so that the row may have been written over."""

    def release(self) -> None:
        """The row has been copied, or will never be: the next request may use it. More than once is as once.

        One on a device may be written when its device has done what the calling thread's current stream has got.
        """

    def reply_frame(self) -> Any:
        """The :class:`RowFrame` to write the reply into, in CPU memory or on a device as the request's."""

    def reply(self, frame: Any, policy_version: int | None) -> None:
        """Send it. Never waits; a client that has gone is not an error.

        A row on a device has been written when its device has done what the calling thread's current stream has got.
        """

    def reply_error(self, data: bytes) -> None:
        """Send an encoded exception. Likewise."""


class RowwiseTransport(Draining):
    """The server's side of a :class:`~meshinfer.inference.protocol.BatchedTransport`, over :class:`RowRequest`.

    Args:
        request_spec, response_spec: examples of one request and of one reply with the same ``batch_size``, or layouts.

    Raises:
        TypeError, ValueError: a spec cannot work; names the key.
    """

    policy_version_key: tuple[str, ...] | None
    stages_devices: bool = True
    """Whether :meth:`request_batch` and :meth:`response_batch` take the policy's device."""
    row_device: torch.device | None = None
    """Where rows of some clients lie, if not all are in CPU memory."""
    may_lead: bool = True
    """Whether a thread that received a request may compute it: nobody waits for what it would receive meanwhile."""
    _closed: bool

    def __init__(self, request_spec: Any, response_spec: Any) -> None:
        self.request_layout, self.response_layout = row_layouts(request_spec, response_spec)
        self._declared = frozenset(leaf.key for leaf in self.response_layout.leaves)

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closed

    def drain_slots(self, max_items: int) -> list[Any]:
        """At most ``max_items`` waiting requests, oldest first, still in their rows."""
        raise TypeError(f"{type(self).__name__} does not say how it drains")

    def drain_with_timing(
        self, max_items: int
    ) -> tuple[list[TensorDictBase], list[Any], list[float]]:
        """See :meth:`~meshinfer.inference.draining.Draining.drain_with_timing`."""
        return unpacked(self.drain_slots(max_items), self.request_layout)

    def resolve(self, callback: Any, result: TensorDictBase) -> None:
        """Send ``result`` (the ``batch_size`` of the response spec) to the client behind ``callback``."""
        rows = result.reshape(-1) if result.batch_dims else result.unsqueeze(0)
        self._resolve_single(callback, rows, version_of(result, self.policy_version_key))

    def resolve_exception(self, callback: Any, exc: BaseException) -> None:
        """Make the client behind ``callback`` raise ``exc``."""
        callback.release()
        callback.reply_error(encode_exception(exc))

    def request_batch(
        self, capacity: int, device: torch.device | None = None
    ) -> RowBlock | DeviceRequests:
        """Staging for ``capacity`` requests; ``device`` is the policy's, ``None`` for the CPU."""
        if device is not None:
            return DeviceRequests(self.request_layout, capacity, device)
        if self.row_device is not None:
            return LandedRequests(self.request_layout, capacity, self.row_device)
        return RowBlock(self.request_layout, capacity)

    def response_batch(
        self, capacity: int, device: torch.device | None = None
    ) -> RowBlock | DeviceReplies:
        """Staging for ``capacity`` replies; ``device`` as for :meth:`request_batch`."""
        where = self.row_device if device is None else device
        if where is None:
            return RowBlock(self.response_layout, capacity)
        return DeviceReplies(self.response_layout, capacity, where)

    def gather_requests(
        self, slots: Sequence[Any], out: RowBlock | DeviceRequests
    ) -> TensorDictBase:
        """The policy's input: the requests' batch dimensions are flattened into one. Valid until the next gather."""
        if isinstance(out, DeviceRequests):
            return self._gather_for_device(slots, out)
        if len(slots) == 1:  # read in place: it is released when it has been answered
            frame = slots[0].frame
            return read_rows(self.request_layout, frame.block_views, frame.block)
        batch = out.gather([request.frame.row for request in slots])
        broken = _given_up(slots)
        if broken:
            replace_broken(out.rows, len(slots), broken)
            batch = out.batch(len(slots))
        for request in slots:
            request.release()
        return batch

    def _gather_for_device(self, slots: Sequence[Any], out: DeviceRequests) -> TensorDictBase:
        frames = [request.frame for request in slots]
        if len(slots) == 1 and out.lies_here(frames[0].row):
            return out.read(frames[0].block_views, frames[0].block)
        batch = out.gather([frame.row for frame in frames], lambda: _given_up(slots))
        for request in slots:
            request.release()
        return batch

    def resolve_batch(
        self,
        slots: Sequence[Any],
        results: TensorDictBase,
        out: RowBlock | DeviceReplies | None = None,
        *,
        policy_version: int | None = None,
    ) -> None:
        """Send each request its rows of ``results``.

        Args:
            slots: the requests, as gathered.
            results: leading dimension ``len(slots)`` times the ``batch_size`` of one request.
            out: staging from :meth:`response_batch`.
            policy_version: of the weights that computed ``results``.

        Raises:
            KeyError, ValueError, TypeError: ``results`` does not have what the response spec declares; nothing was
                sent.
        """
        if out is None and self.row_device is not None:
            out = self.response_batch(len(slots))
        # A leaf of the response, besides the header that always carries it.
        stamp = declared_stamp(self.policy_version_key, policy_version, self._declared)
        if isinstance(out, DeviceReplies):
            out.pack(results, len(slots), stamp)
            return self._deliver_from_device(slots, out, policy_version)
        if stamp is not None:
            results = stamp_version(results.copy(), *stamp)
        if len(slots) == 1:
            return self._resolve_single(slots[0], results, policy_version)
        block = RowBlock(self.response_layout, len(slots)) if out is None else out
        block.pack(results, len(slots))
        for request, row in zip(slots, block.rows, strict=False):
            if request.given_up:
                continue  # its place may hold the reply to another one by now
            frame = request.reply_frame()
            copy_row(row, frame.row)
            request.reply(frame, policy_version)

    def _deliver_from_device(
        self, slots: Sequence[Any], out: DeviceReplies, version: int | None
    ) -> None:
        if len(slots) == 1:
            slots[0].release()  # it may have been read in place
        frames = {
            index: request.reply_frame()
            for index, request in enumerate(slots)
            if not request.given_up
        }
        out.deliver({index: frame.row for index, frame in frames.items()}, len(slots))
        for index, frame in frames.items():
            request = slots[index]
            if frame.row.on_host:
                if request.given_up:
                    continue  # since then, and its place may hold the reply to another one
                copy_row(out.rows[index], frame.row)
            request.reply(frame, version)

    def _resolve_single(self, request: Any, results: TensorDictBase, version: int | None) -> None:
        if request.given_up:
            return request.release()  # type: ignore[no-any-return]  # its place may hold another one's reply by now
        frame = request.reply_frame()
        self.response_layout.pack_rows(results, frame.block_views, 1)
        request.release()
        request.reply(frame, version)


def _given_up(slots: Sequence[Any]) -> list[int]:
    """Rows that were written over while they were copied may be nonsense, which must not spoil their neighbours."""
    return [index for index, request in enumerate(slots) if request.given_up]


def unpacked(
    requests: list[Any], layout: PayloadLayout | None
) -> tuple[list[TensorDictBase], list[Any], list[float]]:
    """Each request as an independent TensorDict, its row released; the requests; when each arrived.

    Args:
        layout: of the rows; known if there is a request.
    """
    payloads: list[TensorDictBase] = []
    for request in requests:
        assert layout is not None
        payloads.append(layout.unpack(request.frame.views))
        request.release()
    return payloads, requests, [request.arrived for request in requests]


def row_layouts(request_spec: Any, response_spec: Any) -> tuple[PayloadLayout, PayloadLayout]:
    """Layouts of request and reply from their specs; errors as :class:`RowwiseTransport`."""
    request, response = _layout(request_spec, "request"), _layout(response_spec, "response")
    if request.batch_size != response.batch_size:
        raise ValueError(
            f"request_spec has batch_size {list(request.batch_size)}, response_spec "
            f"{list(response.batch_size)}; a reply has a row for each row of its request"
        )
    return request, response


def _layout(spec: Any, name: str) -> PayloadLayout:
    return spec if isinstance(spec, PayloadLayout) else PayloadLayout.from_spec(spec, name=name)


def version_of(result: TensorDictBase, key: tuple[str, ...] | None) -> int | None:
    """The policy version that ``result`` carries under ``key``, ``None`` for none."""
    stamp = None if key is None else result.get(key, None)
    return int(stamp.reshape(-1)[0]) if isinstance(stamp, Tensor) and stamp.numel() else None
