"""Several transports as the lanes of one server: what each brings, and where the serving thread sleeps meanwhile."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from meshinfer.inference.doorbell import Doorbell
from meshinfer.inference.shared import ProcessSlotTransport, SharedMemoryTransport
from meshinfer.inference.slot import SlotTransport
from meshinfer.inference.version import stamp_version
from meshinfer.slots import Slot, SlotBank

__all__ = ["Bell", "Lane", "SeatRequest"]

_JOIN_SECONDS = 2.0
_QUIET = (SharedMemoryTransport, ProcessSlotTransport, SlotTransport)
"""Whose requests are left by threads or processes that call nobody here."""


class SeatRequest:
    """A request of a :class:`~meshinfer.inference.slot.SlotTransport` as one of rows.

    A :class:`~meshinfer.inference.rowwise.RowRequest`, but for errors: see :meth:`fail`.

    Args:
        lane: that brought it.
        request: as the transport gave it.
    """

    __slots__ = ("_lane", "_request", "arrived", "interaction")
    given_up = False
    """Nobody writes over a row before it is released."""

    def __init__(self, lane: Lane, request: Any) -> None:
        self._lane = lane
        self._request = request
        self.arrived: float = request.arrived
        self.interaction: int = request.interaction

    @property
    def frame(self) -> Any:
        """With the packed request, until :meth:`release`."""
        return self._request.frame

    def release(self) -> None:
        """The row may take another request."""
        self._request.release()

    def reply_frame(self) -> Slot:
        """The lane's one row for replies: each is copied on before the next one is written."""
        return self._lane.reply_frame()

    def reply(self, frame: Slot, policy_version: int | None) -> None:
        """Give the client its reply, in memory of its own."""
        accept = getattr(self._request, "accept", None)
        if accept is not None:  # it wants the row itself
            return accept(frame.row, policy_version)  # type: ignore[no-any-return]
        transport = self._lane.transport
        layout, key = transport.response_layout, transport.policy_version_key
        reply = layout.unpack(frame.views)
        if policy_version is not None and key is not None and reply.get(key, None) is None:
            stamp_version(reply, key, policy_version)
        self._request.answer(reply)

    def fail(self, exc: BaseException) -> None:
        """Make the client raise a copy of ``exc``, which need not be encoded between threads."""
        self._lane.transport.resolve_exception(self._request, exc)


class Lane:
    """One transport, and its requests that have been taken and not been drained yet.

    Args:
        transport: with a fixed layout.
    """

    def __init__(self, transport: Any) -> None:
        self.transport = transport
        self.taken: deque[Any] = deque()
        self.failure: Exception | None = None
        self.rung = False
        self._is_told = False
        self._stopping = False
        self._frame: Slot | None = None
        self._seats = isinstance(transport, SlotTransport)
        self._looked = Doorbell(lambda: self._stopping or not self.rung)
        self._tell: Callable[[], None] = lambda: None
        self._lookout: threading.Thread | None = None

    @property
    def is_open(self) -> bool:
        """Whether requests may still come."""
        return not self.transport.closed

    @property
    def num_waiting(self) -> int:
        """Requests that are ready now; of a closed transport nobody waits any more."""
        count = len(self.taken)
        if self._may_have_some and self.is_open:
            count += self.transport.num_waiting
        return count

    @property
    def _may_have_some(self) -> bool:
        return self.rung or not self._is_told

    def ready(self) -> bool:
        """Whether one is, as far as has been told here; or the lane has failed, which whoever drains finds out."""
        if self.taken or self.failure is not None:
            return True
        if not self.rung:
            return False
        self.rung = False  # before we look: whoever comes later says so again
        if self.is_open and self.transport.num_waiting:
            self.rung = True
            return True
        self._looked.ring()
        return False

    def fill(self, count: int) -> None:
        """Take requests until there are ``count``, or no more. Raises what the transport has raised."""
        if self.failure is not None:
            raise self.failure
        missing = count - len(self.taken)
        if missing <= 0 or not self._may_have_some or not self.is_open:
            return
        self.rung = False
        found = self.transport.drain_slots(missing)
        if self._seats:
            found = [SeatRequest(self, request) for request in found]
        self.taken.extend(found)
        if len(found) == missing:  # there may be more
            self.rung = True
        else:
            self._looked.ring()

    def let_go(self) -> None:
        """Release what was taken: nobody will serve it, and its row must not hold its client's session up."""
        while self.taken:
            try:
                request = self.taken.popleft()
            except IndexError:  # another thread has it
                return
            request.release()

    def reply_frame(self) -> Slot:
        """For :class:`SeatRequest`."""
        if self._frame is None:
            self._frame = SlotBank(self.transport.response_layout, 1)[0]
        return self._frame

    # Word of requests.

    def call_back(self, callback: Callable[[], None] | None) -> None:
        """Have ``callback`` called by the thread that received a request, where the transport does that."""
        self._is_told = callback is not None and not isinstance(self.transport, _QUIET)
        self.rung = True  # what is there already was not told
        if callback is None:
            return self.transport.set_ready_callback(None)  # type: ignore[no-any-return]
        self._tell = callback
        self.transport.set_ready_callback(self._announce)

    def _announce(self) -> None:
        self.rung = True
        self._tell()

    def watch(self, ring: Callable[[], None]) -> None:
        """Start a thread that sleeps where the requests arrive, and rings for them, and for the transport's end."""
        self._lookout = threading.Thread(
            target=self._watch, args=(ring,), name="meshinfer-lookout", daemon=True
        )
        self._lookout.start()

    def _watch(self, ring: Callable[[], None]) -> None:
        try:
            while not self._stopping and self.is_open:
                if self.transport.wait_for_work(None):
                    self.rung = True
                    ring()
                    self._looked.wait(None)
        except Exception as error:
            self.failure = error
        ring()  # the serving thread looks who is still open

    def stop(self) -> None:
        """Nobody listens any more."""
        self._stopping = True
        self.transport.set_ready_callback(None)
        if self._lookout is not None:
            self._looked.wake()
            self.transport.wake()

    def join(self) -> None:
        """After :meth:`stop`."""
        if self._lookout is not None:
            self._lookout.join(_JOIN_SECONDS)


class Bell:
    """Where the serving thread sleeps until a lane has something: in the ``wait_for_work`` of one of them, its host.

    So a request of the host wakes it directly, as if there were no other lane, and the others ring by waking the host.
    One that lives in shared memory, or between threads, is preferred: no thread of this process learns of its requests
    otherwise. When the host is closed or fails, the thread sleeps at a doorbell of its own.

    Args:
        lanes: all of them; one at least.
    """

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._lanes = lanes
        self._asleep = False
        self._woken = False
        self._host = self._choose_host()
        self._doorbell = Doorbell(lambda: False)
        self._begin()

    def _choose_host(self) -> Lane | None:
        there = [lane for lane in self._lanes if lane.is_open]
        quiet = [lane for lane in there if isinstance(lane.transport, _QUIET)]
        return next(iter(quiet + there), None)

    def _begin(self) -> None:
        for lane in self._lanes:
            if lane.is_open:
                _ = lane.num_waiting  # one that is served elsewhere says so now
        self.call_back(None)
        for lane in self._lanes:
            if lane is not self._host and lane.is_open:
                lane.watch(self.ring)

    def call_back(self, callback: Callable[[], None] | None) -> None:
        """Have ``callback`` called for requests, by the lanes whose threads receive them; ``None`` rings again."""
        for lane in self._lanes:
            wakes_us = callback is None and lane is self._host
            lane.call_back(None if wakes_us else callback or self.ring)

    def ring(self) -> None:
        """A lane may have something."""
        if self._asleep:
            self._asleep = False  # one is enough
            self._rouse()

    def wake(self) -> None:
        """Make :meth:`wait` return."""
        self._woken = True
        self.ring()

    def wait(self, timeout: float | None) -> bool:
        """Until a lane has a request: whether one has. Returns early when woken, or when all are closed."""
        deadline = None if timeout is None else time.monotonic() + timeout
        found, left = False, timeout
        while not (found or self._woken):
            self._asleep = True  # from now on whoever has something rings
            found = self._look() or (not self._woken and self._sleep(left)) or self._look()
            if found or left == 0 or not self._is_open():
                break
            if deadline is not None:
                left = max(deadline - time.monotonic(), 0.0)
        if self._woken and not found:  # what comes to the host may not have been told
            found = any(lane.num_waiting for lane in self._lanes)
        self._asleep = self._woken = False
        return found

    def _is_open(self) -> bool:
        return any(lane.is_open for lane in self._lanes)

    def _look(self) -> bool:
        for lane in self._lanes:  # noqa: SIM110  # with each request: a generator costs more than this
            if lane.ready():
                return True
        return False

    def _sleep(self, seconds: float | None) -> bool:
        """Whether the host has a request."""
        host = self._host
        if host is not None and host.is_open and host.failure is None:
            try:
                return bool(host.transport.wait_for_work(seconds))
            except Exception as error:
                host.failure = error
                return True
        self._host = None
        if self._is_open():
            self._doorbell.wait(seconds)
        return False

    def _rouse(self) -> None:
        self._doorbell.wake()
        host = self._host
        if host is not None:
            host.transport.wake()
