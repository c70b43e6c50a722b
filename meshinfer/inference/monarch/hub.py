"""The server's side as a whole: one port, and one thread that receives from all clients."""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final, cast

from meshinfer.inference.monarch.connection import MonarchConnection
from meshinfer.inference.monarch.door import Door, Guest
from meshinfer.inference.monarch.frames import NOBODY, Signal, open_message, signal, write_facts
from meshinfer.inference.monarch.guide import Guide
from meshinfer.inference.monarch.locate import MonarchAddress
from meshinfer.inference.monarch.ports import TICK_SECONDS, Inbox
from meshinfer.inference.monarch.session import MonarchSession
from meshinfer.inference.queues.codec import Packer
from meshinfer.inference.queues.forks import let_go_in_forks
from meshinfer.inference.queues.session import Request
from meshinfer.inference.queues.waiting import WaitingRoom
from meshinfer.inference.queues.wire import BadFrameError, Frame, Kind

if TYPE_CHECKING:
    from meshinfer.inference.queues.session import Session

__all__ = ["MonarchHub"]

logger = logging.getLogger("meshinfer.monarch")

_GOODBYE_SECONDS: Final = 2.0
_FORGOTTEN: Final = "the server took this client for lost, since nothing was heard of it for long"
_REPLACED: Final = "another process serves from now on"


class MonarchHub(WaitingRoom):
    """Admits clients and collects their requests.

    It needs one port and one thread, whatever clients there are; replies leave from the threads of those who make
    them. Nobody waits for a client.

    Args:
        secret: of the job; ``None`` for a new one.
        actor: of this process, in whose name to listen where the calling thread has none.

    Raises:
        PeerLostError: the actor of this process was stopped.
        ValueError: this process was forked from one that uses monarch.
    """

    def __init__(self, secret: bytes | None, actor: Any = None) -> None:
        super().__init__()
        self.packer = Packer("reply")
        self.lost = 0
        self.forked_from = 0
        self._guide = Guide()
        self._sessions: dict[bytes, MonarchSession] = {}
        self._dead: deque[MonarchSession] = deque()
        self._looked = time.monotonic()
        self._registration: MonarchConnection | None = None
        key = secrets.token_bytes(32) if secret is None else secret
        self._door = Door(key, lambda address: self._inbox.outlet(address))
        self._inbox = Inbox(self, "meshinfer-monarch", actor)
        self.address = MonarchAddress.own(self._inbox.address, key)
        let_go_in_forks(self)

    # For whoever serves.

    @property
    def clients(self) -> int:
        """Clients connected now."""
        return len(self._sessions)

    @property
    def actor(self) -> Any:
        """In whose name it listens."""
        return self._inbox.actor

    def register(self, home: MonarchAddress, deadline: float) -> None:
        """Serve for ``home``, which sends its clients here for as long as this hub is open.

        Args:
            home: address of a hub that guides.
            deadline: ``time.monotonic()`` at which to give up.

        Raises:
            PeerLostError, TimeoutError, RefusedError: it has ended, does not answer, or does not take us.
        """
        patience = max(deadline - time.monotonic(), 0.0)
        registration = MonarchConnection(home, patience, str, self.actor, serves=self.address)
        try:
            registration.join(deadline)
        except BaseException:
            registration.close()
            raise
        self._registration = registration

    def guide(self) -> None:
        """Serve no longer, and send clients on to who does. Those that are here lose what they have in flight."""
        with self._changed:
            if self._guide.active:
                return
            self._guide.active = True
            for session in list(self._sessions.values()):
                session.dismiss(_REPLACED)
                self._remove(session)
        self.pending.clear()

    def close(self, *, silently: bool = False) -> None:
        """Tell every client, wait for their goodbyes for at most two seconds, and end. Idempotent.

        Args:
            silently: say nothing.
        """
        if self.forked_from:
            return
        with self._changed:
            first, self._closing = not self._closing, True
            sessions = list(self._sessions.values())
            self._changed.notify_all()
        if first:
            if not silently:
                self._say_goodbye(sessions)
            for session in sessions:
                session.end()
            if self._registration is not None:
                self._registration.close()
            self.pending.clear()
            self._work.ring()
        self._inbox.close()

    def forked(self) -> None:
        """In a forked child: nothing here is ours, and nobody will release the locks."""
        self.forked_from = os.getppid()
        self._closing = True
        self._changed, self._work = threading.Condition(), self._doorbell()
        for session in self._sessions.values():
            session.forked()

    def _say_goodbye(self, sessions: list[MonarchSession]) -> None:
        """A process that ends at once could take what it has sent with it: hence each client answers."""
        for session in sessions:
            session.say_goodbye()
        if self._inbox.receives_meanwhile:
            with self._changed:
                self._changed.wait_for(lambda: not self._sessions, _GOODBYE_SECONDS)

    # The inbox's thread.

    def receive(self, message: bytearray) -> None:
        """Part of an inbox's recipient."""
        session: MonarchSession | None = None
        try:
            token, frame = open_message(message)
            session = self._sessions.get(token)
            if session is not None:
                session.hear()
                self._hear(session, frame)
            elif token != NOBODY:
                self._answer_stranger(token, frame)
            elif frame.kind == Signal.KNOCK and not self._closing:
                self._door.challenge(frame)
        except BadFrameError as error:
            self._lose(session, f"it sent nonsense: {error}")
        except Exception as error:  # whatever it is, such as too little memory, the others go on
            self._lose(session, f"what it sent could not be received: {error!r}")

    def tick(self) -> None:
        """Part of an inbox's recipient."""
        while self._dead:
            self._lose(self._dead.popleft(), "its process has gone")
        now = time.monotonic()
        late, self._looked = now - self._looked > 3 * TICK_SECONDS, now
        for session in list(self._sessions.values()):
            if late:  # it is we who were not there
                session.hear()
            elif session.is_silent:
                self._lose(session, "its host does not answer any more")
        forgotten = self._door.forget_late()
        if forgotten:
            logger.warning("%d clients of %s did not prove themselves", forgotten, self.address)

    def cut_off(self, reason: str) -> None:
        """Part of an inbox's recipient."""
        if reason and not self._closing:
            logger.warning("the server in %s receives no more: %s", self.address, reason)
        self.close()

    def _hear(self, session: MonarchSession, frame: Frame) -> None:
        if frame.kind == Kind.REQUEST:
            request = Request(cast("Session", session), frame, session.labels.structure(frame))
            if not self._closing:
                self.pending.append(request)
                self._work.ring()
        elif frame.kind == Kind.LAYOUT:
            session.labels.learn(frame)
        elif frame.kind == Signal.PING:
            session.tell(Signal.PONG)
        elif frame.kind == Kind.BYE:
            logger.debug("a client in %s left %s", session.process, self.address)
            self._end(session)
        else:
            raise BadFrameError(f"a frame of kind {frame.kind}")

    def _answer_stranger(self, token: bytes, frame: Frame) -> None:
        guest = self._door.judge(token, frame)
        if guest is not None:
            self._answer(guest)
        elif frame.kind == Signal.PING:
            outlet = self._inbox.outlet(bytes(frame.body).decode())
            outlet.send(*signal(token, Signal.GONE, _FORGOTTEN.encode()))

    def _answer(self, guest: Guest) -> None:
        if guest.process is None:
            logger.warning("a client of %s was refused: %s", self.address, guest.objection)
            guest.outlet.send(*signal(guest.token, Signal.VERDICT, guest.answer))
        else:
            session = MonarchSession(guest.token, guest.outlet, guest.process, self._bury)
            with self._changed:
                self._admit(session, guest)

    def _admit(self, session: MonarchSession, guest: Guest) -> None:
        sent_on = self._guide.active and guest.serves is None
        session.tell(Signal.VERDICT, guest.answer + write_facts({"sent_on": sent_on}))
        if self._closing:
            session.say_goodbye()
            return session.end()
        self._sessions[session.token] = session
        if sent_on:
            self._guide.send_on(session)
        elif guest.serves is None:
            self._joins += 1
            logger.debug("a client in %s joined %s", session.process, self.address)
        elif self._guide.active:
            logger.debug("the server is in %s now", guest.serves)
            former = self._guide.follow(session, guest.serves)
            if former is not None:
                former.dismiss(_REPLACED)
                self._remove(former)
        else:
            raise BadFrameError("it wants to serve, and this process does that itself")

    def _bury(self, session: MonarchSession) -> None:
        """In the thread of the watch: its process has ended."""
        self._dead.append(session)
        self._inbox.ring()

    def _lose(self, session: MonarchSession | None, reason: str) -> None:
        if session is None:
            logger.warning("%s got a message that is none of a client: %s", self.address, reason)
        elif session.token in self._sessions:
            session.dismiss(f"the server gave this client up: {reason}")
            self._end(session)
            if not self._closing:
                self.lost += 1
                who = session.process
                logger.warning("a client of %s in %s was lost: %s", self.address, who, reason)

    def _end(self, session: MonarchSession) -> None:
        session.end()
        with self._changed:
            self._remove(session)

    def _remove(self, session: MonarchSession) -> None:
        self._sessions.pop(session.token, None)
        self._guide.forget(session)
        self._changed.notify_all()
