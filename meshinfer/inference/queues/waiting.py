"""The requests that wait for a server, and the server that waits for them or for its clients to leave."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Sized

from meshinfer.inference.doorbell import Doorbell
from meshinfer.inference.queues.session import Request

__all__ = ["WaitingRoom"]


class WaitingRoom:
    """What hubs have in common, however requests reach them."""

    _sessions: Sized

    def __init__(self) -> None:
        self.pending: deque[Request] = deque()
        self._joins = 0
        self._closing = False
        self._work = self._doorbell()
        self._changed = threading.Condition()  # reentrant: the collector may close us anywhere

    @property
    def closed(self) -> bool:
        """Whether it has ended, or is about to."""
        return self._closing

    def wake(self) -> None:
        """Make :meth:`wait_for_work` return."""
        self._work.wake()

    def wait_for_work(self, timeout: float | None) -> bool:
        """Until a request is ready, the hub closes or is woken."""
        self._work.wait(timeout)
        return bool(self.pending)

    def take(self, max_items: int) -> list[Request]:
        """At most ``max_items`` waiting requests, oldest first; those of clients that have gone are dropped."""
        found: list[Request] = []
        with contextlib.suppress(IndexError):  # there are no more
            while len(found) < max_items:
                request = self.pending.popleft()
                if not request.session.over:
                    found.append(request)
        return found

    def wait_until_left(self, num_clients: int | None, timeout: float | None = None) -> bool:
        """Until ``num_clients`` (at least one) have joined and all have left; ``False`` when ``timeout`` runs out."""
        needed = 1 if num_clients is None else num_clients
        with self._changed:
            return self._changed.wait_for(
                lambda: self._closing or (not self._sessions and self._joins >= needed), timeout
            )

    def _doorbell(self) -> Doorbell:
        return Doorbell(lambda: self.pending or self._closing)
