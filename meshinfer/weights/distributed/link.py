"""A subscriber's way to the publisher, and the thread that keeps it up."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor
from torch.distributed import TCPStore

from meshinfer.errors import PeerLostError, RefusedError, TransportError
from meshinfer.inference.distributed.client import DistributedClient
from meshinfer.inference.distributed.connection import Connection
from meshinfer.inference.distributed.frames import Frame
from meshinfer.inference.distributed.join import Compared
from meshinfer.inference.future import ReplyFuture
from meshinfer.rendezvous import ServerAddress
from meshinfer.weights.layout import WeightLayout

__all__ = ["Link", "PollClient"]

logger = logging.getLogger("meshinfer.weights")

_LOOK_SECONDS = 1.0
"""How long one look for a publisher takes, so that closing never waits longer for its end."""
_END_SECONDS = 1.0
_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 30.0
"""Between two tries at a publisher that has refused us: it logs each."""


class PollClient(DistributedClient):
    """A client whose replies are rows that come as messages of their own; it is connected by :meth:`join`.

    Args:
        weights: what the publisher must have alike.
        room: memory for the next row, see :class:`~meshinfer.inference.distributed.connection.Connection`.
        arguments: as :class:`~meshinfer.inference.distributed.client.DistributedClient` has them.
    """

    _peer = "weight publisher"

    def __init__(
        self, *arguments: Any, weights: WeightLayout, room: Callable[[], Tensor], **options: Any
    ) -> None:
        self._weights = weights
        self._room = room
        super().__init__(*arguments, **options)

    def join(self) -> None:
        """Connect, with little patience while nobody is there; errors as of a client's call."""
        self._connect(self._timeout)

    def ask(self, poll: TensorDictBase) -> ReplyFuture:
        """Send a poll over the connection that there is; raises what has ended it. Never waits."""
        connection = self._connection
        assert connection is not None
        frame = self._spare.pop() if self._spare else Frame(self._request_layout)
        self._request_layout.pack(poll, frame.views)
        return connection.submit(frame, 0)

    def stay(self) -> TransportError:
        """Wait until the connection has ended, and ask now and then whether the publisher lives; why it has ended."""
        connection = self._connection
        assert connection is not None
        while connection.thread.is_alive():
            connection.thread.join(self._timeout)
            if connection.thread.is_alive():
                connection.check_alive()
        return connection.error

    @property
    def replaced(self) -> bool:
        """Whether a newer session of the same rank has taken this one's place."""
        return self._connection is not None and self._connection.replaced

    @property
    def _compared(self) -> Compared:
        return self._weights

    def _reach(self, deadline: float) -> tuple[ServerAddress, TCPStore]:
        address = self._locator.find(_LOOK_SECONDS)
        left = max(deadline - time.monotonic(), 0.01)
        return address, self._store_at(address, left, min(left, _LOOK_SECONDS))

    def _connection_over(self, *arguments: Any, **more: Any) -> Connection:
        return super()._connection_over(*arguments, peer=self._peer, room=self._room, **more)

    def _report_absence(self, failed: bool) -> None:
        """No publisher waits for subscribers that never come."""


class Link:
    """Connects, and connects again when the publisher is lost: to the same one, or to another in its place.

    Args:
        new_client: makes a client that is not connected, of the same identity each time.
        connected: called in the link's thread with a client that is; it must not raise.
        lost: called there when a connection has ended, or the publisher has refused it.
    """

    def __init__(
        self,
        new_client: Callable[[], PollClient],
        connected: Callable[[PollClient], None],
        lost: Callable[[TransportError], None],
    ) -> None:
        self.reason = "the first try is under way"
        """Why there is no connection, where there is none."""
        self._new_client = new_client
        self._connected = connected
        self._lost = lost
        self._stop = threading.Event()
        self._client: PollClient | None = None
        self._lock = threading.Lock()
        self.thread = threading.Thread(target=self._run, name="meshinfer-weights-link", daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Leave. A try that is under way is waited for a little, and ends by itself. Idempotent."""
        with self._lock:
            self._stop.set()
            client = self._client
        if client is not None:
            client.close()
        if self.thread is not threading.current_thread():
            self.thread.join(_END_SECONDS)  # a store that closes now would keep torch retrying

    def _run(self) -> None:
        pause, refusal = _PAUSE_SECONDS, ""
        while not self._stop.is_set():
            client = self._new_client()
            try:
                client.join()
            except RefusedError as error:
                pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
                self.reason = str(error)
                if refusal != self.reason:
                    refusal = self.reason
                    self._lost(RefusedError(refusal))
            except Exception as error:
                pause = (
                    _PAUSE_SECONDS  # whatever a peer or a name server does, there is another try
                )
                self.reason = str(error)
                logger.debug("no weight publisher yet: %s", self.reason)
            else:
                pause, refusal = _PAUSE_SECONDS, ""
                self._keep(client)
            self._stop.wait(pause)

    def _keep(self, client: PollClient) -> None:
        """Until the connection ends."""
        with self._lock:
            self._client = None if self._stop.is_set() else client
        if self._client is None:
            return client.close()
        self._connected(client)
        error = client.stay()
        client.close()
        with self._lock:
            self._client = None
        self.reason = str(error)
        if client.replaced:  # coming back would replace the newer session
            self._stop.set()
        elif self._stop.is_set():
            return
        self._lost(error if isinstance(error, PeerLostError) else PeerLostError(self.reason))
