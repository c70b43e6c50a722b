"""The client's half of one connection: what is in flight, and the thread that receives."""

from __future__ import annotations

import logging
import math
import select
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

from meshinfer.errors import ClosedError, PeerLostError, ServerClosedError, TransportError
from meshinfer.inference.future import Flight, ReplyFuture
from meshinfer.inference.queues.address import Address
from meshinfer.inference.queues.codec import Message
from meshinfer.inference.queues.forks import let_go_in_forks
from meshinfer.inference.queues.labels import Labeller, Labels, unpacked
from meshinfer.inference.queues.wire import (
    STAGING_BYTES,
    BadFrameError,
    Frame,
    FrameReader,
    Kind,
    header_of,
    skip,
)
from meshinfer.inference.remote_errors import decode_exception

__all__ = ["Connection"]

logger = logging.getLogger("meshinfer.queues")

_GOODBYE_SECONDS: Final = 1.0
_REQUEST = int(Kind.REQUEST)


class Connection:
    """One connection to a server, proved by both sides.

    Args:
        connection: a socket that blocks, prepared; closed by us.
        address: of the server.
        patience: seconds between two looks of a waiter without a deadline; our thread notices the server's end itself.
        account: what else is known of a server that has gone without a goodbye, for the error; called by our thread.
    """

    def __init__(
        self,
        connection: socket.socket,
        address: Address,
        patience: float,
        account: Callable[[], str],
    ) -> None:
        self.patience = patience
        self.address = address
        self._socket = connection
        self._account = account
        self._turn = threading.Lock()  # to write
        self._lock = threading.RLock()  # the garbage collector may close us anywhere
        self._labeller = Labeller()
        self._labels = Labels()
        self._backlog: list[memoryview] = []
        self._identifiers = 0
        self._flying: dict[int, Flight] = {}
        self._ended: type[TransportError] | None = None
        self._reason = ""
        self._room = select.poll()
        self._room.register(connection.fileno(), select.POLLOUT)
        self._thread = threading.Thread(target=self._run, name="meshinfer-client", daemon=True)
        let_go_in_forks(self)
        self._thread.start()

    @property
    def in_flight(self) -> int:
        """Requests that have neither been answered nor given up."""
        return len(self._flying)

    @property
    def ended(self) -> bool:
        """Whether this connection is over."""
        return self._ended is not None

    @property
    def error(self) -> TransportError:
        """Why it is over."""
        return (self._ended or TransportError)(self._reason)

    def submit(self, message: Message, interaction: int, deadline: float) -> ReplyFuture:
        """Send a request.

        Args:
            message: packed; ours from now on.
            interaction: code of the interaction type.
            deadline: ``time.monotonic()`` at which to give up.

        Raises:
            TimeoutError: the server did not take it in time. What of it has left is completed before the next one.
            TransportError: the connection is over.
        """
        if not self._turn.acquire(timeout=max(deadline - time.monotonic(), 0.0)):
            raise self._not_taken()
        try:
            if self._backlog:
                self._send(self._backlog, deadline)
                if self._backlog:
                    raise self._not_taken()
            future = self._enter()
            self._send(
                self._labeller.label(message, _REQUEST, future.identifier, interaction), deadline
            )
            if self._backlog:
                self._flying.pop(future.identifier, None)
                raise self._not_taken()
        finally:
            self._turn.release()
        message.recycle()
        return future

    def forget(self, future: ReplyFuture) -> None:
        """Drop a cancelled request; its reply is dropped when it comes."""
        assert isinstance(future, Flight)
        self._flying.pop(future.identifier, None)

    def check_alive(self) -> None:
        """The end of the server ends this connection at once, except in a forked child, where nobody receives."""
        if self._ended is not None:
            for future in list(self._flying.values()):
                future.fail(self.error)

    def close(self) -> None:
        """Say goodbye and close; requests in flight raise :class:`~meshinfer.errors.ClosedError`. Idempotent."""
        if self._end(ClosedError, "the client was closed with this request in flight"):
            self._say_goodbye()
        if self._thread is not threading.current_thread():
            self._thread.join(_GOODBYE_SECONDS)  # unless a callback of the user holds it up

    def forked(self) -> None:
        """In a forked child: close the copy of the socket. The requests in flight are the parent's."""
        self._lock = threading.RLock()  # another thread may have held it
        self._ended, self._reason = PeerLostError, "the connection is that of the parent process"
        self._socket.close()

    def _enter(self) -> Flight:
        with self._lock:
            if self._ended is not None:
                raise self.error
            self._identifiers += 1
            future = self._flying[self._identifiers] = Flight(self, self._identifiers)
        return future

    def _send(self, buffers: list[memoryview], deadline: float) -> None:
        """Send all that the server takes before the deadline; the rest becomes the backlog."""
        while True:
            try:
                buffers = skip(buffers, self._socket.sendmsg(buffers, (), socket.MSG_DONTWAIT))
            except BlockingIOError:
                pass
            except OSError as error:  # our thread finds out why, and ends what is in flight
                logger.debug("a request did not leave: %s", str(error))
                buffers = []
            left = deadline - time.monotonic()
            if not buffers or left <= 0:
                self._backlog = buffers
                return
            self._room.poll(math.ceil(left * 1000))

    def _not_taken(self) -> TimeoutError:
        return TimeoutError(
            f"the server at {self.address} did not take the request in time; is it stopped, or overloaded?"
        )

    def _say_goodbye(self) -> None:
        """Unless somebody is in the midst of a message, which can only end with the stream."""
        if self._turn.acquire(timeout=_GOODBYE_SECONDS):
            try:
                if not self._backlog:
                    self._send([memoryview(header_of(Kind.BYE))], 0.0)
            finally:
                self._turn.release()
        self._hang_up()

    def _hang_up(self) -> None:
        """End the stream, which our thread and those that wait for room notice."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            logger.debug("the stream had ended: %s", str(error))

    # The thread.

    def _run(self) -> None:
        try:
            self._lose(self._receive_all())
        except Exception as error:
            logger.exception("a client failed to receive")
            self._end(TransportError, f"this client failed to receive: {error!r}")
        self._hang_up()
        with self._turn:  # nobody is using the socket
            self._socket.close()
            self._backlog = []

    def _receive_all(self) -> str:
        """Until the end: how that came, if not with a goodbye."""
        reader = FrameReader(memoryview(bytearray(STAGING_BYTES)))
        try:
            while self._receive(reader):
                pass
        except (OSError, BadFrameError) as error:
            return f"the server at {self.address} has gone: {error}"
        return f"the process of the server at {self.address} has gone"

    def _receive(self, reader: FrameReader) -> bool:
        """Wait for something and deliver it; ``False`` at the end."""
        try:
            frames = reader.read(self._socket.recv_into)
        except BlockingIOError:  # nothing came for a while
            if self.address.is_silent(self._socket):
                raise TimeoutError("its host does not answer any more") from None
            return True
        return frames is not None and all(self._deliver(frame) for frame in frames)

    def _lose(self, reason: str) -> None:
        """It ended without a goodbye."""
        if not self.ended:
            self._end(PeerLostError, reason + self._account())

    def _deliver(self, frame: Frame) -> bool:
        """``False`` for the server's goodbye."""
        if frame.kind == Kind.RESULT:
            structure = self._labels.structure(frame)
            future = self._flying.pop(frame.identifier, None)
            if future is not None:
                try:
                    result = unpacked(structure, frame.body)
                except Exception as error:  # a pickled reply may hold anything
                    future.fail(TransportError(f"the reply cannot be rebuilt here: {error!r}"))
                else:
                    future.fulfil(result)
        elif frame.kind == Kind.ERROR:
            future = self._flying.pop(frame.identifier, None)
            if future is not None:
                future.fail(decode_exception(bytes(frame.body)))
        elif frame.kind == Kind.LAYOUT:
            self._labels.learn(frame)
        elif frame.kind == Kind.BYE:
            self._end(ServerClosedError, "the server has shut down")
            return False
        else:
            raise BadFrameError(f"a frame of kind {frame.kind}")
        return True

    def _end(self, kind: type[TransportError], reason: str) -> bool:
        """Fail everything in flight; ``False`` when the connection had ended before."""
        with self._lock:
            if self._ended is not None:
                return False
            self._ended, self._reason = kind, reason
            futures = list(self._flying.values())
            self._flying.clear()
        for future in futures:
            future.fail(kind(reason))
        return True
