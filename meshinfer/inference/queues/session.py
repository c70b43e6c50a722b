"""One client, as the server sees it."""

from __future__ import annotations

import logging
import select
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Any, Final

from meshinfer.inference.queues.codec import Message, Structure
from meshinfer.inference.queues.labels import Labeller, Labels, unpacked
from meshinfer.inference.queues.proof import REPLY_BYTES, closed_verdict, verdict
from meshinfer.inference.queues.wire import (
    HEADER_BYTES,
    BadFrameError,
    Frame,
    FrameReader,
    Kind,
    header_of,
    skip,
)

if TYPE_CHECKING:
    from meshinfer.inference.queues.hub import Hub

__all__ = ["Request", "Session"]

logger = logging.getLogger("meshinfer.queues")

_MOST_HELD_BYTES: Final = 1 << 26
"""Of one client's requests that nobody has drained and replies that it has not taken: beyond, it is not read from."""

_READ, _WRITE = select.EPOLLIN, select.EPOLLOUT
_LEFT = ""


class Request:
    """A complete request.

    Attributes:
        arrived: ``time.perf_counter()``, in seconds.
        interaction: code of the interaction type.
        structure: equal for payloads that can be stacked, ``None`` for a pickled one, which was not looked into.
    """

    __slots__ = ("_body", "_layout", "arrived", "identifier", "interaction", "session", "structure")

    def __init__(self, session: Session, frame: Frame, layout: Structure | None) -> None:
        self.session = session
        self.identifier = frame.identifier
        self.interaction = frame.interaction
        self.structure = None if layout is None else layout.key
        self.arrived = time.perf_counter()
        self._layout = layout
        self._body: bytearray | memoryview = frame.body

    def take(self) -> Any:
        """The payload, once; for a pickled one, raises whatever its classes raise."""
        body, self._body = self._body, b""  # type: ignore[assignment]
        self.session.drained(len(body) + HEADER_BYTES)
        return unpacked(self._layout, body)


class Session:
    """The server's end of one connection.

    The hub's thread receives, and writes what the client did not take at once. Whoever serves writes replies. Neither
    ever waits for the client.

    Args:
        hub: to which it belongs.
        connection: accepted, from whom the address has no objection to; prepared.
        hello: what to say first.

    Attributes:
        since: ``time.monotonic()`` at which it was accepted.
    """

    def __init__(self, hub: Hub, connection: socket.socket, hello: bytes) -> None:
        connection.setblocking(False)
        self.fd = connection.fileno()
        self.who = hub.address.who(connection)
        self.since = time.monotonic()
        self.joined = False
        self.registered = _READ
        self._hub = hub
        self._connection = connection
        self._hello = hello
        self._reply = b""
        self._reader = FrameReader(hub.staging)
        self._labels = Labels()
        self._labeller = Labeller()
        self._lock = threading.RLock()  # the garbage collector may close us anywhere
        self._outbox: deque[memoryview] = deque()
        self._held = 0
        self._paused = False
        self.over = False
        self.send([memoryview(hello)])

    @property
    def has_mail(self) -> bool:
        """Whether something waits for the client to take it."""
        return bool(self._outbox)

    # For whoever serves.

    def drained(self, count: int) -> None:
        """A request of ``count`` bytes was drained."""
        with self._lock:
            self._held -= count
        if self._paused:
            self._hub.attend(self)

    def reply(self, identifier: int, message: Message) -> None:
        """Send a result; silently not, when the client has gone."""
        with self._lock:
            self._send(self._labeller.label(message, Kind.RESULT, identifier))
            left = bool(self._outbox)
        if left:
            self._hub.attend(self)
        else:
            message.recycle()

    def reply_error(self, identifier: int, data: bytes) -> None:
        """Send an encoded exception; likewise."""
        self.send([memoryview(header_of(Kind.ERROR, identifier, len(data))), memoryview(data)])

    def say_goodbye(self) -> None:
        """The server closes: nothing more will come."""
        with self._lock:
            farewell = header_of(Kind.BYE) if self.joined else closed_verdict()
            self.send([memoryview(farewell)])

    def send(self, buffers: list[memoryview]) -> None:
        """Send, or have the hub's thread send what the client does not take now."""
        with self._lock:
            self._send(buffers)
            left = bool(self._outbox)
        if left:
            self._hub.attend(self)

    def _send(self, buffers: list[memoryview]) -> None:
        if self.over:
            return
        if not self._outbox:
            try:
                buffers = skip(buffers, self._connection.sendmsg(buffers))
            except BlockingIOError:
                pass
            except OSError as error:  # it has gone; its last words may still be unread
                logger.debug("a client takes no more: %s", str(error))
                return
        self._held += sum(map(len, buffers))
        self._outbox.extend(buffers)

    # For the hub's thread.

    def interest(self) -> int:
        """The events to wait for."""
        with self._lock:
            limit = _MOST_HELD_BYTES // 2 if self._paused else _MOST_HELD_BYTES
            self._paused = self._held > limit
            return (0 if self._paused else _READ) | (_WRITE if self._outbox else 0)

    @property
    def silent(self) -> bool:
        """Whether the client's host has vanished."""
        return self._hub.address.is_silent(self._connection)

    def handle(self, events: int) -> None:
        """Do what the events allow."""
        if events & _WRITE:
            self.flush()
        if events & _READ:
            if self.joined:
                self._receive()
            else:
                self._receive_reply()
        elif events & (select.EPOLLHUP | select.EPOLLERR):
            self._hub.end(self, "its process has gone")

    def flush(self) -> None:
        """Send what the client takes now."""
        with self._lock:
            try:
                while self._outbox:
                    first = self._outbox.popleft()
                    sent = self._connection.send(first)
                    self._held -= sent
                    if sent < len(first):
                        self._outbox.appendleft(first[sent:])
            except BlockingIOError:
                self._outbox.appendleft(first)
            except OSError as error:
                logger.debug("a client takes no more: %s", str(error))
                self._outbox.clear()

    def close(self) -> None:
        """Close the socket. Idempotent."""
        with self._lock:
            self.over = True
            self._outbox.clear()
            self._connection.close()

    def cut(self) -> None:
        """End the stream without closing the socket, which another thread may be using."""
        with self._lock:
            if not self.over:
                self.over = True
                self._connection.shutdown(socket.SHUT_RDWR)

    def forked(self) -> None:
        """In a forked child: close the copy of the socket."""
        self.over = True
        self._connection.close()

    def _receive_reply(self) -> None:
        """The client's proof, before which nothing is interpreted."""
        try:
            data = self._connection.recv(REPLY_BYTES - len(self._reply))
        except OSError as error:
            return self._hub.end(self, str(error))
        self._reply += data
        if not data:
            self._hub.end(self, "it went away while it joined")
        elif len(self._reply) == REPLY_BYTES:
            answer, objection = verdict(self._hub.address.secret, self._hello, self._reply)
            with self._lock:  # a goodbye must know which of the two it follows
                self.send([memoryview(answer)])
                self.joined = not objection
            if objection:
                self._hub.end(self, objection)
            else:
                self._hub.admit(self)

    def _receive(self) -> None:
        try:
            frames = self._reader.read(self._connection.recv_into)
            if frames is None:
                where = " in the midst of a message" if self._reader.midway else ""
                return self._hub.end(self, f"its process has gone{where}")
            for frame in frames:
                if not self._accept(frame):
                    return self._hub.end(self, _LEFT)
        except BlockingIOError:
            return
        except OSError as error:
            self._hub.end(self, f"its process has gone: {error}")
        except BadFrameError as error:
            self._hub.end(self, f"it sent nonsense: {error}")

    def _accept(self, frame: Frame) -> bool:
        """Take one frame; ``False`` for a goodbye."""
        if frame.kind == Kind.REQUEST:
            request = Request(self, frame, self._labels.structure(frame))
            with self._lock:
                self._held += len(frame.body) + HEADER_BYTES
            self._hub.ready(request)
        elif frame.kind == Kind.LAYOUT:
            self._labels.learn(frame)
        elif frame.kind == Kind.BYE:
            return False
        else:
            raise BadFrameError(f"a frame of kind {frame.kind}")
        return True
