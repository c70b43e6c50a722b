"""The client's half of one pair: what is in flight, what waits for room, and the thread that receives."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

import torch
from torch.distributed import Work

from meshinfer.errors import ClosedError, PeerLostError, ServerClosedError, TransportError
from meshinfer.inference.distributed.frames import NO_VERSION, TAG_ERROR, Field, Frame, Kind
from meshinfer.inference.distributed.pair import FOREVER, Pair
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
_VERSION, _LENGTH = Field.VERSION, Field.LENGTH
_REQUEST, _RESULT, _ERROR = int(Kind.REQUEST), int(Kind.RESULT), int(Kind.ERROR)


class _Flight:
    """A request on the wire: its buffer must stay until the reply has come."""

    __slots__ = ("frame", "future", "work")

    def __init__(self, future: ReplyFuture, frame: Frame) -> None:
        self.future = future
        self.frame = frame
        self.work: Work | None = None


class Connection:
    """One session with a server.

    At most ``window`` requests are on the wire; later ones wait here, and leave as replies come in. Two reply frames
    take turns with a receive posted on each, so that a reply never waits for us.

    Args:
        pair: proved by both sides.
        request_layout, response_layout: of the payloads.
        window: requests on the wire at once.
        spare: takes request frames that are not needed any more.
        policy_version_key: where a reply's policy version goes, ``None`` for nowhere.
        patience: seconds without a reply after which a waiter asks whether the server is alive.
        probe: asks; raises when it is not.
    """

    def __init__(
        self,
        pair: Pair,
        request_layout: PayloadLayout,
        response_layout: PayloadLayout,
        *,
        window: int,
        spare: list[Frame],
        policy_version_key: tuple[str, ...] | None,
        patience: float,
        probe: Callable[[], None],
    ) -> None:
        self.patience = patience
        self.replaced = False
        self._pair: Pair | None = pair
        self._request_layout = request_layout
        self._layout = response_layout
        self._window = window
        self._version_key = policy_version_key
        self._probe = probe
        self._lock = threading.Lock()
        self._identifiers = 0
        self._flying: dict[int, _Flight] = {}
        self._waiting: deque[tuple[ReplyFuture, Frame]] = deque()
        self._spare = spare
        self._received = 1  # the server's proof was the first frame
        self._ended: Callable[[], TransportError] | None = None
        self._replies = [self._post(pair, Frame(response_layout)) for _ in range(2)]
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
            reason = str(error)
            self._end(lambda: PeerLostError(f"the server does not answer any more: {reason}"))
            self._abort()

    def close(self, timeout: float) -> None:
        """Say goodbye and wait at most ``timeout`` seconds for the server's; then cut the pair. Idempotent."""
        if self._end(lambda: ClosedError("the client was closed with this request in flight")):
            goodbye = Frame(self._request_layout)
            goodbye.header[_KIND] = Kind.BYE
            self._say(goodbye)
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
        except RuntimeError as error:
            logger.debug("a request did not leave: %s", error)

    def _say(self, frame: Frame) -> None:
        pair = self._pair
        if pair is None:
            return
        try:
            self._farewell = frame, pair.send(frame.message)  # kept until it has left
        except RuntimeError as error:
            logger.debug("no goodbye to the server: %s", error)

    def _abort(self) -> None:
        pair = self._pair
        if pair is not None:
            pair.abort()

    def _run(self) -> None:
        try:
            self._receive()
        except RuntimeError as error:
            reason = str(error)
            self._end(
                lambda: PeerLostError(f"the server's process has gone or was cut off: {reason}")
            )
        except Exception as error:
            logger.exception("the receiving thread of a client failed")
            failure = repr(error)
            self._end(lambda: TransportError(f"the receiving thread failed: {failure}"))
        self._pair = None
        self._replies.clear()
        self._flying.clear()

    def _receive(self) -> None:
        pair = self._pair
        assert pair is not None
        frame, work = self._replies.pop(0)
        while True:
            work.wait(FOREVER)
            kind = frame.header[_KIND]
            if kind == _RESULT:
                self._deliver(frame)
            elif kind == _ERROR:
                self._deliver_error(pair, frame)
            else:
                return self._farewell_from_server(kind)
            self._replies.append(self._post(pair, frame))
            frame, work = self._replies.pop(0)

    def _deliver(self, frame: Frame) -> None:
        future = self._settle(frame.header[_ID])
        if future is None:
            return
        result = self._layout.unpack(frame.views)
        version = frame.header[_VERSION]
        if version != NO_VERSION and self._version_key is not None:
            stamp = torch.full(self._layout.batch_size, version, dtype=torch.int64, device="cpu")
            result.set(self._version_key, stamp)
        future.fulfil(result)

    def _deliver_error(self, pair: Pair, frame: Frame) -> None:
        identifier, length = frame.header[_ID], frame.header[_LENGTH]
        data = torch.empty(length, dtype=torch.uint8, device="cpu")
        pair.receive([data], TAG_ERROR).wait(FOREVER)
        future = self._settle(identifier)
        if future is not None:
            future.fail(decode_exception(data.numpy().tobytes()))

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
            self._end(
                lambda: PeerLostError(
                    "a newer session of the same client has taken this one's place"
                )
            )
        elif self._end(lambda: ServerClosedError("the server has shut down")):
            goodbye = Frame(self._request_layout)
            goodbye.header[_KIND] = Kind.BYE
            self._say(goodbye)

    def _end(self, error: Callable[[], TransportError]) -> bool:
        """Fail everything in flight; ``False`` when the connection was over already."""
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

    @staticmethod
    def _post(pair: Pair, frame: Frame) -> tuple[Frame, Work]:
        return frame, pair.receive(frame.message)
