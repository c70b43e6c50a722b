"""What every transport with fixed-layout rows does alike, whatever its wire."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tensordict import TensorDictBase
from torch import Tensor

from meshinfer.inference.remote_errors import encode_exception
from meshinfer.inference.version import stamp_version
from meshinfer.layout import PayloadLayout, RowViews
from meshinfer.rows import Row, RowBlock, copy_row, read_rows

__all__ = ["RowFrame", "RowRequest", "RowwiseTransport", "row_layouts", "version_of"]


class RowFrame(Protocol):
    """Where one row lies, in the forms in which it is used; see :class:`~meshinfer.slots.Slot`."""

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
        """The row has been copied, or will never be: the next request may use it."""

    def reply_frame(self) -> Any:
        """The :class:`RowFrame` to write the reply into."""

    def reply(self, frame: Any, policy_version: int | None) -> None:
        """Send it. Never waits; a client that has gone is not an error."""

    def reply_error(self, data: bytes) -> None:
        """Send an encoded exception. Likewise."""


class RowwiseTransport:
    """The server's side of a :class:`~meshinfer.inference.protocol.BatchedTransport`, over :class:`RowRequest`.

    Args:
        request_spec, response_spec: examples of one request and of one reply with the same ``batch_size``, or layouts.

    Raises:
        TypeError, ValueError: a spec cannot work; names the key.
    """

    policy_version_key: tuple[str, ...] | None
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

    def drain(self, max_items: int) -> tuple[list[TensorDictBase], list[Any]]:
        """At most ``max_items`` waiting requests as independent TensorDicts, and a handle for each."""
        payloads, requests, _ = self.drain_with_timing(max_items)
        return payloads, requests

    def drain_with_timing(
        self, max_items: int
    ) -> tuple[list[TensorDictBase], list[Any], list[float]]:
        """As :meth:`drain`, with the ``time.perf_counter()`` at which each request arrived."""
        requests = self.drain_slots(max_items)
        payloads: list[TensorDictBase] = []
        for request in requests:
            payloads.append(self.request_layout.unpack(request.frame.views))
            request.release()
        return payloads, requests, [request.arrived for request in requests]

    def resolve(self, callback: Any, result: TensorDictBase) -> None:
        """Send ``result`` (the ``batch_size`` of the response spec) to the client behind ``callback``."""
        rows = result.reshape(-1) if result.batch_dims else result.unsqueeze(0)
        self._resolve_single(callback, rows, version_of(result, self.policy_version_key))

    def resolve_exception(self, callback: Any, exc: BaseException) -> None:
        """Make the client behind ``callback`` raise ``exc``."""
        callback.release()
        callback.reply_error(encode_exception(exc))

    def request_batch(self, capacity: int) -> RowBlock:
        """Staging for ``capacity`` requests."""
        return RowBlock(self.request_layout, capacity)

    def response_batch(self, capacity: int) -> RowBlock:
        """Staging for ``capacity`` replies."""
        return RowBlock(self.response_layout, capacity)

    def gather_requests(self, slots: Sequence[Any], out: RowBlock) -> TensorDictBase:
        """The policy's input: the requests' batch dimensions are flattened into one. Valid until the next gather."""
        if len(slots) == 1:  # read in place: it is released when it has been answered
            frame = slots[0].frame
            return read_rows(self.request_layout, frame.block_views, frame.block)
        batch = out.gather([request.frame.row for request in slots])
        self._replace_given_up(slots, out)
        for request in slots:
            request.release()
        return batch

    def resolve_batch(
        self,
        slots: Sequence[Any],
        results: TensorDictBase,
        out: RowBlock | None = None,
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
        key = self.policy_version_key
        if policy_version is not None and key in self._declared:
            assert key is not None
            # A leaf of the response, besides the header that always carries it.
            results = stamp_version(results.copy(), key, policy_version)
        if len(slots) == 1:
            return self._resolve_single(slots[0], results, policy_version)
        block = out if out is not None else self.response_batch(len(slots))
        block.pack(results, len(slots))
        for request, row in zip(slots, block.rows, strict=False):
            if request.given_up:
                continue  # its place may hold the reply to another one by now
            frame = request.reply_frame()
            copy_row(row, frame.row)
            request.reply(frame, policy_version)

    def _resolve_single(self, request: Any, results: TensorDictBase, version: int | None) -> None:
        if request.given_up:
            return request.release()  # type: ignore[no-any-return]  # its place may hold another one's reply by now
        frame = request.reply_frame()
        self.response_layout.pack_rows(results, frame.block_views, 1)
        request.release()
        request.reply(frame, version)

    @staticmethod
    def _replace_given_up(slots: Sequence[Any], out: RowBlock) -> None:
        """A row that was written over while it was copied may be nonsense, which must not spoil its neighbours."""
        broken = [index for index, request in enumerate(slots) if request.given_up]
        if broken and len(broken) < len(slots):
            whole = next(index for index in range(len(slots)) if index not in broken)
            for index in broken:
                copy_row(out.rows[whole], out.rows[index])


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
