"""Sending clients on, where another process serves."""

from __future__ import annotations

from meshinfer.inference.monarch.frames import Signal, write_facts
from meshinfer.inference.monarch.locate import MonarchAddress
from meshinfer.inference.monarch.session import MonarchSession

__all__ = ["Guide"]


class Guide:
    """Knows which process serves now, and which clients wait until one does. Used under its hub's lock.

    Attributes:
        active: whether clients are sent on; otherwise the hub serves them itself.
    """

    def __init__(self) -> None:
        self.active = False
        self._place: MonarchAddress | None = None
        self._server: MonarchSession | None = None
        self._waiting: list[MonarchSession] = []

    def send_on(self, client: MonarchSession) -> None:
        """Tell ``client`` where the server is, now or once there is one."""
        self._waiting.append(client)
        self._tell()

    def follow(self, server: MonarchSession, place: MonarchAddress) -> MonarchSession | None:
        """A server serves at ``place`` from now on, instead of the one that is returned."""
        former, self._server, self._place = self._server, server, place
        self._tell()
        return former

    def forget(self, session: MonarchSession) -> None:
        """It has left: a client that waits no longer, or the server."""
        if session is self._server:
            self._server = self._place = None
        if session in self._waiting:
            self._waiting.remove(session)

    def _tell(self) -> None:
        if self._place is None:
            return
        where = write_facts(self._place.facts)
        for client in self._waiting:
            client.tell(Signal.REDIRECT, where)
        self._waiting.clear()
