"""Several transports that one server serves at once, so that their requests meet in one batch."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, NoReturn

from meshinfer.errors import ClosedError
from meshinfer.inference.doorbell import popped
from meshinfer.inference.lanes import Bell, Lane
from meshinfer.inference.protocol import InferenceClient, InferenceFuture
from meshinfer.inference.rowwise import RowwiseTransport
from meshinfer.inference.seats import SeatRequest
from meshinfer.inference.slot import SlotTransport

__all__ = ["SEVERAL_ELSEWHERE", "MergedTransport"]

logger = logging.getLogger("meshinfer.inference")

SEVERAL_ELSEWHERE = (
    "several transports at once are served by the process that made them: use service_backend='thread', or give one "
    "transport"
)


class MergedTransport(RowwiseTransport):
    """Requests of several transports with the same layouts, as those of one: they are gathered into the same batches.

    For a server that is near to some of its clients and far from others, such as a rank whose environments are in
    processes of its own host, while those of other nodes come by the network::

        near = SharedMemoryTransport(request_spec, response_spec, num_slots=32)
        far = DistributedTransport(request_spec, response_spec, interface="eth0")
        with InferenceServer(policy, [near, far]) as server:
            give(near.client())  # to a process of this host
            give(far.client())  # to anybody

    Requests are drained oldest first, whichever transport brought them, so a flood over one does not hold up another.
    The serving thread sleeps where the requests of the first transport through memory arrive, which costs its clients
    nothing; each further transport has a thread that sleeps too. A transport that somebody closes, or that fails,
    ends for its own clients; the others go on. Implements :class:`~meshinfer.inference.protocol.BatchedTransport`.

    Args:
        transports: two or more that serve from this process, each with a fixed layout: distributed, shared_memory,
            process_slot, slot with both specs, or any other
            :class:`~meshinfer.inference.rowwise.RowwiseTransport`. :meth:`close` closes them.

    Raises:
        TypeError: one of them is no transport, or has no fixed layout.
        ValueError: there are fewer than two, one is there twice, one cannot serve here, or their layouts differ; says
            where.
        ClosedError: one of them was closed.
    """

    def __init__(self, transports: Sequence[Any]) -> None:
        self.transports: tuple[Any, ...] = _checked(transports)
        first = self.transports[0]
        super().__init__(first.request_layout, first.response_layout)
        devices = (getattr(each, "row_device", None) for each in self.transports)
        self.row_device = next((device for device in devices if device is not None), None)
        self.may_lead = all(getattr(each, "may_lead", True) for each in self.transports)
        self._lanes = [Lane(each) for each in self.transports]
        self._bell: Bell | None = None
        self._beginning = threading.Lock()
        self._closed = False
        self._version_key: tuple[str, ...] | None = first.policy_version_key
        self._finalizer = weakref.finalize(self, _stop, self._lanes, os.getpid())
        self._finalizer.atexit = False

    # For everybody.

    def client(self) -> InferenceClient:
        """A new client of the first transport that is open; for one of another, ask that one."""
        client: InferenceClient = self._first_open().client()
        return client

    def submit(self, payload: Any) -> InferenceFuture:
        """Send a request through the own client of the first transport that is open."""
        future: InferenceFuture = self._first_open().submit(payload)
        return future

    def close(self) -> None:
        """Close all: their waiting clients raise :class:`~meshinfer.errors.ServerClosedError`. Idempotent."""
        self._closed = True
        for lane in self._lanes:
            lane.let_go()
        for lane in self._lanes:
            lane.transport.close()
        if self._finalizer() is not None and self._bell is not None:
            self._bell.wake()
            for lane in self._lanes:
                lane.join()

    @property
    def serve_elsewhere(self) -> NoReturn:
        """Refused: some transports cannot."""
        raise TypeError(SEVERAL_ELSEWHERE)

    def __enter__(self) -> MergedTransport:
        self._first_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a MergedTransport stays in the process that made it; send clients of its transports to others"
        )

    def __repr__(self) -> str:
        return f"MergedTransport([{', '.join(map(repr, self.transports))}])"

    # For the server.

    @property
    def closed(self) -> bool:
        """Whether nothing will come any more: :meth:`close` was called, or each of the transports was closed."""
        return self._closed or not self._open_lanes()

    @property
    def num_clients(self) -> int:
        """Clients connected now, over all transports."""
        return sum(lane.transport.num_clients for lane in self._open_lanes())

    @property
    def num_waiting(self) -> int:
        """Requests that are ready now."""
        return sum(lane.num_waiting for lane in self._lanes)

    @property
    def policy_version_key(self) -> tuple[str, ...] | None:
        """Where clients put the policy version; set for all transports."""
        return self._version_key

    @policy_version_key.setter
    def policy_version_key(self, key: tuple[str, ...] | None) -> None:
        self._version_key = key
        for each in self.transports:
            each.policy_version_key = key

    def wait_until_left(self, num_clients: int | None = None, timeout: float | None = None) -> bool:
        """Wait until the clients of every transport have come and left.

        Args:
            num_clients: cannot be given: each transport counts its own. By default those whom it expects, or at least
                one client of each.
            timeout: seconds; ``None`` for no limit.

        Returns:
            ``False`` when ``timeout`` ran out.

        Raises:
            TypeError: one of the transports does not know its clients.
            ValueError: ``num_clients`` was given.
            PeerLostError: as that of the transport that raises it.
        """
        for each in self.transports:
            if not hasattr(each, "wait_until_left"):
                raise TypeError(
                    f"{type(each).__name__} does not know when its clients leave; use start()"
                )
        if num_clients is not None:
            raise ValueError(
                f"num_clients={num_clients}: each of several transports counts its own clients; leave it out, or wait "
                "with wait_until_left(num_clients) of each"
            )
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while True:
            for each in self.transports:
                left = None if timeout is None else max(deadline - time.monotonic(), 0.0)
                if not each.wait_until_left(None, left):
                    return False
            if all(each.wait_until_left(None, 0.0) for each in self.transports):
                return True  # nobody has come to one of them while we waited for another

    def wait_for_work(self, timeout: float | None = None) -> bool:
        """Wait until a request is ready: whether one is. Returns early when closed or woken."""
        return not self._closed and self._begun().wait_for_work(timeout)

    def wake(self) -> None:
        """Make :meth:`wait_for_work` return."""
        if not self._closed:
            self._begun().wake()

    def set_ready_callback(self, callback: Callable[[], None] | None) -> None:
        """Have ``callback`` called by the thread that received a request, over the transports that have such threads.

        Requests of the others wake :meth:`wait_for_work`.
        """
        self._begun().call_back(callback)

    def drain_slots(self, max_items: int) -> list[Any]:
        """At most ``max_items`` waiting requests, oldest first, still in their rows."""
        for lane in self._lanes:
            try:
                lane.fill(max_items)
            except Exception as error:
                self._lose(lane, error)
        queues = [lane.taken for lane in self._lanes if lane.taken]
        if len(queues) == 1:
            return popped(queues[0], max_items)
        if sum(map(len, queues)) <= max_items:
            found = [each for queue in queues for each in popped(queue, max_items)]
            return sorted(found, key=attrgetter("arrived"))
        return _oldest(queues, max_items)

    def resolve_exception(self, callback: Any, exc: BaseException) -> None:
        """Make the client behind ``callback`` raise ``exc``."""
        if isinstance(callback, SeatRequest):
            callback.fail(exc)
        else:
            super().resolve_exception(callback, exc)

    def _begun(self) -> Bell:
        bell = self._bell
        if bell is None:
            with self._beginning:
                bell = self._bell
                if bell is None:
                    bell = self._bell = Bell(self._lanes)
        return bell

    def _lose(self, lane: Lane, error: Exception) -> None:
        """A transport failed: its clients are told, and the others go on, if there are any."""
        logger.error("%r failed and is closed", lane.transport, exc_info=error)
        lane.failure = None
        lane.let_go()
        lane.transport.close()
        if not self._open_lanes():
            raise error

    def _open_lanes(self) -> list[Lane]:
        return [lane for lane in self._lanes if lane.is_open]

    def _first_open(self) -> Any:
        if self.closed:
            raise ClosedError("this MergedTransport was closed; make a new one")
        return next((lane.transport for lane in self._open_lanes()), self.transports[0])


def _stop(lanes: list[Lane], pid: int) -> bool:
    """Nobody listens any more; without the transport, also when it is collected. Not in a forked child."""
    if pid == os.getpid():
        for lane in lanes:
            lane.stop()
    return True


def _oldest(queues: list[deque[Any]], count: int) -> list[Any]:
    """The ``count`` oldest of queues whose first is their oldest."""
    found: list[Any] = []
    while len(found) < count:
        try:
            waiting = [queue for queue in queues if queue]
            found.append(min(waiting, key=lambda queue: queue[0].arrived).popleft())
        except (IndexError, ValueError):  # the transport is being closed, and with it went the rest
            break
    return found


def _checked(transports: Sequence[Any]) -> tuple[Any, ...]:
    found = tuple(transports)
    if len(found) < 2:
        raise ValueError(f"transports: expected two or more to merge, found {len(found)}")
    for index, each in enumerate(found):
        if any(each is other for other in found[:index]):
            raise ValueError(f"transports[{index}]: {each!r} is there twice; give each once")
        _check(index, each)
        _compare(index, each, found[0])
    return found


def _check(index: int, transport: Any) -> None:
    name = f"transports[{index}] ({type(transport).__name__})"
    rows = isinstance(transport, RowwiseTransport) and not isinstance(transport, MergedTransport)
    if not rows and not isinstance(transport, SlotTransport):
        raise TypeError(
            f"{name} cannot be merged: batches are gathered from rows of one layout, as those of distributed, "
            "shared_memory, process_slot, and slot with both specs; serve others with a server of their own"
        )
    if transport.request_layout is None or transport.response_layout is None:
        raise TypeError(
            f"{name} has no fixed layout; make it with request_spec= and response_spec="
        )
    if transport.closed:
        raise ClosedError(f"{name} was closed; make a new one")
    try:
        _ = transport.num_clients
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error


def _compare(index: int, transport: Any, first: Any) -> None:
    for what in ("request_layout", "response_layout"):
        here, there = getattr(first, what), getattr(transport, what)
        if here != there:
            raise ValueError(
                f"transports[{index}] ({type(transport).__name__}): the {here.name} layouts differ from transports[0] "
                f"({type(first).__name__}): {here.difference(there.describe())} (here: transports[0])"
            )
