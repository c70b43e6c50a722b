"""Where clients come in, and what the server's thread does at a time that no event announces."""

from __future__ import annotations

import errno
import logging
import select
import socket
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from meshinfer.inference.queues.address import Address

if TYPE_CHECKING:
    from meshinfer.inference.queues.session import Session

__all__ = ["Door"]

logger = logging.getLogger("meshinfer.queues")

_REST_SECONDS: Final = 1.0
_JOIN_SECONDS: Final = 10.0
_NO_ROOM: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_GONE_ALREADY: Final = frozenset(  # accept(2): errors that are pending on the new connection
    {
        errno.ECONNABORTED,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ENONET,
        errno.ENOPROTOOPT,
        errno.EOPNOTSUPP,
        errno.EPROTO,
    }
)


class Door:
    """The listening socket, and those who have come in and not proved yet that they are clients.

    For the hub's thread, but for :meth:`lock` and :meth:`close`.

    Args:
        address: where to listen.

    Raises:
        ValueError: another server listens there.
    """

    def __init__(self, address: Address) -> None:
        self._listener, self.address = address.listen()
        self._epoll: select.epoll | None = None
        self._strangers: deque[Session] = deque()
        self._rest_until: float | None = None
        self._next: float | None = None
        self.locked = False

    def watch(self, epoll: select.epoll) -> None:
        """Have newcomers announced."""
        self._epoll = epoll
        epoll.register(self._listener.fileno(), select.EPOLLIN)

    def unwatch(self) -> None:
        """Have nobody announced any more."""
        if self._epoll is not None:
            self._epoll.unregister(self._listener.fileno())

    def lock(self) -> None:
        """From now on nobody can connect."""
        self.locked = True
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError as error:  # a listening socket may say that it is not connected
            logger.debug("%s takes nobody any more: %s", self.address, str(error))

    def close(self) -> None:
        """Close the socket."""
        self._listener.close()

    def accept(self, guests: int) -> socket.socket | None:
        """Who has come, unless it has gone again, cannot be one of us, or there is no room beside ``guests``."""
        try:
            connection, _ = self._listener.accept()
        except BlockingIOError:
            return None
        except OSError as error:
            if not self.locked and error.errno not in _GONE_ALREADY:
                self._rest(error, guests)
            return None
        objection = self.address.objection_to(connection)
        if objection:
            logger.warning("a client of %s was refused: %s", self.address, objection)
            connection.close()
            return None
        self.address.prepare(connection)
        return connection

    def watch_stranger(self, session: Session) -> None:
        """It has ten seconds to prove itself."""
        self._strangers.append(session)
        self._remember(session.since + _JOIN_SECONDS)
        if self.address.look_seconds is not None:
            self._remember(session.since + self.address.look_seconds)

    def seconds_left(self) -> float | None:
        """Until :meth:`do_chores` has something to do; ``None`` when an event will come first."""
        return None if self._next is None else max(self._next - time.monotonic(), 0.0)

    def do_chores(self, sessions: list[Session]) -> list[tuple[Session, str]]:
        """Do what is due: which of ``sessions`` have to end, and why."""
        now, self._next = time.monotonic(), None
        self._end_rest(now)
        ended = [
            (each, f"it did not prove itself within {_JOIN_SECONDS:g} s")
            for each in self._late(now)
        ]
        look_seconds = self.address.look_seconds
        if look_seconds is not None and sessions:
            ended += [
                (each, "its host does not answer any more") for each in sessions if each.silent
            ]
            self._remember(now + look_seconds)
        return ended

    def _late(self, now: float) -> list[Session]:
        late: list[Session] = []
        while self._strangers:
            first = self._strangers[0]
            if not first.joined and not first.over:
                if first.since + _JOIN_SECONDS > now:
                    self._remember(first.since + _JOIN_SECONDS)
                    break
                late.append(first)
            self._strangers.popleft()
        return late

    def _rest(self, error: OSError, guests: int) -> None:
        """Accept nobody for a second: those who wait would be announced without end."""
        if error.errno not in _NO_ROOM:
            raise error
        logger.error(
            "no room for another client of %s beside %d: %s; raise ulimit -n",
            self.address,
            guests,
            error.strerror,
        )
        self._announce(0)
        self._rest_until = time.monotonic() + _REST_SECONDS
        self._remember(self._rest_until)

    def _end_rest(self, now: float) -> None:
        if self._rest_until is None:
            return
        if self._rest_until > now:
            return self._remember(self._rest_until)
        self._rest_until = None
        self._announce(select.EPOLLIN)

    def _announce(self, events: int) -> None:
        if self._epoll is not None:
            self._epoll.modify(self._listener.fileno(), events)

    def _remember(self, when: float) -> None:
        if self._next is None or when < self._next:
            self._next = when
