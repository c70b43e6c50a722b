"""The requests that wait for a server, and the server that waits for its clients to leave."""

from __future__ import annotations

import threading
from collections.abc import Sized

from meshinfer.inference.doorbell import Backlog
from meshinfer.inference.queues.session import Request

__all__ = ["WaitingRoom"]


class WaitingRoom(Backlog[Request]):
    """What hubs have in common, however requests reach them."""

    _sessions: Sized

    def __init__(self) -> None:
        super().__init__()
        self._joins = 0
        self._changed = threading.Condition()  # reentrant: the collector may close us anywhere

    @property
    def closed(self) -> bool:
        """Whether it has ended, or is about to."""
        return self._closing

    def take(self, max_items: int) -> list[Request]:
        """At most ``max_items`` waiting requests, oldest first; those of clients that have gone are dropped."""
        found: list[Request] = []
        while len(found) < max_items and (taken := super().take(max_items - len(found))):
            found += [request for request in taken if not request.session.over]
        return found

    def wait_until_left(self, num_clients: int | None, timeout: float | None = None) -> bool:
        """Until ``num_clients`` (at least one) have joined and all have left; ``False`` when ``timeout`` runs out."""
        needed = 1 if num_clients is None else num_clients
        with self._changed:
            return self._changed.wait_for(
                lambda: self._closing or (not self._sessions and self._joins >= needed), timeout
            )
