"""Rows that follow their headers over channels of their own, and the end of those that get stuck."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from queue import SimpleQueue

from meshinfer.inference.distributed.frames import Frame
from meshinfer.inference.distributed.join import Joining
from meshinfer.inference.distributed.pair import CLIENT, Pair
from meshinfer.inference.distributed.plane import Channel, DataPlane, FramedRows, RowBackend
from meshinfer.inference.distributed.watch import abort_all, end_watch, keep_watch, note_ending
from meshinfer.layout import PayloadLayout
from meshinfer.streams import Mark

__all__ = ["AnnouncedRows", "plane_over"]

logger = logging.getLogger("meshinfer.distributed")

_LOOK_SECONDS = 0.25
_DIRECTIONS = 2


class AnnouncedRows:
    """A :class:`~meshinfer.inference.distributed.plane.DataPlane` over two channels.

    A thread of its own sends, since any thread may ask for it and a channel has one thread. Who receives headers
    receives rows, with no hand-over: it waits for a row that is surely under way. Should it not arrive, the watch finds
    out, which looks at all planes of this process from time to time, asks gloo whether the peer lives, and aborts.

    Args:
        backend: makes the channels.
        pair: of the headers.
        joining: where both sides meet while channels are built, and until when.
        timeout: seconds for a row to arrive after its header.
    """

    def __init__(self, backend: RowBackend, pair: Pair, joining: Joining, timeout: float) -> None:
        self._backend = backend
        self._pair = pair
        self._joining: Joining | None = joining
        self._timeout = timeout
        self._deadline = time.monotonic() + joining.remaining()
        self._lock = threading.Lock()
        self._channels: list[Channel] = []
        self._incoming: Channel | None = None
        self._receiving_since: float | None = None
        self._building: tuple[str, float] | None = None
        """The name of its exchange, and since when."""
        self._unsent: deque[tuple[float, Mark, Frame]] = deque()
        self._asked: SimpleQueue[tuple[Frame, Mark] | None] = SimpleQueue()
        self._can_receive, self._can_send = _Stage(), _Stage()
        self.reason: str | None = None
        self._closed = False
        self._sender = threading.Thread(target=self._send_rows, name="meshinfer-rows", daemon=True)
        keep_watch(self)

    def frames(self, layout: PayloadLayout, count: int) -> list[Frame]:
        """See :class:`~meshinfer.inference.distributed.plane.DataPlane`: all of one row."""
        row = self._backend.new_row(layout.row_bytes)
        return [Frame(layout, row) for _ in range(count)]

    def frame(self, layout: PayloadLayout) -> Frame:
        """See :class:`~meshinfer.inference.distributed.plane.DataPlane`."""
        return Frame(layout, self._backend.new_row(layout.row_bytes))

    # Building: requests first, at both sides, then replies.

    def begin_sending(self) -> None:
        """See :class:`~meshinfer.inference.distributed.plane.DataPlane`."""
        self._sender.start()
        self._can_send.wait(self._deadline, self._pair)

    def await_receiving(self) -> None:
        """See :class:`~meshinfer.inference.distributed.plane.DataPlane`."""
        self._can_receive.wait(self._deadline, self._pair)

    def begin_receiving(self) -> None:
        """See :class:`~meshinfer.inference.distributed.plane.DataPlane`."""
        with self._can_receive.settled():
            self._incoming = self._build(sends=False)

    def _build(self, *, sends: bool) -> Channel:
        with self._lock:
            joining = self._joining
            if joining is None:  # closed meanwhile
                raise RuntimeError(self._why())
            name = "requests" if sends == (joining.rank == CLIENT) else "replies"
            self._building = name, time.monotonic()
        store = joining.exchange(name)
        try:
            channel = self._backend.channel(
                store, joining.rank, sends=sends, timeout=joining.remaining()
            )
        finally:
            self._building = None
            store.forget()
        with self._lock:
            self._channels.append(channel)
            if len(self._channels) == _DIRECTIONS:
                self._joining = None
            closed = self._closed
        if closed:
            abort_all([channel])
            raise RuntimeError(self._why())
        return channel

    # Rows.

    def send(self, frame: Frame) -> None:
        """See :class:`~meshinfer.inference.distributed.plane.DataPlane`."""
        self._asked.put((frame, frame.touched))

    def receive(self, frame: Frame) -> None:
        """See :class:`~meshinfer.inference.distributed.plane.DataPlane`."""
        assert self._incoming is not None
        self._receiving_since = time.monotonic()
        try:
            self._incoming.receive(frame.row.tensor, frame.touched).wait()
        except RuntimeError as error:
            raise RuntimeError(self.reason or str(error)) from error
        finally:
            self._receiving_since = None
        if self._closed:
            raise RuntimeError(self._why())

    def has_read(self, frame: Frame) -> None:
        """See :class:`~meshinfer.inference.distributed.plane.DataPlane`."""
        frame.touch()
        frame.touched.wait()

    def _send_rows(self) -> None:
        """The sender's thread."""
        try:
            with self._can_send.settled():
                channel = self._build(sends=True)
        except Exception as error:
            return self._give_up(f"no channel for rows was built: {error}")
        try:
            while (asked := self._asked.get()) is not None:
                frame, written = asked
                began = time.monotonic()
                self._unsent.append((began, channel.send(frame.row.tensor, written), frame))
                while self._unsent and self._unsent[0][1].passed():
                    self._unsent.popleft()
        except Exception as error:
            self._give_up(f"a row could not be sent: {error}")

    def _give_up(self, reason: str) -> None:
        if not self._closed:
            self.fail(reason)

    # The end.

    def look(self, now: float) -> None:
        """The watch: whether a row has been under way for too long."""
        since, building = self._oldest(), self._building
        if since is None or now - since < _LOOK_SECONDS:
            return
        try:
            self._pair.probe()
        except RuntimeError as error:
            logger.debug("a row is late, and gloo says: %s", str(error))
            return self.fail("the process at the other end has gone, or gave up")
        if now - since >= self._timeout and building is None:
            self.fail(f"a row did not get through within {self._timeout:g} s after its header")

    def _oldest(self) -> float | None:
        building = self._building
        since = self._receiving_since if building is None else building[1]
        for began, mark, _ in list(self._unsent):
            if not mark.passed():
                return began if since is None else min(began, since)
        return since

    def fail(self, reason: str) -> None:
        """Cut the pair for this reason, at both sides and for rows and headers alike."""
        logger.debug("rows were given up: %s", reason)
        self.reason = self.reason or reason
        self.close()
        self._pair.abort()

    def close(self) -> None:
        """See :class:`~meshinfer.inference.distributed.plane.DataPlane`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            channels, joining, self._joining = list(self._channels), self._joining, None
            if joining is not None and self._building is not None:
                # Under the lock: whoever cleans up after the failure closes too, and finds what was not needed.
                joining.give_up(self._building[0])
        self._asked.put(None)
        abort_all(channels)
        note_ending(self._sender)
        end_watch()

    @property
    def closed(self) -> bool:
        """Whether it is over."""
        return self._closed

    def _why(self) -> str:
        return self.reason or "the pair was cut"


def plane_over(
    backend: RowBackend | None, pair: Pair, joining: Joining, timeout: float
) -> DataPlane:
    """Of a new pair; arguments as for :class:`AnnouncedRows`, ``None`` for rows in their frames."""
    if backend is None:
        return FramedRows()
    return AnnouncedRows(backend, pair, joining, timeout)


class _Stage:
    """Something that one thread does once, and another waits for."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._error: Exception | None = None

    @contextmanager
    def settled(self) -> Iterator[None]:
        """By what happens inside, well or not."""
        try:
            yield
        except Exception as error:
            # Not itself, which would keep its frames, and with them our sockets.
            kind = TimeoutError if isinstance(error, TimeoutError) else RuntimeError
            self._error = kind(str(error))
            raise
        finally:
            self._over.set()

    def wait(self, deadline: float, pair: Pair) -> None:
        """Raises what went wrong, or :class:`RuntimeError` once the peer has gone, :class:`TimeoutError` in the end."""
        while not self._over.wait(min(_LOOK_SECONDS, max(deadline - time.monotonic(), 0.0))):
            try:
                pair.probe()
            except RuntimeError as error:
                raise RuntimeError("the process at the other end has gone, or gave up") from error
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    "the other side did not build its half of a channel for rows in time"
                )
        if self._error is not None:
            raise self._error
