"""Where a serving thread sleeps until other threads of its process leave requests."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

__all__ = ["Backlog", "Doorbell", "popped"]

R = TypeVar("R")


class Doorbell:
    """For one thread that waits, and any number that ring.

    Rings do not count, and may come when their work has been taken already: whoever wakes looks again. No step holds
    a lock, so a signal handler or the garbage collector may ring in the midst of any other.

    Args:
        is_ready: whether there is a reason not to wait; whoever makes it true rings afterwards.
    """

    def __init__(self, is_ready: Callable[[], object]) -> None:
        self._is_ready = is_ready
        self._asleep = False
        self._woken = False
        self._bell = threading.Lock()  # held, except between a ring and the end of a sleep
        self._bell.acquire()

    def ring(self) -> None:
        """Say that it may be ready now."""
        if self._asleep:
            self._release()

    def wake(self) -> None:
        """Make :meth:`wait` return, ready or not."""
        self._woken = True
        self._release()

    def wait(self, timeout: float | None) -> None:
        """Until it is ready or woken, at most ``timeout`` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while True:
            self._asleep = True  # from now on whoever makes it ready rings
            if self._woken or self._is_ready() or not self._sleep(deadline):
                break
        self._asleep = self._woken = False

    def _sleep(self, deadline: float | None) -> bool:
        """Until somebody rings: whether to look again; ``False`` when time has run out."""
        if deadline is None:
            return self._bell.acquire()
        left = min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)
        return self._bell.acquire(timeout=left)

    def _release(self) -> None:
        try:
            self._bell.release()
        except RuntimeError:
            return  # it has been rung already


class Backlog(Generic[R]):
    """Requests that are ready, and the serving thread that sleeps until there are some.

    What receives requests is one: it adds to ``pending`` and rings ``_work``, in any thread. When nothing will come
    any more it sets ``_closing`` and rings as well.
    """

    def __init__(self) -> None:
        self.pending: deque[R] = deque()
        self._closing = False
        self._work = self._doorbell()

    def wake(self) -> None:
        """Make :meth:`wait_for_work` return."""
        self._work.wake()

    def wait_for_work(self, timeout: float | None) -> bool:
        """Until a request is ready: whether one is. Returns early when closed or woken."""
        self._work.wait(timeout)
        return bool(self.pending)

    def take(self, max_items: int) -> list[R]:
        """At most ``max_items`` waiting requests, oldest first."""
        return popped(self.pending, max_items)

    def _doorbell(self) -> Doorbell:
        return Doorbell(lambda: self.pending or self._closing)


def popped(queue: deque[Any], count: int) -> list[Any]:
    """At most ``count`` from the left, one by one: another thread, which closes, may take some too."""
    found: list[Any] = []
    while queue and len(found) < count:
        try:
            found.append(queue.popleft())
        except IndexError:
            break
    return found
