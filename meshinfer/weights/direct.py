"""Weights from a trainer to servers in the same process."""

from __future__ import annotations

import functools
import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from meshinfer.arguments import as_seconds
from meshinfer.errors import ClosedError, TransportError
from meshinfer.weights.layout import WeightLayout
from meshinfer.weights.protocol import WeightUpdate
from meshinfer.weights.publishing import PublisherBase

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["DirectWeights"]

_SPARE_ROWS = 1


class DirectWeights:
    """A :class:`~meshinfer.weights.protocol.WeightTransport` between threads of one process.

    A version is one copy of the weights, on the device where they all are (on the CPU if they are on several), made
    when it is published; servers on a CPU compute with it where it lies.

    Args:
        spec: the weights; see :meth:`WeightLayout.from_spec <meshinfer.weights.layout.WeightLayout.from_spec>`.
        alias: copy nothing: servers compute with the trainer's own tensors, so that an optimizer step changes actions
            at once, in the middle of a batch too, and under the version that was published before.

    Raises:
        ValueError, TypeError: ``spec`` is not usable; names the weight.
    """

    transport_kind: ClassVar[str] = "direct"

    def __init__(self, spec: object, *, alias: bool = False) -> None:
        self.layout = WeightLayout.from_spec(spec)
        self.alias = alias
        self._hub = _Hub(self.layout)
        self._publisher: Callable[[], DirectPublisher | None] = lambda: None

    def publisher(
        self, source: object = None, *, version: int = 0, cast: bool = False
    ) -> DirectPublisher:
        """The one publisher; see :class:`~meshinfer.weights.protocol.WeightTransport`.

        Raises:
            ValueError: also for ``cast=True`` with ``alias``, where nothing is copied.
        """
        self._check_usable()
        if self.alias and cast:
            raise ValueError(
                "cast=True: a transport with alias=True copies nothing, and casts nothing"
            )
        with self._hub.changed:
            before = self._publisher()
            if before is not None and before.is_open:
                raise RuntimeError("these weights have a publisher already; close() it first")
            made = DirectPublisher(self._hub, self.alias, source, version, cast)
            self._publisher = weakref.ref(made)
        return made

    def subscriber(self) -> DirectSubscriber:
        """A new subscriber."""
        self._check_usable()
        return DirectSubscriber(self._hub)

    def close(self) -> None:
        """End it for its publisher and all its subscribers. Idempotent."""
        self._hub.close()

    def __enter__(self) -> Self:
        self._check_usable()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError(
            "weights of kind 'direct' stay in the process that made them; give a server elsewhere"
            " 'shared_memory' or 'distributed'"
        )

    def __repr__(self) -> str:
        return f"DirectWeights({self.layout!r}, alias={self.alias})"

    def _check_usable(self) -> None:
        self._hub.check_open()
        if self._hub.owner != os.getpid():
            raise TransportError(
                f"these weights belong to process {self._hub.owner}, and do not reach others; use"
                " 'shared_memory' or 'distributed'"
            )


class _Snapshot:
    """Memory for one version, and how many have it."""

    def __init__(self, views: Mapping[str, Tensor], device: torch.device | None) -> None:
        self.views = views
        self.device = device
        self.leases = 0


class _Version:
    def __init__(self, session: object, number: int, snapshot: _Snapshot) -> None:
        self.session = session
        self.number = number
        self.snapshot = snapshot


class _Hub:
    """What publisher and subscribers share. Fields are read and written with :attr:`changed` held."""

    def __init__(self, layout: WeightLayout) -> None:
        self.layout = layout
        self.owner = os.getpid()
        self.numbers = itertools.count(1)
        self.changed = threading.Condition()
        self.newest: _Version | None = None
        self.closed = False
        self.subscribers: weakref.WeakSet[DirectSubscriber] = weakref.WeakSet()
        self.released: deque[_Snapshot] = deque()
        """Written without the lock, by whoever lets go of an update; the garbage collector may be one."""
        self._spare: list[_Snapshot] = []

    def snapshot(self, device: torch.device) -> _Snapshot:
        """Memory that nobody has."""
        with self.changed:
            self._collect()
            while self._spare:
                found = self._spare.pop()
                if found.device == device:
                    return found
        return _Snapshot(self.layout.views(self.layout.new_row(device)), device)

    def replace(self, version: _Version) -> None:
        """A new version is there."""
        with self.changed:
            before, self.newest = self.newest, version
            if before is not None and not before.snapshot.leases:
                self._keep(before.snapshot)
            self.changed.notify_all()

    def close(self) -> None:
        """Nothing will come any more."""
        with self.changed:
            self.closed, self.newest = True, None
            self._spare.clear()
            self.changed.notify_all()

    def check_open(self) -> None:
        """:class:`ClosedError` after :meth:`close`."""
        if self.closed:
            raise ClosedError("this weight transport was closed")

    def _collect(self) -> None:
        newest = None if self.newest is None else self.newest.snapshot
        while self.released:
            snapshot = self.released.popleft()
            snapshot.leases -= 1
            if not snapshot.leases and snapshot is not newest:
                self._keep(snapshot)

    def _keep(self, snapshot: _Snapshot) -> None:
        if snapshot.device is not None and len(self._spare) < _SPARE_ROWS:
            self._spare.append(snapshot)


class DirectPublisher(PublisherBase):
    """Made by :meth:`DirectWeights.publisher`."""

    def __init__(self, hub: _Hub, alias: bool, source: object, version: int, cast: bool) -> None:
        super().__init__(hub.layout, source, version, cast)
        self._hub = hub
        self._alias = alias
        self._session = object()
        self._last: _Version | None = None

    @property
    def subscribers(self) -> int:
        """How many are there now."""
        with self._hub.changed:
            return len(self._hub.subscribers)

    @property
    def is_open(self) -> bool:
        """Whether it can publish."""
        return not (self._closed or self._hub.closed)

    def _store(self, version: int, given: Mapping[str, Tensor]) -> None:
        base = None if self._last is None else self._last.snapshot.views
        made = self._aliased(given, base) if self._alias else self._copied(given, base)
        self._last = _Version(self._session, version, made)
        self._hub.replace(self._last)

    def _aliased(self, given: Mapping[str, Tensor], base: Mapping[str, Tensor] | None) -> _Snapshot:
        homes = {**(base or {}), **given}
        ties = {name: homes[home] for name, home in self.layout.ties.items()}
        return _Snapshot({**homes, **ties}, None)

    def _copied(self, given: Mapping[str, Tensor], base: Mapping[str, Tensor] | None) -> _Snapshot:
        devices = {tensor.device for tensor in given.values()}
        device = devices.pop() if len(devices) == 1 else torch.device("cpu")
        made = self._hub.snapshot(device)
        self.layout.write(made.views, given, base)
        return made

    def _wait(self, version: int, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        with self._hub.changed:
            while late := self._late(version):
                self._check_open()
                left = deadline - time.monotonic()
                if left <= 0:
                    raise TimeoutError(
                        f"version {version} was not served within {timeout:g} s by {', '.join(late)}"
                    )
                self._hub.changed.wait(left)

    def _late(self, version: int) -> list[str]:
        late = []
        for each in self._hub.subscribers:
            session, served = each.serves
            if session is not self._session:
                late.append(f"{each.name}: none of this publisher's")
            elif served < version:
                late.append(f"{each.name}: version {served}")
        return sorted(late)

    def _close(self) -> None:
        with self._hub.changed:
            self._last = None
            self._hub.changed.notify_all()

    def _check_open(self) -> None:
        self._hub.check_open()
        super()._check_open()


class DirectSubscriber:
    """Made by :meth:`DirectWeights.subscriber`."""

    def __init__(self, hub: _Hub) -> None:
        self.name = f"subscriber {next(hub.numbers)} (made in {threading.current_thread().name})"
        self.serves: tuple[object, int] = None, 0
        """The last version that was applied, and whose it is; with the hub's lock."""
        self._hub = hub
        self._seen: _Version | None = None
        self._closed = False
        with hub.changed:
            hub.check_open()
            hub.subscribers.add(self)

    def receive(self, timeout: float | None = None) -> WeightUpdate:
        """The newest version; see :class:`~meshinfer.weights.protocol.WeightSubscriber`."""
        if timeout is not None:
            as_seconds("timeout", timeout, zero=True)
        hub = self._hub
        with hub.changed:
            if not hub.changed.wait_for(self._is_awake, timeout):
                raise TimeoutError("no new weights were published")
            if self._closed:
                raise ClosedError("this subscriber was closed")
            hub.check_open()
            version = self._seen = hub.newest
            assert version is not None
            snapshot = version.snapshot
            snapshot.leases += 1
        return _Received(version, functools.partial(hub.released.append, snapshot))

    def applied(self, update: WeightUpdate) -> None:
        """It serves from now on."""
        assert isinstance(update, _Received)
        with self._hub.changed:
            self.serves = update.session, update.version
            self._hub.changed.notify_all()

    def close(self) -> None:
        """Leave. Idempotent."""
        with self._hub.changed:
            self._closed = True
            self._hub.subscribers.discard(self)
            self._hub.changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _is_awake(self) -> bool:
        newest = self._hub.newest
        return self._closed or self._hub.closed or (newest is not None and newest is not self._seen)


class _Received(WeightUpdate):
    def __init__(self, version: _Version, release: Callable[[], object]) -> None:
        alias = version.snapshot.device is None
        super().__init__(version.number, version.snapshot.views, release, alias=alias)
        self.session = version.session
