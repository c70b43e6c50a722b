"""Several transports as the lanes of one server: what each brings, and where the serving thread sleeps meanwhile."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from meshinfer.inference.doorbell import Doorbell, popped
from meshinfer.inference.seats import Seats
from meshinfer.inference.shared import ProcessSlotTransport, SharedMemoryTransport
from meshinfer.inference.slot import SlotTransport

__all__ = ["Bell", "Lane"]

_JOIN_SECONDS = 2.0
_QUIET = (SharedMemoryTransport, ProcessSlotTransport, SlotTransport)


class Lane:
    """One transport, and its requests that have been taken and not been drained yet.

    It is rung where its transport may have a request: by the thread that has received it, if the transport calls
    back; else by its lookout, a thread that sleeps where its requests arrive and, having rung, until the serving
    thread has looked.

    Args:
        transport: with a fixed layout.

    Attributes:
        is_quiet: whether requests are left by threads or processes that call nobody here.
        failure: what the transport has raised in a thread that sleeps in it.
    """

    def __init__(self, transport: Any) -> None:
        self.transport = transport
        self.taken: deque[Any] = deque()
        self.failure: Exception | None = None
        self.is_quiet = isinstance(transport, _QUIET)
        self._source = Seats(transport) if isinstance(transport, SlotTransport) else transport
        self._rung = False
        self._is_told = False
        self._stopping = False
        self._looked = Doorbell(lambda: self._stopping or not self._rung)
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
        return self._rung or not self._is_told

    def ready(self) -> bool:
        """Whether one is, where it was rung; or it has failed, which whoever fills it finds out."""
        if self.taken or self.failure is not None:
            return True
        if not self._rung:
            return False
        self._rung = False  # before we look: whoever comes later rings again
        self._note(self.is_open and self.transport.num_waiting > 0)
        return self._rung

    def fill(self, count: int) -> None:
        """Take requests until there are ``count``, or no more. Raises what the transport has raised."""
        if self.failure is not None:
            raise self.failure
        missing = count - len(self.taken)
        if missing <= 0 or not self._may_have_some or not self.is_open:
            return
        self._rung = False
        found = self._source.drain_slots(missing)
        self.taken.extend(found)
        self._note(len(found) == missing)

    def _note(self, may_have_more: bool) -> None:
        if may_have_more:
            self._rung = True
        else:
            self._looked.ring()

    def let_go(self) -> None:
        """Release what was taken: nobody will serve it, and its row must not hold its client's session up."""
        for request in popped(self.taken, len(self.taken)):
            request.release()

    # Word of requests.

    def call_back(self, callback: Callable[[], None] | None) -> None:
        """Have ``callback`` called by the thread that received a request, where the transport does that."""

        def announce() -> None:
            self._rung = True
            assert callback is not None
            callback()

        self._is_told = callback is not None and not self.is_quiet
        self._rung = True  # what is there already was not told
        self.transport.set_ready_callback(None if callback is None else announce)

    def watch(self, ring: Callable[[], None]) -> None:
        """Start the lookout, which calls ``ring`` too, also at the transport's end."""
        self._lookout = threading.Thread(
            target=self._watch, args=(ring,), name="meshinfer-lookout", daemon=True
        )
        self._lookout.start()

    def _watch(self, ring: Callable[[], None]) -> None:
        try:
            while not self._stopping and self.is_open:
                if self.transport.wait_for_work(None):
                    self._rung = True
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


class Bell(Doorbell):
    """A doorbell whose serving thread sleeps in the ``wait_for_work`` of one lane, the host.

    So a request of the host wakes it directly, as if there were no other lane, and the others ring by waking the host.
    A quiet one is preferred: no thread of this process learns of its requests otherwise. When the host is closed or
    fails, the thread sleeps at the doorbell itself.

    Args:
        lanes: all of them; one at least.
    """

    def __init__(self, lanes: Sequence[Lane]) -> None:
        super().__init__(self._look)
        self._lanes = lanes
        self._found = False
        there = [lane for lane in lanes if lane.is_open]
        for lane in there:
            _ = lane.num_waiting  # one that is served elsewhere says so now
        self._host = next(iter([lane for lane in there if lane.is_quiet] + there), None)
        self.call_back(None)
        for lane in there:
            if lane is not self._host:
                lane.watch(self.ring)

    def call_back(self, callback: Callable[[], None] | None) -> None:
        """Have ``callback`` called for requests, by the lanes whose threads receive them; ``None`` rings again."""
        for lane in self._lanes:
            wakes_us = callback is None and lane is self._host
            lane.call_back(None if wakes_us else callback or self.ring)

    def wait_for_work(self, timeout: float | None) -> bool:
        """Until a lane has a request: whether one has. Returns early when woken, or when all are closed."""
        self._found = False
        self.wait(timeout)
        # What comes to the host need not ring.
        return self._found or any(lane.num_waiting for lane in self._lanes)

    def _look(self) -> bool:
        for lane in self._lanes:
            if lane.ready():
                self._found = True
                break
        return self._found

    def _sleep(self, deadline: float | None) -> bool:
        host = self._host
        if host is None:
            return any(lane.is_open for lane in self._lanes) and super()._sleep(deadline)
        if host.failure is not None or not host.is_open:
            self._host = None
            return True  # look again: somebody may just have woken the host
        left = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        try:
            self._found = bool(host.transport.wait_for_work(left))
        except Exception as error:
            host.failure = error
        return left != 0.0 and not self._found

    def _release(self) -> None:
        if self._asleep:
            self._asleep = False  # one is enough
            host = self._host
            if host is None:
                super()._release()
            else:
                host.transport.wake()
