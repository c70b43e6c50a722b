"""Requests as the batcher sees them: where they come from, and how they become a batch and are answered."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from operator import attrgetter
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase, is_tensor_collection

from meshinfer.inference.protocol import BatchedTransport, InferenceTransport
from meshinfer.inference.version import stamped
from meshinfer.items import split_items, stack_items, structure_of
from meshinfer.server.config import InferenceServerConfig
from meshinfer.server.devices import staging_device
from meshinfer.server.static import StaticBatch, first_rows

__all__ = ["ItemSource", "RowSource", "Source", "make_source"]


class Source(Protocol):
    """Requests as the batcher sees them; two ways to get them, one loop."""

    def drain(self, max_items: int) -> list[Any]:
        """Waiting requests, oldest first; each has ``arrived`` and ``interaction``."""

    def alike(self, request: Any) -> Hashable:
        """What the requests of one forward pass have in common."""

    def gather(self, requests: Sequence[Any]) -> TensorDictBase:
        """The policy's input."""

    def scatter(
        self, requests: Sequence[Any], results: TensorDictBase, version: int | None
    ) -> None:
        """Answer each request."""

    def fail(self, request: Any, exc: BaseException) -> None:
        """Answer one request with an exception."""


class RowSource:
    """A transport with fixed-layout rows: one gather and one scatter for a batch, through staging that is kept.

    Args:
        transport: has the rows.
        capacity: requests in a batch, at most.
        static: pads each batch to one size.
        device: where the policy computes, if the transport is to bring its rows there.
    """

    def __init__(
        self,
        transport: BatchedTransport,
        capacity: int,
        static: StaticBatch | None = None,
        device: torch.device | None = None,
    ) -> None:
        where = {} if device is None else {"device": device}
        self._transport = transport
        self._static = static
        self._requests = transport.request_batch(capacity, **where)
        self._responses = transport.response_batch(capacity, **where)
        self.drain: Callable[[int], list[Any]] = transport.drain_slots  # type: ignore[assignment]
        self.fail: Callable[[Any, BaseException], None] = transport.resolve_exception
        self.alike: Callable[[Any], Hashable] = attrgetter("interaction")

    def gather(self, requests: Sequence[Any]) -> TensorDictBase:
        """Copy the rows into staging; valid until the next call."""
        batch = self._transport.gather_requests(requests, self._requests)
        return batch if self._static is None else self._static.fill(batch, len(requests))

    def scatter(
        self, requests: Sequence[Any], results: TensorDictBase, version: int | None
    ) -> None:
        """Copy the results into staging and send each request its rows."""
        if self._static is not None:
            results = self._static.first(results, len(requests))
        self._transport.resolve_batch(requests, results, self._responses, policy_version=version)


class _Item:
    """One request of a transport with dynamic payloads."""

    __slots__ = ("arrived", "callback", "interaction", "kind", "payload")

    def __init__(self, payload: TensorDictBase, callback: Any, arrived: float) -> None:
        self.payload = payload
        self.callback = callback
        self.arrived = arrived
        self.interaction: int = getattr(callback, "interaction", 0)
        self.kind: Hashable = self.interaction


class ItemSource:
    """Any transport: requests are TensorDicts of their own, stacked and split again.

    Requests of another structure are served in a forward pass of their own, so that none spoils its neighbours.

    Args:
        transport: of any kind.
        collate: makes one TensorDict of a list, whatever their structures; its first dimension is the requests.
            ``None`` stacks payloads of one structure, and merges their own batch dimensions with that of the requests.
        version_key: where a result's policy version goes.
        static_size: requests in each batch: the last one stands in for those that are missing.
    """

    def __init__(
        self,
        transport: InferenceTransport,
        collate: Callable[[list[TensorDictBase]], TensorDictBase] | None,
        version_key: tuple[str, ...] | None,
        static_size: int | None = None,
    ) -> None:
        self._transport = transport
        self._collate = collate
        self._version_key = version_key
        self._static_size = static_size
        self.alike: Callable[[Any], Hashable] = attrgetter("kind")

    def drain(self, max_items: int) -> list[_Item]:
        """Waiting requests, oldest first."""
        entries = zip(*self._transport.drain_with_timing(max_items), strict=True)
        items = [_Item(*entry) for entry in entries]
        if self._collate is None:
            for item in items:
                structure = getattr(item.callback, "structure", None)
                item.kind = item.interaction, structure or structure_of(item.payload)
        return items

    def gather(self, requests: Sequence[_Item]) -> TensorDictBase:
        """Collate the payloads."""
        payloads = [item.payload for item in requests]
        if self._static_size is not None:
            payloads += [payloads[-1]] * (self._static_size - len(payloads))
        if self._collate is None:
            return stack_items(payloads)
        batch = self._collate(payloads)
        if not is_tensor_collection(batch):
            raise TypeError(f"collate_fn returned {type(batch).__name__}, expected a TensorDict")
        return batch

    def scatter(
        self, requests: Sequence[_Item], results: TensorDictBase, version: int | None
    ) -> None:
        """Split the results along their first dimension, and send each request its own."""
        size = requests[0].payload.batch_size if self._collate is None else torch.Size()
        if self._static_size is not None:
            each = size.numel()
            results = first_rows(results, len(requests) * each, self._static_size * each)
        if version is not None and self._version_key is not None:
            results = stamped(results, self._version_key, version)
        replies = split_items(results, len(requests), size)
        for item, reply in zip(requests, replies, strict=True):
            self._transport.resolve(item.callback, reply)

    def fail(self, request: _Item, exc: BaseException) -> None:
        """Answer one request with an exception."""
        self._transport.resolve_exception(request.callback, exc)


def make_source(
    transport: InferenceTransport,
    config: InferenceServerConfig,
    collate: Callable[[list[TensorDictBase]], TensorDictBase] | None,
    version_key: tuple[str, ...] | None,
    device: torch.device | None,
) -> Source:
    """Rows where the transport has them; arguments as for :class:`ItemSource`, ``device`` is the policy's."""
    size = config.static_batch_size
    if collate is None and isinstance(transport, BatchedTransport):
        staged = staging_device(transport, collate, device)
        pinned = staged is None and device is not None and device.type == "cuda"
        static = None if size is None else StaticBatch(size, pinned=pinned)
        return RowSource(transport, config.max_batch_size, static, staged)
    return ItemSource(transport, collate, version_key, size)
