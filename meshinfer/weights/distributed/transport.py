"""The public face of the distributed weight transport."""

from __future__ import annotations

import ipaddress
import itertools
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Literal

from torch import Tensor

from meshinfer.errors import ClosedError
from meshinfer.inference.distributed.frames import HEADERS
from meshinfer.inference.distributed.join import Compared, Identity
from meshinfer.inference.distributed.reception import Reception
from meshinfer.inference.distributed.transport import DistributedTransport
from meshinfer.rendezvous import Directory, ServerAddress
from meshinfer.weights.distributed.desk import POLL, Desk
from meshinfer.weights.distributed.link import PollClient
from meshinfer.weights.distributed.publisher import DistributedPublisher
from meshinfer.weights.distributed.rows import RowPool
from meshinfer.weights.distributed.subscriber import DistributedSubscriber
from meshinfer.weights.layout import WeightLayout

__all__ = ["DistributedWeights"]

_ROLES = {"publisher": "server", "subscriber": "client"}
_WINDOW = 2
"""A poll that waits, and one that takes its place."""


class DistributedWeights:
    """Weights between any processes that reach each other by TCP; a
    :class:`~meshinfer.weights.protocol.WeightTransport`.

    The publisher's process listens, and subscribers connect to it, as clients do to the server of a
    :class:`~meshinfer.DistributedTransport`: with the job's secret, and with the same weights at both ends, or they are
    refused with the name of what differs. One copy is made for each publish, whatever the number of subscribers, and
    each of them is sent the newest when it asks for more. A publisher that has died, or has frozen, is looked for again
    where it was, or where the directory has it now. A copy of this object that was pickled subscribes.

    NCCL would change how a row moves, see :meth:`Poll.answer <meshinfer.weights.distributed.desk.Poll.answer>`.

    Args:
        spec: the weights; see :meth:`WeightLayout.from_spec <meshinfer.weights.layout.WeightLayout.from_spec>`.
        role: ``"publisher"`` for the process that trains, ``"subscriber"`` for one that only makes subscribers.
        timeout: seconds for a subscriber to connect, once something listens; also how long it hears nothing before it
            asks whether the publisher is alive. Idling has no limit.
        host: publisher: the address to listen on (as ``interface``); subscriber: the publisher's address.
        port: publisher: 0 or ``None`` lets the system choose; subscriber: the publisher's.
        secret: proves that both sides belong to one job. ``MESHINFER_SECRET`` by default; else the publisher makes one,
            which subscribers get with the pickled transport or through the launcher's store.
        interface: name or address of the interface to use, see :func:`~meshinfer.rendezvous.choose_address`.
        directory: where the publisher is published, and looked up when no ``port`` is given. Set by the mesh.
        name: of these weights in the directory.
        rank: of this process in its job: a subscriber of the same rank that comes later takes over.
        spans_hosts: whether subscribers are on other hosts, so that a loopback address cannot work.

    Raises:
        ValueError, TypeError: an argument cannot work; says which and what to give instead.
    """

    transport_kind: ClassVar[str] = "distributed"

    def __init__(
        self,
        spec: object,
        *,
        role: Literal["publisher", "subscriber"] = "publisher",
        timeout: float = 60.0,
        host: str | None = None,
        port: int | None = None,
        secret: str | bytes | None = None,
        interface: str | None = None,
        directory: Directory | None = None,
        name: str = "weights",
        rank: int | None = None,
        spans_hosts: bool = False,
    ) -> None:
        if role not in _ROLES:
            raise ValueError(f"role={role!r}: expected 'publisher' or 'subscriber'")
        self.layout = WeightLayout.from_spec(spec)
        self.role = role
        self._channel = _Channel(
            self.layout,
            role=_ROLES[role],
            timeout=timeout,
            host=host,
            port=port,
            secret=secret,
            interface=interface,
            directory=directory,
            name=f"weights/{name}",
            rank=rank,
            spans_hosts=spans_hosts,
        )
        self._copying = {"timeout": timeout, "interface": _of_any_host(interface)}
        self._looking: dict[str, Any] = {"directory": directory, "name": name, "secret": secret}
        self._pool = RowPool(self.layout)
        self._desk = Desk(self._channel.reception) if role == "publisher" else None
        self._publisher: Callable[[], DistributedPublisher | None] = lambda: None
        self._subscribers: weakref.WeakSet[DistributedSubscriber] = weakref.WeakSet()

    def publisher(
        self, source: object = None, *, version: int = 0, cast: bool = False
    ) -> DistributedPublisher:
        """The one publisher; see :class:`~meshinfer.weights.protocol.WeightTransport`.

        Raises:
            ValueError: also for a transport that has ``role="subscriber"``, as pickled copies have.
        """
        self._check_open()
        if self._desk is None:
            raise ValueError(
                "this DistributedWeights has role='subscriber'; make it with role='publisher' in the process that"
                " trains, and send pickled copies to the others"
            )
        before = self._publisher()
        if before is not None and before.is_open:
            raise RuntimeError("these weights have a publisher already; close() it first")
        made = DistributedPublisher(
            self.layout, self._desk, self._pool, self._is_closed, source, version, cast
        )
        self._publisher = weakref.ref(made)
        return made

    def subscriber(self) -> DistributedSubscriber:
        """A new subscriber, which begins to connect."""
        self._check_open()
        made = DistributedSubscriber(self.layout, self._channel.poller())
        self._subscribers.add(made)
        return made

    def close(self) -> None:
        """End it. Subscribers in other processes take the publisher for lost, and look for another. Idempotent."""
        for subscriber in list(self._subscribers):
            subscriber.close_with("this weight transport was closed")
        self._channel.close()
        if self._desk is not None:
            self._desk.note_change()

    @property
    def address(self) -> ServerAddress | None:
        """Where the publisher listens; ``None`` at a subscriber that looks it up."""
        return self._channel.address

    def __enter__(self) -> DistributedWeights:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        self._check_open()
        address = self.address
        where = self._looking
        if address is not None:
            where = {"host": address.host, "port": address.port, "secret": address.secret}
        return _subscribing, (self.layout, {**self._copying, **where})

    def __repr__(self) -> str:
        state = ", closed" if self._is_closed() else ""
        return f"DistributedWeights({self.role} of {self._channel.place}, {self.layout!r}{state})"

    def _is_closed(self) -> bool:
        return self._channel.closed

    def _check_open(self) -> None:
        if self._is_closed():
            raise ClosedError("this weight transport was closed")


class _Channel(DistributedTransport):
    """What carries polls and rows."""

    _title = "weight publisher"
    _serials = itertools.count()
    """Of all subscribers of this process, each of which has an identity of its own."""

    def __init__(self, weights: WeightLayout, **options: Any) -> None:
        self._weights = weights
        super().__init__(POLL, HEADERS, window=_WINDOW, **options)
        if self._reception is not None:
            self.policy_version_key = None

    def poller(self) -> Callable[[Callable[[], Tensor]], PollClient]:
        """Makes clients of one identity, of a function that gives memory for the next row."""
        serial = next(self._serials)
        identity = Identity().copy() if self._rank is None else Identity(self._rank, serial)

        def make(room: Callable[[], Tensor]) -> PollClient:
            return PollClient(
                self._locator,
                self.request_layout,
                self.response_layout,
                identity=identity,
                timeout=self.timeout,
                window=self._window,
                interface=self._interface,
                weights=self._weights,
                room=room,
            )

        return make

    @property
    def reception(self) -> Reception:
        """Of the publisher."""
        return self._server()

    @property
    def place(self) -> str:
        """Where the publisher is, for messages."""
        return str(self._locator)

    def _compared(self) -> Compared:
        return self._weights


def _of_any_host(interface: str | None) -> str | None:
    """An interface's name may mean something elsewhere too; an address is of this host."""
    try:
        ipaddress.ip_address(interface or "")
    except ValueError:
        return interface
    return None


def _subscribing(layout: WeightLayout, options: dict[str, Any]) -> DistributedWeights:
    return DistributedWeights(layout, role="subscriber", **options)
