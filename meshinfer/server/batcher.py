"""The serving loop: wait, drain, gather, forward, scatter."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Protocol

import torch
from tensordict import TensorDictBase, is_tensor_collection

from meshinfer.errors import ServerClosedError
from meshinfer.inference.protocol import BatchedTransport, InferenceTransport, ServedTransport
from meshinfer.inference.version import stamped
from meshinfer.items import split_items, stack_items, structure_of
from meshinfer.server.config import InferenceServerConfig
from meshinfer.server.policy import ServedPolicy
from meshinfer.server.static import StaticBatch, first_rows
from meshinfer.server.stats import StatsRecorder

__all__ = ["Batcher", "ItemSource", "RowSource"]

logger = logging.getLogger("meshinfer.server")

_LOOK_SECONDS = 0.1
"""How often a transport that cannot be woken is asked again whether it has work, so that we notice our own end."""

_INLINE_BATCHES = 4
"""Batches that a receiving thread serves in a row before it goes back to its own client."""

_INLINE_CLIENTS = 4
"""With more clients the hand-over costs less than it gains: requests gather meanwhile, and batches are larger."""


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
    """

    def __init__(
        self, transport: BatchedTransport, capacity: int, static: StaticBatch | None = None
    ) -> None:
        self._transport = transport
        self._static = static
        self._requests = transport.request_batch(capacity)
        self._responses = transport.response_batch(capacity)
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


class Batcher:
    """Serves a transport, from a thread of its own and, ``inline``, from the threads that receive requests.

    With few clients, a receiving thread that finds nobody serving leads: it serves what has arrived and returns to its
    client. Under load, when requests keep coming while it serves, it hands over to the batcher's own thread. Either way
    one batch is computed at a time, by whoever holds the policy's turn.
    """

    def __init__(
        self,
        transport: InferenceTransport,
        source: Source,
        policy: ServedPolicy,
        config: InferenceServerConfig,
        stats: StatsRecorder,
        *,
        stamp: bool,
        inline: bool,
    ) -> None:
        self._transport = transport
        self._source = source
        self._policy = policy
        self._config = config
        self._stats = stats
        self._stamp = stamp
        self._inline = inline
        self.failure: Exception | None = None
        self._stopping = False
        self._served = transport if isinstance(transport, ServedTransport) else None
        self._patience = None if self._served is not None else _LOOK_SECONDS
        self._thread = threading.Thread(target=self._run, name="meshinfer-server", daemon=True)

    @property
    def is_alive(self) -> bool:
        """Whether the batcher's own thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Begin to serve."""
        if self._inline and self._served is not None:
            self._served.set_ready_callback(self._lead)
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Stop after the batch that is being computed; waiting requests get :class:`ServerClosedError`.

        Returns:
            ``False`` when that batch was not done after ``timeout`` seconds.
        """
        self._stopping = True
        if self._served is not None:
            self._served.wake()
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The right to use the model. Requests that arrive meanwhile are served afterwards."""
        with self._policy.turn:
            yield
        self._hand_over()

    def _run(self) -> None:
        try:
            with self._policy.turn:
                self._policy.warm_up_here()
            while not self._stopping:
                if self._transport.wait_for_work(self._patience):
                    with self._policy.turn:
                        self._serve(self._collect())
                elif self._served is not None and self._served.closed:
                    break  # by somebody else
            with self._policy.turn:
                self._refuse_waiting()
        except Exception as error:  # the transport failed: nobody would be served any more
            logger.exception("the serving thread failed")
            self.failure = error
            self._transport.close()

    def _lead(self) -> None:
        """A request has arrived, in the thread that calls: serve it here, unless somebody is serving."""
        assert self._served is not None
        few = self._served.num_clients <= _INLINE_CLIENTS
        if few and self._policy.turn.acquire(blocking=False):
            try:
                served = 0
                while served < _INLINE_BATCHES and not self._stopping:
                    requests = self._source.drain(self._config.max_batch_size)
                    if not requests:
                        break
                    self._serve(requests)
                    served += 1
            finally:
                self._policy.turn.release()
        self._hand_over()

    def _collect(self) -> list[Any]:
        """The next batch: what has arrived, or more until ``min_batch_size`` or the oldest one's deadline."""
        config, drain = self._config, self._source.drain
        requests = drain(config.max_batch_size)
        while requests and len(requests) < config.min_batch_size and not self._stopping:
            left = requests[0].arrived + config.timeout - time.perf_counter()
            if left <= 0 or not self._transport.wait_for_work(left):
                requests += drain(config.max_batch_size - len(requests))
                break
            requests += drain(config.max_batch_size - len(requests))
        return requests

    def _serve(self, requests: list[Any]) -> None:
        if not requests:
            return
        kinds = list(map(self._source.alike, requests))
        if kinds.count(kinds[0]) == len(kinds):
            return self._serve_alike(requests)
        for kind in dict.fromkeys(kinds):
            pairs = zip(requests, kinds, strict=True)
            self._serve_alike([request for request, each in pairs if each == kind])

    def _serve_alike(self, requests: list[Any]) -> None:
        """One forward pass. Whatever goes wrong reaches exactly these clients."""
        began = time.perf_counter()
        try:
            batch = self._source.gather(requests)
        except BaseException as exc:
            return self._serve_apart(requests, exc)
        ready = time.perf_counter()
        try:
            results = self._policy(batch, requests[0].interaction)
            forward = time.perf_counter() - ready
            self._source.scatter(requests, results, self._policy.version if self._stamp else None)
        except (
            BaseException
        ) as exc:  # a policy may raise anything, SystemExit included; the server goes on
            self._fail(requests, exc)
            return
        self._stats.batch(
            [request.arrived for request in requests], began, forward, time.perf_counter()
        )

    def _serve_apart(self, requests: list[Any], exc: BaseException) -> None:
        """They could not be put together, which only one of them may be to blame for."""
        if len(requests) == 1:
            return self._fail(requests, exc)
        for request in requests:
            self._serve_alike([request])

    def _fail(self, requests: list[Any], exc: BaseException) -> None:
        logger.debug("a batch of %d failed", len(requests), exc_info=exc)
        self._stats.error(len(requests))
        for request in requests:
            self._source.fail(request, exc)

    def _refuse_waiting(self) -> None:
        while requests := self._source.drain(self._config.max_batch_size):
            for request in requests:
                self._source.fail(
                    request, ServerClosedError("the server shut down before it served this request")
                )

    def _hand_over(self) -> None:
        """Whoever let go of the turn, or did not get it, looks once more: no request may be left to nobody."""
        if self._served is not None and self._served.num_waiting:
            self._served.wake()
