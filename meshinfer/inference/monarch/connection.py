"""The client's half of one connection: how it joins, what is in flight, and the thread that receives."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from meshinfer.errors import (
    ClosedError,
    PeerLostError,
    RefusedError,
    ServerClosedError,
    TransportError,
)
from meshinfer.inference.future import ReplyFuture
from meshinfer.inference.monarch.flights import Flights
from meshinfer.inference.monarch.frames import (
    NOBODY,
    Signal,
    labelled,
    open_message,
    read_facts,
    signal,
    write_facts,
)
from meshinfer.inference.monarch.locate import MonarchAddress
from meshinfer.inference.monarch.mortality import ProcessName, Watch
from meshinfer.inference.monarch.ports import TICK_SECONDS, Inbox
from meshinfer.inference.queues.codec import Message
from meshinfer.inference.queues.forks import let_go_in_forks
from meshinfer.inference.queues.labels import Labeller, Labels
from meshinfer.inference.queues.proof import VERDICT_BYTES, check_hello, check_verdict, make_reply
from meshinfer.inference.queues.wire import BadFrameError, Frame, Kind, header_of

__all__ = ["MonarchConnection"]

logger = logging.getLogger("meshinfer.monarch")

_REQUEST = int(Kind.REQUEST)
_FAR: Final = (2.5, 12.0)
"""Of a server on another host: seconds of silence until it is asked whether it is there, and until it is lost."""
_NEAR: Final = (30.0, 300.0)
"""Of one whose process is watched, so that this is for messages that get lost, or an actor of it that was stopped."""
_SLOWEST: Final = float(16 << 20)
"""Bytes a second that a message travels at least: how much longer a large one may keep an answer."""


class MonarchConnection:
    """One connection to a server, proved by both sides.

    Args:
        address: of the server, or of who knows where it is.
        patience: seconds between two looks of a waiter without a deadline; our thread notices the server's end itself.
        account: what else is known of a server that has gone without a goodbye, for the error; called by our thread.
        actor: of this process, in whose name to send where the calling thread has none.
        serves: where we serve, for who is asked by the clients.

    Raises:
        ValueError: the address is none, or this process was forked from one that uses monarch.
        PeerLostError: the actor of this process was stopped.
    """

    def __init__(
        self,
        address: MonarchAddress,
        patience: float,
        account: Callable[[], str],
        actor: Any = None,
        serves: MonarchAddress | None = None,
    ) -> None:
        self.address = address
        self.redirected = False
        self._account = account
        self._serves = serves
        self._flights = Flights(patience)
        self._turn = threading.Lock()  # to write
        self._labeller = Labeller()
        self._labels = Labels()
        self._token = b""
        self._hello = self._reply = b""
        self._joined = threading.Event()
        self._leads_to: MonarchAddress | None = None
        self._dead = False
        self._heard = self._looked = time.monotonic()
        self._pid = os.getpid()
        self._inbox = Inbox(self, "meshinfer-client", actor)
        self._server = self._inbox.outlet(address.port)
        let_go_in_forks(self)
        self._watch = Watch(address.process, self._bury)
        self._server.send(*signal(NOBODY, Signal.KNOCK, self._inbox.address.encode()))

    # For clients.

    @property
    def in_flight(self) -> int:
        """Requests that have neither been answered nor given up."""
        return len(self._flights)

    @property
    def ended(self) -> bool:
        """Whether this connection is over."""
        return self._flights.ended

    @property
    def error(self) -> TransportError:
        """Why it is over."""
        return self._flights.error

    def join(self, deadline: float) -> MonarchAddress | None:
        """Wait until the server has let us in: ``None``, or the address of the one that serves instead.

        Raises:
            TimeoutError: it did not answer by ``deadline`` on the clock of ``time.monotonic()``.
            PeerLostError: its process has ended.
            RefusedError: it is not the server meant, or does not take us.
        """
        joined = self._joined.wait(max(deadline - time.monotonic(), 0.0))
        if self.ended:
            raise self.error
        if not joined:
            raise TimeoutError(f"the server in {self.address} did not answer in time")
        return self._leads_to

    def submit(self, message: Message, interaction: int, deadline: float) -> ReplyFuture:
        """Send a request.

        Args:
            message: packed; ours from now on.
            interaction: code of the interaction type.
            deadline: ``time.monotonic()`` at which to give up.

        Raises:
            TimeoutError: the server has 64 MiB of requests that it did not answer in time.
            TransportError: the connection is over.
        """
        if not self._turn.acquire(timeout=max(deadline - time.monotonic(), 0.0)):
            raise self._not_taken()
        try:
            future = self._flights.add(message.length, deadline)
            if future is None:
                raise self._not_taken()
            for parts in labelled(
                self._labeller, message, _REQUEST, future.identifier, interaction
            ):
                self._server.send(self._token, *parts)
        finally:
            self._turn.release()
        message.recycle()
        return future

    def close(self) -> None:
        """Say goodbye and close; requests in flight raise :class:`~meshinfer.errors.ClosedError`. Idempotent."""
        if self._flights.end(ClosedError, "the client was closed with this request in flight"):
            self._say_goodbye()
        self._let_go()

    def forked(self) -> None:
        """In a forked child: the connection is the parent's."""
        self._flights.forked(PeerLostError, "the connection is that of the parent process")

    def _not_taken(self) -> TimeoutError:
        return TimeoutError(
            f"the server in {self.address} did not take the request in time; is it stopped, or overloaded?"
        )

    def _say_goodbye(self) -> None:
        if self._token and self._pid == os.getpid():
            self._server.send(self._token, header_of(Kind.BYE))

    def _let_go(self) -> None:
        self._watch.cancel()
        self._joined.set()
        self._inbox.close()

    def _bury(self) -> None:
        """The watch says that the server's process has ended."""
        self._dead = True
        self._inbox.ring()

    # The inbox's thread.

    def receive(self, message: bytearray) -> None:
        """Part of an inbox's recipient."""
        try:
            token, frame = open_message(message)
            if token == self._token and token:
                self._heard = time.monotonic()
                self._deliver(frame)
            elif frame.kind == Signal.CHALLENGE and not self._token:
                self._prove(token, frame)
        except BadFrameError as error:
            self._lose(f"the server in {self.address} sent nonsense: {error}")
        except RefusedError as error:
            self._finish(RefusedError, str(error))
        except ServerClosedError as error:
            self._finish(ServerClosedError, str(error))

    def tick(self) -> None:
        """Part of an inbox's recipient."""
        now = time.monotonic()
        if now - self._looked > 3 * TICK_SECONDS:  # it is we who were not there
            self._heard = now
        self._looked = now
        if self._dead:
            self._lose(f"the process of the server in {self.address} has gone")
        elif self._token:
            self._check_silence(now - self._heard)

    def cut_off(self, reason: str) -> None:
        """Part of an inbox's recipient."""
        if self._flights.end(PeerLostError, f"this client cannot receive any more: {reason}"):
            self._say_goodbye()
            self._let_go()

    def _check_silence(self, silence: float) -> None:
        ask_after, lose_after = _NEAR if self._watch.works else _FAR
        lose_after += self._flights.owed_bytes / _SLOWEST
        if silence > lose_after and not self.address.process.is_held_up:
            self._lose(f"the server in {self.address} has not answered for {silence:.0f} s")
        elif silence > ask_after:
            here = self._inbox.address.encode()
            self._server.send(*signal(self._token, Signal.PING, here))

    def _prove(self, token: bytes, frame: Frame) -> None:
        self._hello, self._token = bytes(frame.body), token
        check_hello(self._hello, self.address)
        self._reply = make_reply(self.address.secret, self._hello)
        serves = None if self._serves is None else self._serves.facts
        facts = {"process": ProcessName.own().facts, "serves": serves}
        body = self._reply + write_facts(facts)
        self._server.send(*signal(token, Signal.PROOF, body))

    def _deliver(self, frame: Frame) -> None:
        if self._flights.finish(frame, self._labels):
            return
        if frame.kind == Kind.LAYOUT:
            self._labels.learn(frame)
        elif frame.kind == Kind.BYE:
            self._finish(ServerClosedError, "the server has shut down")
            self._say_goodbye()
        elif frame.kind == Signal.VERDICT:
            self._hear_verdict(bytes(frame.body))
        elif frame.kind == Signal.REDIRECT:
            self._leads_to = MonarchAddress.read(read_facts(frame.body), self.address.secret)
            self._joined.set()
        elif frame.kind == Signal.GONE:
            self._lose(bytes(frame.body).decode(errors="replace"))
        elif frame.kind != Signal.PONG:
            raise BadFrameError(f"a frame of kind {frame.kind}")

    def _hear_verdict(self, body: bytes) -> None:
        answer, facts = body[:VERDICT_BYTES], body[VERDICT_BYTES:]
        check_verdict(self.address.secret, self._hello, self._reply, answer, self.address)
        if not read_facts(facts).get("sent_on"):
            self._joined.set()  # otherwise it tells us where, once somebody serves

    def _lose(self, reason: str) -> None:
        """It ended without a goodbye."""
        if not self.ended:
            self._finish(PeerLostError, reason + self._account())

    def _finish(self, kind: type[TransportError], reason: str) -> None:
        self._flights.end(kind, reason)
        self._let_go()
