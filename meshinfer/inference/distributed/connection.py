"""The client's half of one pair: what is in flight, what waits for room, and the thread that receives."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from meshinfer.errors import ClosedError, PeerLostError, ServerClosedError, TransportError
from meshinfer.inference.distributed.frames import (
    TAG_ERROR,
    TAG_ROW,
    Field,
    Frame,
    Kind,
    announcement,
)
from meshinfer.inference.distributed.pair import FOREVER, Pair, Receiving, plain
from meshinfer.inference.distributed.plane import DataPlane, FramedRows
from meshinfer.inference.future import ReplyFuture
from meshinfer.inference.remote_errors import decode_exception
from meshinfer.layout import PayloadLayout

__all__ = ["Connection"]

logger = logging.getLogger("meshinfer.distributed")

_KIND, _ID, _ACKNOWLEDGED, _INTERACTION = (
    Field.KIND,
    Field.ID,
    Field.ACKNOWLEDGED,
    Field.INTERACTION,
)
_LENGTH = Field.LENGTH
_POSTED = 16
_POSTED_BYTES = 1 << 16
_REQUEST, _RESULT, _ERROR = int(Kind.REQUEST), int(Kind.RESULT), int(Kind.ERROR)
_ROW = int(Kind.ROW)
_LAST_WORD = timedelta(seconds=0.2)


class _Flight:
    """A request on the wire: its buffer must stay until the reply has come."""

    __slots__ = ("frame", "future", "work")

    def __init__(self, future: ReplyFuture, frame: Frame) -> None:
        self.future = future
        self.frame = frame
        self.work: list[Any] = []


class _Reply:
    """A reply frame, the receive posted for it, and how to read a result out of it."""

    __slots__ = ("frame", "read", "work")

    def __init__(
        self, layout: PayloadLayout, frame: Frame, version_key: tuple[str, ...] | None
    ) -> None:
        self.frame = frame
        version = {} if version_key is None else {version_key: self.frame.version}
        self.read = layout.reader(self.frame.views, version)
        self.work: Receiving | None = None


class Connection:
    """One session with a server.

    At most ``window`` requests are on the wire; later ones wait here, and leave as replies come in. More reply frames
    than that have a receive posted, so that neither a reply nor the server's goodbye waits for us. Frames are posted
    again many at a time: each posting writes to the server, on the connection that it replies on.

    A thread of its own receives, always. Receiving in the thread that waits would save a hand-over (some 20 us), but
    who waits inside gloo runs no signal handlers, misses deadlines, and aborts the process if that ends meanwhile.

    Args:
        pair: proved by both sides.
        plane: of its rows. Requests can be sent over it already; the thread here begins to receive.
        response_layout: of the replies.
        window: requests on the wire at once.
        spare: takes request frames that are not needed any more.
        policy_version_key: where a reply's policy version goes, ``None`` for nowhere.
        patience: seconds without a reply after which a waiter asks whether the server is alive.
        probe: asks; raises when it is not.
        peer: what errors call the other side.
        room: memory for one row, uint8, of the size that the server announces, for rows that come as messages of their
            own. Such a reply is a TensorDict of that memory (``row``) and of scalars (``version``, ``origin``): it is
            not copied, and the next row goes elsewhere. Where the server has no row to give, it is empty.
    """

    def __init__(
        self,
        pair: Pair,
        plane: DataPlane,
        response_layout: PayloadLayout,
        *,
        window: int,
        spare: list[Frame],
        policy_version_key: tuple[str, ...] | None,
        patience: float,
        probe: Callable[[], None],
        peer: str = "server",
        room: Callable[[], Tensor] | None = None,
    ) -> None:
        self.patience = patience
        self.replaced = False
        self._pair: Pair | None = pair
        self._plane = plane
        self._window = window
        self._probe = probe
        self._peer = peer
        self._room = room
        self._lock = threading.Lock()
        self._identifiers = 0
        self._flying: dict[int, _Flight] = {}
        self._waiting: deque[tuple[ReplyFuture, Frame]] = deque()
        self._spare = spare
        self._received = 1  # the server's proof was the first frame
        self._ended: Callable[[], TransportError] | None = None
        self._goodbye: tuple[list[Tensor], list[Any]] | None = None
        self._consumed: list[_Reply] = []
        posted = max(window + 1, min(_POSTED, _POSTED_BYTES // response_layout.row_bytes))
        frames = plane.frames(response_layout, posted)
        self._enough_consumed = max(1, posted - window - 1)
        self._replies = deque(
            self._post(pair, _Reply(response_layout, frame, policy_version_key)) for frame in frames
        )
        self.thread = threading.Thread(target=self._run, name="meshinfer-client", daemon=True)
        self.thread.start()

    @property
    def in_flight(self) -> int:
        """Requests that have neither been answered nor given up."""
        return len(self._flying) + len(self._waiting)

    @property
    def ended(self) -> bool:
        """Whether this connection is over."""
        return self._ended is not None

    @property
    def error(self) -> TransportError:
        """Why it is over."""
        return TransportError("the connection is alive") if self._ended is None else self._ended()

    def submit(self, frame: Frame, interaction: int) -> ReplyFuture:
        """Send a packed frame, or queue it while the window is full. Never waits."""
        future = ReplyFuture(self)
        frame.header[_KIND], frame.header[_INTERACTION] = _REQUEST, interaction
        with self._lock:
            if self._ended is not None:
                raise self._ended()
            if len(self._flying) < self._window:
                self._send(future, frame)
            else:
                self._waiting.append((future, frame))
        return future

    def forget(self, future: ReplyFuture) -> None:
        """Drop a cancelled request that has not left yet; the reply to one that has is dropped when it comes."""
        with self._lock:
            for entry in self._waiting:
                if entry[0] is future:
                    self._waiting.remove(entry)
                    self._spare.append(entry[1])
                    return

    def check_alive(self) -> None:
        """Ask whether the server process still answers; ends the connection when it does not."""
        if self._ended is not None:
            return
        try:
            self._probe()
        except Exception as error:
            self._end(PeerLostError, f"the {self._peer} does not answer any more: {error}")
            self._abort()

    def close(self, timeout: float, *, failed: bool = False) -> None:
        """Say goodbye and wait at most ``timeout`` seconds for the server's; then cut the pair. Idempotent.

        Args:
            timeout: in seconds.
            failed: say that an exception is the reason.
        """
        if self._end(ClosedError, "the client was closed with this request in flight"):
            self._say_goodbye(Kind.FAILED if failed else Kind.BYE)
        if self.thread is not threading.current_thread():
            self.thread.join(timeout)
            if self.thread.is_alive():
                self._abort()
                self.thread.join(timeout)

    def _send(self, future: ReplyFuture, frame: Frame) -> None:
        """With the lock held. A send that fails is reported by the receiving thread, with the reason."""
        self._identifiers += 1
        frame.header[_ID] = self._identifiers
        frame.header[_ACKNOWLEDGED] = self._received
        flight = self._flying[self._identifiers] = _Flight(future, frame)
        pair = self._pair
        assert pair is not None
        try:
            flight.work = pair.send(frame.message)
            self._plane.send(frame)
            if len(self._consumed) >= self._enough_consumed:
                self._post_consumed(pair)
        except RuntimeError as error:
            logger.debug("a request did not leave: %s", str(error))

    def _say_goodbye(self, kind: Kind = Kind.BYE) -> None:
        message = announcement(kind)
        with self._lock:  # the receiving thread lets go of all that gloo holds when it ends
            if self._pair is None:
                return
            try:
                self._goodbye = message, self._pair.send(message)  # kept until it has left
            except RuntimeError as error:
                logger.debug("no goodbye to the server: %s", str(error))

    def _abort(self) -> None:
        pair = self._pair
        if pair is not None:
            self._plane.close()
            pair.abort()

    def _run(self) -> None:
        try:
            self._plane.begin_receiving()
            while self._receive():
                pass
        except (RuntimeError, TimeoutError) as error:
            self._lose(self._plane.reason or plain(error))
        except Exception as error:
            logger.exception("a client failed to receive")
            self._end(TransportError, f"this client failed to receive: {error!r}")
        plane, self._plane = self._plane, FramedRows()
        plane.close()
        with self._lock:  # what gloo still holds for us goes, and with it the sockets
            self._pair = self._goodbye = None
            self._replies.clear()
            self._consumed.clear()
            self._flying.clear()

    def _lose(self, reason: str) -> None:
        """No more can be received, unless the server's last word had come behind a row that never did."""
        kind = _REQUEST
        with contextlib.suppress(RuntimeError):
            for reply in list(self._replies)[1:]:
                if reply.work is not None and kind in (_REQUEST, _RESULT, _ERROR, _ROW):
                    reply.work.wait(_LAST_WORD)
                    kind = reply.frame.header[_KIND]
        if kind in (Kind.REPLACED, Kind.CLOSED):
            self._farewell_from_server(kind)
        self._end(PeerLostError, f"the {self._peer}'s process has gone or was cut off: {reason}")

    def _receive(self) -> bool:
        """Wait for one message and deliver it; ``False`` after the last one."""
        pair, reply = self._pair, self._replies[0]
        assert pair is not None
        assert reply.work is not None
        reply.work.wait(FOREVER)
        frame = reply.frame
        kind = frame.header[_KIND]
        if kind == _RESULT:
            self._plane.receive(frame)
            frame.take_version()
            result = reply.read()  # before its future leaves our books: reading may fail
            self._plane.has_read(frame)
            future = self._settle(frame.header[_ID])
            if future is not None:
                future.fulfil(result)
        elif kind == _ERROR:
            self._deliver_error(pair, frame)
        elif kind == _ROW:
            self._deliver_row(pair, frame)
        else:
            self._farewell_from_server(kind)
            return False
        with self._lock:
            self._consumed.append(self._replies.popleft())
            if len(self._replies) <= len(self._flying):  # one more than can come: the goodbye
                self._post_consumed(pair)
        return True

    def _deliver_error(self, pair: Pair, frame: Frame) -> None:
        identifier, length = frame.header[_ID], frame.header[_LENGTH]
        data = torch.empty(length, dtype=torch.uint8, device="cpu")
        pair.receive([data], TAG_ERROR).wait(FOREVER)
        error = decode_exception(data.numpy().tobytes())
        future = self._settle(identifier)
        if future is not None:
            future.fail(error)

    def _deliver_row(self, pair: Pair, frame: Frame) -> None:
        header = frame.header
        found = {}
        if header[_LENGTH]:
            assert self._room is not None
            row = self._room()
            pair.receive([row], TAG_ROW).wait(FOREVER)
            words = {"version": header[Field.VERSION], "origin": header[Field.ORIGIN]}
            found = {"row": row, **{name: torch.tensor(word) for name, word in words.items()}}
        future = self._settle(header[_ID])
        if future is not None:
            future.fulfil(TensorDict(found, []))

    def _settle(self, identifier: int) -> ReplyFuture | None:
        """Take one request out of flight and let the next waiting one leave."""
        with self._lock:
            self._received += 1
            entry = self._flying.pop(identifier, None)
            if entry is None:
                return None
            self._spare.append(entry.frame)
            if self._waiting and self._ended is None:
                self._send(*self._waiting.popleft())
        return entry.future

    def _farewell_from_server(self, kind: int) -> None:
        if kind == Kind.REPLACED:
            self.replaced = True
            reason = "a newer session of the same client has taken this one's place"
            self._end(PeerLostError, reason)
        elif self._end(ServerClosedError, f"the {self._peer} has shut down"):
            self._say_goodbye()

    def _end(self, kind: type[TransportError], reason: str) -> bool:
        """Fail everything in flight; ``False`` when the connection had ended before."""

        def error() -> TransportError:
            return kind(reason)

        with self._lock:
            if self._ended is not None:
                return False
            self._ended = error
            futures = [flight.future for flight in self._flying.values()] + [
                entry[0] for entry in self._waiting
            ]
            self._waiting.clear()
        for future in futures:
            future.fail(error())
        return True

    def _post_consumed(self, pair: Pair) -> None:
        """With the lock held, so that receives are posted and queued in the same order."""
        while self._consumed:
            self._replies.append(self._post(pair, self._consumed.pop()))

    @staticmethod
    def _post(pair: Pair, reply: _Reply) -> _Reply:
        reply.work = pair.receive(reply.frame.message)
        return reply
