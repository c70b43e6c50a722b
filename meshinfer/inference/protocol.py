"""What a transport, a client and a future promise, for every transport alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from tensordict import TensorDictBase

__all__ = [
    "BatchedTransport",
    "InferenceClient",
    "InferenceFuture",
    "InferenceTransport",
    "RequestHandle",
    "ServedTransport",
]


@runtime_checkable
class InferenceFuture(Protocol):
    """The reply to one request, which may still be on its way."""

    def done(self) -> bool:
        """Whether :meth:`result` would return or raise at once. Never waits."""

    def result(self, timeout: float | None = None) -> TensorDictBase:
        """The reply, an independent TensorDict.

        Args:
            timeout: seconds to wait; ``None`` waits for as long as the server is alive.

        Raises:
            TimeoutError: the request stays in flight and ``result`` can be called again.
            Exception: what the policy raised, or a :class:`~meshinfer.errors.TransportError`.
        """

    def cancel(self) -> bool:
        """Give the reply up and free what it holds; ``False`` when it had already come."""


@runtime_checkable
class InferenceClient(Protocol):
    """One environment's way to the policy. Owned by one thread unless the transport says otherwise.

    Connects on first use, is a context manager, and raises :class:`~meshinfer.errors.ClosedError` after ``close``.
    Picklable where its transport crosses processes.
    """

    def __call__(self, payload: TensorDictBase, timeout: float | None = None) -> TensorDictBase:
        """Send ``payload`` and wait for the reply; ``payload`` is left as it was."""

    def submit(self, payload: TensorDictBase) -> InferenceFuture:
        """Send ``payload``; it is copied before this returns and may be changed at once."""

    def close(self) -> None:
        """Leave. Requests in flight are given up. Idempotent."""


class RequestHandle(Protocol):
    """One request at the server: opaque but for what batching needs to know."""

    arrived: float
    """``time.perf_counter()`` when it was complete, in seconds."""
    interaction: int
    """Code of the client's interaction type, see :mod:`meshinfer.inference.interaction`."""


@runtime_checkable
class InferenceTransport(Protocol):
    """How requests reach a server and replies find their way back.

    The server's side is driven by one thread at a time; ``client`` and ``close`` may be called from any. A request
    that ``drain`` returned is the server's until exactly one of ``resolve`` and ``resolve_exception`` was called for
    it; neither raises because its client has gone. Nothing is promised about the order of requests of different
    clients except that none starves.
    """

    def client(self) -> InferenceClient:
        """A new client."""

    def submit(self, payload: TensorDictBase) -> InferenceFuture:
        """Send a request through a client that the transport keeps for itself."""

    def wait_for_work(self, timeout: float | None = None) -> bool:
        """Wait until a request is ready: whether one is. Returns early when the transport is closed or woken."""

    def drain(self, max_items: int) -> tuple[list[TensorDictBase], list[Any]]:
        """At most ``max_items`` waiting requests and one callback handle for each. Never waits."""

    def drain_with_timing(
        self, max_items: int
    ) -> tuple[list[TensorDictBase], list[Any], list[float]]:
        """As :meth:`drain`, and for each request the ``time.perf_counter()`` at which it arrived."""

    def resolve(self, callback: Any, result: TensorDictBase) -> None:
        """Send ``result`` to the client behind ``callback``, which may keep it. Never waits for that client."""

    def resolve_exception(self, callback: Any, exc: BaseException) -> None:
        """Make the client behind ``callback`` raise ``exc``. Never waits for that client."""

    def close(self) -> None:
        """End it for everyone: waiting clients raise :class:`~meshinfer.errors.ServerClosedError`. Idempotent."""


@runtime_checkable
class ServedTransport(InferenceTransport, Protocol):
    """A transport that knows its clients and its server: whom it has, whose version it stamps, and how to wake it."""

    policy_version_key: tuple[str, ...] | None
    """Where clients put the policy version that travels with each reply. The server sets it."""

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called, so that nothing will come any more."""

    @property
    def num_clients(self) -> int:
        """Clients connected now."""

    @property
    def num_waiting(self) -> int:
        """Requests that are ready now."""

    def set_ready_callback(self, callback: Callable[[], None] | None) -> None:
        """Have ``callback`` called by the thread that received a request, instead of waking ``wait_for_work``.

        A transport whose requests are received by threads of its users, which must not compute, ignores it.
        """

    def wake(self) -> None:
        """Make ``wait_for_work`` return."""


@runtime_checkable
class BatchedTransport(ServedTransport, Protocol):
    """A transport whose requests are fixed-layout rows, so that a whole batch is gathered and scattered at once.

    One with ``stages_devices = True`` brings rows to a policy on a GPU and its results back by itself: its
    ``request_batch`` and ``response_batch`` take a ``device``, which a server gives them for such a policy only.
    ``gather_requests`` then gives a batch on that device, and ``resolve_batch`` takes results that lie there. For
    others the server moves each leaf of a batch.
    """

    def drain_slots(self, max_items: int) -> Sequence[RequestHandle]:
        """At most ``max_items`` waiting requests, oldest first. Never waits."""

    def request_batch(self, capacity: int) -> Any:
        """Staging for ``capacity`` requests, reused from batch to batch."""

    def gather_requests(self, slots: Sequence[RequestHandle], out: Any) -> TensorDictBase:
        """Copy the rows of ``slots`` into ``out``; returns the policy's input, valid until the next gather.

        The slots' own rows may take the next requests from now on.
        """

    def response_batch(self, capacity: int) -> Any:
        """Staging for ``capacity`` replies."""

    def resolve_batch(
        self,
        slots: Sequence[RequestHandle],
        results: TensorDictBase,
        out: Any,
        *,
        policy_version: int | None = None,
    ) -> None:
        """Send row ``i`` of ``results`` to the client of ``slots[i]``. Undeclared keys are dropped.

        Raises:
            KeyError: ``results`` lacks a declared key; nothing was sent.
            ValueError, TypeError: a declared key has another shape or dtype; nothing was sent.
        """
