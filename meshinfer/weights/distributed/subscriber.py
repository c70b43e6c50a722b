"""A server's end of :class:`~meshinfer.weights.distributed.transport.DistributedWeights`."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from tensordict import TensorDict
from torch import Tensor

from meshinfer.arguments import as_seconds
from meshinfer.errors import ClosedError, TransportError
from meshinfer.inference.future import ReplyFuture
from meshinfer.weights.distributed.desk import NONE
from meshinfer.weights.distributed.link import Link, PollClient
from meshinfer.weights.distributed.rows import RowPool, WeightRow
from meshinfer.weights.layout import WeightLayout
from meshinfer.weights.protocol import WeightUpdate

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["DistributedSubscriber"]

logger = logging.getLogger("meshinfer.weights")

_TAKE_BACK_SECONDS = 0.1
"""A round trip takes less; a publisher that is frozen is not waited for."""

NewClient = Callable[[Callable[[], Tensor]], PollClient]


class DistributedSubscriber:
    """Made by :meth:`DistributedWeights.subscriber
    <meshinfer.weights.distributed.transport.DistributedWeights.subscriber>`.

    Connects from then on, in a thread of its own, which also finds the next publisher when one is lost. A version is
    sent while :meth:`receive` waits for it, or asks for it, so that what is published meanwhile is skipped. It lies in
    memory of this subscriber, of two versions in turn, of more while more are held.

    Args:
        layout: of the weights.
        new_client: makes a client, of a function that gives memory for the next version.
    """

    def __init__(self, layout: WeightLayout, new_client: NewClient) -> None:
        self._inbox = _Inbox(layout, new_client)
        self._finalizer = weakref.finalize(self, self._inbox.close, "this subscriber was closed")

    def receive(self, timeout: float | None = None) -> WeightUpdate:
        """The newest version; see :class:`~meshinfer.weights.protocol.WeightSubscriber`."""
        if timeout is not None:
            as_seconds("timeout", timeout, zero=True)
        return self._inbox.receive(timeout)

    def applied(self, update: WeightUpdate) -> None:
        """It serves from now on."""
        if not isinstance(update, _Received):
            raise TypeError(f"expected an update of this subscriber, found {update!r}")
        self._inbox.applied(update)

    def close(self) -> None:
        """Leave. Idempotent."""
        self._finalizer()

    def close_with(self, transport: str) -> None:
        """The transport was closed, as ``transport`` says."""
        self._inbox.close(transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Received(WeightUpdate):
    def __init__(self, version: int, origin: int, row: WeightRow, pool: RowPool) -> None:
        super().__init__(version, row.views, lambda: pool.give_back(row))
        self.origin = origin


class _Inbox:
    """What a subscriber has and asks for; it lives until its link has ended."""

    def __init__(self, layout: WeightLayout, new_client: NewClient) -> None:
        self._pool = RowPool(layout)
        self._coming: WeightRow | None = None
        self._changed = threading.Condition()
        self._client: PollClient | None = None
        self._poll: ReplyFuture | None = None
        self._arrived: _Received | None = None
        self._error: TransportError | None = None
        self._closed = ""
        self._origin = self._version = self._applied = NONE
        self._link = Link(lambda: new_client(self._room), self._connected, self._lost)

    def receive(self, timeout: float | None) -> WeightUpdate:
        """See :class:`~meshinfer.weights.protocol.WeightSubscriber`."""
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        with self._changed:
            while not self._closed:
                if self._arrived is not None:
                    return self._take(self._arrived)
                if self._error is not None:
                    raise self._take_error(self._error)
                if self._poll is None:
                    self._say(waits=True)
                left = deadline - time.monotonic()
                if left <= 0 and not self._give_up():
                    where = "" if self._client else f"; there is no publisher: {self._link.reason}"
                    raise TimeoutError(f"no new weights within {timeout:g} s{where}")
                self._changed.wait(None if timeout is None else left)
            raise ClosedError(self._closed)

    def applied(self, update: _Received) -> None:
        """See :class:`~meshinfer.weights.protocol.WeightSubscriber`."""
        with self._changed:
            if update.origin == self._origin and update.version > self._applied:
                self._applied = update.version
                self._say(waits=self._poll is not None)

    def close(self, reason: str) -> None:
        """``receive`` raises :class:`ClosedError` for this reason. Idempotent."""
        with self._changed:
            self._closed = self._closed or reason
            self._client = self._poll = None
            self._changed.notify_all()
        self._link.close()

    # What the link and its connections report, in their threads.

    def _connected(self, client: PollClient) -> None:
        with self._changed:
            self._client = client
            self._say(waits=False)  # what serves, if this is the same publisher
            self._changed.notify_all()

    def _lost(self, error: TransportError) -> None:
        with self._changed:
            self._client = self._poll = None
            self._error = error
            self._changed.notify_all()

    def _room(self) -> Tensor:
        self._coming = self._pool.take()  # one that a lost publisher has half written is dropped
        return self._coming.tensor

    def _answered(self, future: ReplyFuture) -> None:
        with self._changed:
            if self._poll is future:
                self._poll = None
            if future.exception() is None and not (reply := future.result()).is_empty():
                self._accept(int(reply["version"]), int(reply["origin"]))
            self._changed.notify_all()

    # With the lock held.

    def _accept(self, version: int, origin: int) -> None:
        row, self._coming = self._coming, None
        assert row is not None
        if origin == self._origin and version <= self._version:
            return self._pool.give_back(row)  # sent twice: two polls had crossed it
        if origin != self._origin:
            self._applied = NONE
        self._origin, self._version = origin, version
        if self._arrived is not None:
            self._arrived.release()
        self._arrived = _Received(version, origin, row, self._pool)

    def _take(self, update: _Received) -> WeightUpdate:
        self._arrived = self._error = None
        return update

    def _take_error(self, error: TransportError) -> TransportError:
        """Not in the frame that raises it, which it would keep, and with it our memory, until the collector runs."""
        self._error = None
        return error

    def _say(self, *, waits: bool) -> ReplyFuture | None:
        """Tell the publisher what serves, and ask for the next version. Never waits; the answer, if there is a link."""
        if self._client is None:
            return None
        words = {"applied": self._applied, "origin": self._origin, "received": self._version}
        words["waits"] = int(waits)
        poll = TensorDict({name: torch.tensor(word) for name, word in words.items()}, [])
        try:
            future = self._client.ask(poll)
        except TransportError as error:  # the link reports it, as soon as it has seen it
            logger.debug("no poll was sent: %s", str(error))
            self._client = self._poll = None
            return None
        self._poll = future if waits else None
        future.add_done_callback(self._answered)
        return future

    def _give_up(self) -> bool:
        """Take the poll back, so that the next call gets the newest version; whether something came all the same."""
        if self._poll is not None:
            answered = self._say(waits=False)
            self._changed.wait_for(lambda: answered is None or answered.done(), _TAKE_BACK_SECONDS)
        return bool(self._arrived or self._error or self._closed)
