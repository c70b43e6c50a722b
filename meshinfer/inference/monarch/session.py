"""One client, as the server sees it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Final

from meshinfer.inference.monarch.frames import Signal, labelled, signal
from meshinfer.inference.monarch.mortality import ProcessName, Watch
from meshinfer.inference.monarch.ports import Outlet
from meshinfer.inference.queues.codec import Message
from meshinfer.inference.queues.labels import Labeller, Labels
from meshinfer.inference.queues.wire import Kind, header_of

__all__ = ["MonarchSession"]

_LOSE_AFTER: Final = 30.0
"""Seconds of silence after which a client on another host is lost; it says something every few seconds."""


class MonarchSession:
    """The server's end of one connection. Replies leave at once and wait for nobody.

    Args:
        token: what the client's messages begin with, and those to it.
        outlet: to the client.
        process: of the client.
        died: called with the session, in some thread, when that process has ended.

    Attributes:
        over: whether it has ended; then nothing is sent any more.
    """

    def __init__(
        self,
        token: bytes,
        outlet: Outlet,
        process: ProcessName,
        died: Callable[[MonarchSession], object],
    ) -> None:
        self.over = False
        self.token = token
        self.process = process
        self.labels = Labels()
        self._outlet = outlet
        self._heard = time.monotonic()
        self._lock = threading.RLock()  # the garbage collector may close us anywhere
        self._labeller = Labeller()
        self._watch = Watch(process, lambda: died(self))

    # For whoever serves.

    def drained(self, count: int) -> None:
        """A request of ``count`` bytes was drained: its client knows what it has lying here until it is answered."""

    def reply(self, identifier: int, message: Message) -> None:
        """Send a result; silently not, when the client has gone."""
        with self._lock:
            if not self.over:
                for parts in labelled(self._labeller, message, Kind.RESULT, identifier):
                    self._outlet.send(self.token, *parts)
        message.recycle()

    def reply_error(self, identifier: int, data: bytes) -> None:
        """Send an encoded exception; likewise."""
        self._send(header_of(Kind.ERROR, identifier, len(data)), data)

    # For the hub.

    @property
    def is_silent(self) -> bool:
        """Whether a client whose process cannot be watched has said nothing for too long."""
        return not self._watch.works and time.monotonic() - self._heard > _LOSE_AFTER

    def hear(self) -> None:
        """Something has come from it."""
        self._heard = time.monotonic()

    def say_goodbye(self) -> None:
        """The server closes: nothing more will come."""
        self._send(header_of(Kind.BYE))

    def dismiss(self, reason: str) -> None:
        """Tell the client that it has to look for its server again, and end."""
        self.tell(Signal.GONE, reason.encode())
        self.end()

    def tell(self, kind: Signal, body: bytes = b"") -> None:
        """Send a signal."""
        _, *rest = signal(self.token, kind, body)
        self._send(*rest)

    def end(self) -> None:
        """Send nothing any more. Idempotent."""
        with self._lock:
            self.over = True
        self._watch.cancel()

    def forked(self) -> None:
        """In a forked child: it is the parent's."""
        self._lock = threading.RLock()
        self.over = True

    def _send(self, *parts: bytes) -> None:
        with self._lock:
            if not self.over:
                self._outlet.send(self.token, *parts)
