"""Workers that are threads of the driver's process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from meshinfer.collect.workers import Begin, Failed, Ready, work
from meshinfer.semaphore import Semaphore

__all__ = ["ThreadWorker"]

_LEAVING_SECONDS = 1.0


class _ThreadLink:
    """Both ways between a thread and the driver; references neither the collector nor the worker."""

    def __init__(self) -> None:
        self.reports: SimpleQueue[Ready | Failed] = SimpleQueue()
        self.orders: SimpleQueue[Begin | None] = SimpleQueue()
        self.bells: list[Semaphore] = []

    def report(self, report: Ready | Failed) -> None:
        """Tell the driver."""
        self.reports.put(report)
        for bell in self.bells:
            bell.post()

    def order(self) -> Begin | None:
        """Wait for the driver."""
        return self.orders.get()


class ThreadWorker:
    """One worker in a thread; a :class:`~meshinfer.collect.crew.Worker`.

    Args:
        index: of the environment.
        factory: makes it, in the thread.
        context: nothing.
    """

    exitcode: int | None = None

    def __init__(self, index: int, factory: Callable[[], Any], context: None = None) -> None:
        self._link = _ThreadLink()
        self._thread = threading.Thread(
            target=work, args=(self._link, factory), name=f"meshinfer-env-{index}", daemon=True
        )
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def report(self, timeout: float = 0.0) -> Ready | Failed | None:
        """The next report, ``None`` without one for ``timeout`` seconds."""
        try:
            return self._link.reports.get(timeout > 0, timeout if timeout > 0 else None)
        except Empty:
            return None

    def begin(self, order: Begin, bell: Semaphore) -> None:
        """Have it collect; ``bell`` rings when it fails."""
        self._link.bells.append(bell)
        self._link.orders.put(order)

    def dismiss(self) -> None:
        """Let it leave if it still waits for an order."""
        self._link.orders.put(None)

    def join(self, timeout: float) -> bool:
        """Wait for its end: whether it has ended."""
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)
        return self.ended

    def kill(self) -> bool:
        """A thread cannot be: whether it has ended, now that nobody answers it."""
        return self.join(_LEAVING_SECONDS)
