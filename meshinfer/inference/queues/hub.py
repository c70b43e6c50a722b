"""The server's side as a whole: one thread that accepts, receives, and writes what clients did not take at once."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Final

from meshinfer.inference.queues.address import Address
from meshinfer.inference.queues.codec import Packer
from meshinfer.inference.queues.door import Door
from meshinfer.inference.queues.forks import let_go_in_forks
from meshinfer.inference.queues.proof import make_hello
from meshinfer.inference.queues.session import Request, Session
from meshinfer.inference.queues.waiting import WaitingRoom
from meshinfer.inference.queues.wire import STAGING_BYTES

__all__ = ["Hub"]

logger = logging.getLogger("meshinfer.queues")

_GOODBYE_SECONDS: Final = 2.0
_STUCK_SECONDS: Final = 1.0


class Hub(WaitingRoom):
    """Admits clients and collects their requests.

    It needs one descriptor for each client, three of its own, and one thread, whatever clients there are. That thread
    waits for all of them at once and for none of them: what a client has sent is kept until its message is complete.
    Who has not proved to be a client within ten seconds is cut off.

    Args:
        address: where to listen.

    Raises:
        ValueError: another server listens there.
        OSError: there are no descriptors left.
    """

    def __init__(self, address: Address) -> None:
        super().__init__()
        self._door = Door(address)
        self.address = self._door.address
        self.packer = Packer("reply")
        self.staging = memoryview(bytearray(STAGING_BYTES))
        self.lost = 0
        self.forked_from = 0
        self._sessions: dict[int, Session] = {}
        self._clients: set[Session] = set()
        self._calls: deque[Session] = deque()
        self._arrived = False
        self._silently = False
        self._said_goodbye = False
        self._bell_lock = threading.RLock()  # the garbage collector may close us anywhere
        self._bell = -1
        try:
            self._bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            self._epoll = select.epoll()
        except OSError:
            self._door.close()
            if self._bell >= 0:
                os.close(self._bell)
            raise
        self._door.watch(self._epoll)
        self._epoll.register(self._bell, select.EPOLLIN)
        self._thread = threading.Thread(target=self._run, name="meshinfer-queue", daemon=True)
        let_go_in_forks(self)
        self._thread.start()

    @property
    def clients(self) -> int:
        """Clients connected now."""
        return len(self._clients)

    def attend(self, session: Session) -> None:
        """The thread has to look at what ``session`` waits for."""
        self._calls.append(session)
        if threading.current_thread() is not self._thread:
            self._ring()

    def close(self, *, silently: bool = False) -> None:
        """Tell every client, write what still waits for them for at most two seconds, and end. Idempotent.

        Args:
            silently: say nothing, since another server takes over.
        """
        with self._changed:
            if self.forked_from:
                return
            first, self._closing = not self._closing, True
            self._silently |= silently
            self._changed.notify_all()
        if first:
            self._stop_serving()
        if self._thread is not threading.current_thread():
            self._thread.join(_GOODBYE_SECONDS + _STUCK_SECONDS)
            if self._thread.is_alive():  # it computes: its clients should not wait for that
                for session in self._all():
                    session.cut()

    def _all(self) -> list[Session]:
        with self._changed:
            return list(self._sessions.values())

    def _stop_serving(self) -> None:
        self._door.lock()
        if not self._silently:
            for session in self._all():
                session.say_goodbye()
        self._said_goodbye = True
        self.pending.clear()
        self._work.ring()
        self._ring()

    def forked(self) -> None:
        """In a forked child: let go of the sockets, and of locks that nobody here will release."""
        self.forked_from = os.getppid()
        self._closing = True
        self._changed, self._work = threading.Condition(), self._doorbell()
        self._bell_lock, bell, self._bell = threading.RLock(), self._bell, -1
        for session in self._sessions.values():
            session.forked()
        self._door.close()
        self._epoll.close()
        if bell >= 0:
            os.close(bell)

    def _ring(self) -> None:
        with self._bell_lock:
            if self._bell >= 0:
                os.eventfd_write(self._bell, 1)

    # The thread. Sessions call the three methods that follow from there.

    def ready(self, request: Request) -> None:
        """A request is complete."""
        if not self._closing:
            self.pending.append(request)
            self._arrived = True

    def admit(self, session: Session) -> None:
        """A client has proved itself."""
        with self._changed:
            self._joins += 1
            self._clients.add(session)
        logger.debug("a client in %s joined %s", session.who, self.address)
        if self._closing and not self._silently:
            session.say_goodbye()

    def end(self, session: Session, lost: str) -> None:
        """A client has left, or was ``lost`` for this reason."""
        if session.fd not in self._sessions:
            return
        self._epoll.unregister(session.fd)
        session.close()
        if not lost or self._closing:
            logger.debug("a client in %s left %s", session.who, self.address)
        else:
            self.lost += session.joined
            what = "was lost" if session.joined else "did not join"
            logger.warning("a client of %s in %s %s: %s", self.address, session.who, what, lost)
        with self._changed:
            del self._sessions[session.fd]
            self._clients.discard(session)
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            while not self._said_goodbye:
                left = self._door.seconds_left()
                self._turn(left)
                if left == 0:
                    self._do_chores()
            self._write_last_words()
        except Exception:
            logger.exception("the thread of %s failed", self.address)
        finally:
            self._let_go()

    def _turn(self, timeout: float | None) -> None:
        """Wait for events and handle them; then wake the server if requests have arrived."""
        for fd, events in self._epoll.poll(timeout):
            if fd == self._bell:
                os.eventfd_read(fd)
            elif (session := self._sessions.get(fd)) is not None:
                self._handle(session, events)
            elif not self._closing:
                self._accept()
        if self._arrived:
            self._arrived = False
            self._work.ring()
        while self._calls:
            self._update(self._calls.popleft())

    def _handle(self, session: Session, events: int) -> None:
        try:
            session.handle(events)
        except Exception as error:  # whatever it is, such as too little memory, the others go on
            self.end(session, f"its connection failed: {error!r}")
        self._update(session)

    def _update(self, session: Session) -> None:
        if session.over:
            return
        wanted = session.interest()
        if wanted != session.registered:
            session.registered = wanted
            self._epoll.modify(session.fd, wanted)

    def _accept(self) -> None:
        connection = self._door.accept(len(self._sessions))
        if connection is None:
            return
        session = Session(self, connection, make_hello())
        with self._changed:
            self._sessions[session.fd] = session
        self._epoll.register(session.fd, session.registered)
        self._door.watch_stranger(session)

    def _do_chores(self) -> None:
        for session, reason in self._door.do_chores(list(self._sessions.values())):
            self.end(session, reason)

    def _write_last_words(self) -> None:
        self._door.unwatch()
        deadline = time.monotonic() + _GOODBYE_SECONDS
        while (left := deadline - time.monotonic()) > 0 and self._waiting(self._sessions.values()):
            self._turn(left)

    @staticmethod
    def _waiting(sessions: Iterable[Session]) -> bool:
        return any(session.has_mail for session in sessions)

    def _let_go(self) -> None:
        with self._changed:
            self._closing = True
            for session in self._sessions.values():
                session.close()
            self._sessions.clear()
            self._clients.clear()
            self._changed.notify_all()
        self._door.close()
        self._epoll.close()
        with self._bell_lock:
            os.close(self._bell)
            self._bell = -1
        self._work.ring()
