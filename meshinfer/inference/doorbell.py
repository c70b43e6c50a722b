"""Where a serving thread sleeps until other threads of its process leave requests."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

__all__ = ["Doorbell"]


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
        while not self._has_reason():
            self._asleep = True  # from now on whoever makes it ready rings
            if self._has_reason() or not self._sleep(deadline):
                break
        self._asleep = self._woken = False

    def _has_reason(self) -> object:
        return self._woken or self._is_ready()

    def _sleep(self, deadline: float | None) -> bool:
        if deadline is None:
            return self._bell.acquire()
        left = min(max(deadline - time.monotonic(), 0.0), threading.TIMEOUT_MAX)
        return self._bell.acquire(timeout=left)

    def _release(self) -> None:
        try:
            self._bell.release()
        except RuntimeError:
            return  # it has been rung already
