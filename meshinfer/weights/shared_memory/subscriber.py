"""The subscriber's side: the newest version's block, mapped and kept from being written."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from torch import Tensor

from meshinfer.arguments import as_seconds
from meshinfer.errors import ClosedError, PeerLostError, TransportError
from meshinfer.memory import SharedBlock
from meshinfer.weights.layout import WeightLayout
from meshinfer.weights.protocol import WeightUpdate
from meshinfer.weights.shared_memory.board import LEASES, LOOK_SECONDS, Record, WeightBoard

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["SharedMemorySubscriber"]


class _Update(WeightUpdate):
    """Of one publisher's session; its weights lie in memory that other processes read, too."""

    def __init__(
        self, seat: Seat, lease: int, record: Record, weights: Mapping[str, Tensor]
    ) -> None:
        super().__init__(record.version, weights, partial(seat.release, lease))
        self.session = record.session


@dataclass(frozen=True)
class _Mapped:
    block: SharedBlock
    weights: Mapping[str, Tensor]
    session: int


class Seat:
    """One slot of a board, as long as its subscriber is there or has something that was not released.

    Raises:
        TransportError: there are as many subscribers as the transport allows.
    """

    def __init__(self, board: WeightBoard) -> None:
        slot = board.attach()
        if slot is None:
            raise TransportError(
                f"all {board.max_subscribers} places for subscribers are taken; close a subscriber, or make the "
                "transport with a larger max_subscribers"
            )
        self.board = board
        self.slot = slot
        self.pid = os.getpid()
        # Held for a few instructions. Reentrant, because the garbage collector may drop updates in between.
        self._changing = threading.RLock()
        self._free = list(range(LEASES))
        self._left = False
        self._to_vacate = iter([slot])

    @property
    def ours(self) -> bool:
        """Whether this is the process that has the slot, and not one that it has forked."""
        return self.pid == os.getpid()

    def lease(self) -> tuple[int, int]:
        """Keep the newest block: the number of the lease, and the word that names the block."""
        with self._changing:
            if not self._free:
                raise RuntimeError(
                    f"{LEASES} updates of this subscriber are in use; release() those that are not needed any more"
                )
            number = self._free.pop()
            return number, self.board.lease(self.slot, number)

    def release(self, number: int) -> None:
        """Nothing is read from that block any more."""
        if self.ours:
            with self._changing:
                self.board.unlease(self.slot, number)
                self._free.append(number)
                self._vacate()

    def leave(self) -> None:
        """Once: nothing will be received any more."""
        if self.ours:
            with self._changing:
                self._left = True
                self.board.leave(self.slot)
                self._vacate()

    def apply(self, session: int, version: int) -> None:
        """What was received serves from now on."""
        if self.ours:
            with self._changing:
                if not self._left:
                    self.board.apply(self.slot, session, version)

    def _vacate(self) -> None:
        if self._left and len(self._free) == LEASES:
            for slot in self._to_vacate:  # once
                self.board.vacate(slot)


class SharedMemorySubscriber:
    """Receives versions through a board. Implements :class:`~meshinfer.weights.protocol.WeightSubscriber`.

    In a forked process it begins anew, with the newest version.

    Args:
        board: of a transport.
        layout: of its weights.

    Raises:
        TransportError: there are as many subscribers as the transport allows.
    """

    def __init__(self, board: WeightBoard, layout: WeightLayout) -> None:
        self._board = board
        self._layout = layout
        self._closed = False
        self._take_seat()

    def receive(self, timeout: float | None = None) -> WeightUpdate:
        """The newest version that was not received yet, as views of the memory that it was published in.

        Args and errors as :class:`~meshinfer.weights.protocol.WeightSubscriber` has them, and:

        Raises:
            RuntimeError: too many updates were not released.
            OSError: there is no descriptor, or no room to map it; says what is needed. The next call tries again.
        """
        if timeout is not None:
            as_seconds("timeout", timeout, zero=True)
        deadline = None if timeout is None else time.monotonic() + timeout
        if not self._seat.ours:
            self._take_seat()
        bell = self._board.bells[self._seat.slot]
        while True:
            bell.drain()
            self._check_open()
            update = self._take()
            if update is not None:
                return update
            self._check_publisher()
            left = LOOK_SECONDS if deadline is None else deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"no new weights within {timeout:g} s")
            bell.wait(min(left, LOOK_SECONDS))

    def applied(self, update: WeightUpdate) -> None:
        """The update serves from now on."""
        if not isinstance(update, _Update):
            raise TypeError("applied: expected an update that this subscriber has received")
        if update.session == self._session:
            self._seat.apply(update.session, update.version)

    def close(self) -> None:
        """Leave; a thread that waits raises. Updates that were not released stay valid. Idempotent."""
        self._closed = True
        self._finalizer()
        if self._seat.ours:
            self._board.bells[self._seat.slot].post()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"SharedMemorySubscriber(slot={self._seat.slot}{', closed' if self._closed else ''})"

    def _take_seat(self) -> None:
        self._check_open()
        self._seat = Seat(self._board)
        self._seen, self._session = 0, 0
        self._lost: int | None = None
        self._mapped: dict[int, _Mapped] = {}
        self._finalizer = weakref.finalize(self, self._seat.leave)
        self._finalizer.atexit = False  # what was received may still be in use then

    def _take(self) -> WeightUpdate | None:
        """The newest version, if it was not received before and still is somewhere."""
        if self._board.newest == self._seen:
            return None
        lease, self._seen = self._seat.lease()
        update = None
        try:
            update = self._open(lease)
        finally:
            if update is None:
                self._seat.release(lease)
        return update

    def _open(self, lease: int) -> WeightUpdate | None:
        index, record = self._board.read(self._seen)
        try:
            mapped = self._map(index, record)
        except PeerLostError:
            if not self._board.publishing(record.session):
                return None  # its process has ended, and what there is to say of that is said once
            self._lost = record.session
            raise
        except OSError:
            self._seen = 0
            raise
        self._session = record.session
        self._let_go(record.session)
        return _Update(self._seat, lease, record, mapped.weights)

    def _map(self, index: int, record: Record) -> _Mapped:
        """The block. Where it is new here, all its pages are entered into this process's tables now."""
        found = self._mapped.get(index)
        if found is None or found.block.handle.token != record.token:
            block = record.handle(self._layout.row_bytes).open()
            block.populate()
            weights = MappingProxyType(self._layout.views(block.memory))
            found = self._mapped[index] = _Mapped(block, weights, record.session)
        return found

    def _let_go(self, session: int) -> None:
        """Of blocks that will not be read again: given back, or of another publisher."""
        self._mapped = {
            index: mapped
            for index, mapped in self._mapped.items()
            if mapped.session == session
            and mapped.block.handle.token == self._board.record(index).token
        }

    def _check_publisher(self) -> None:
        """Raise if it has died, once."""
        lost = self._board.lost_session()
        if lost is not None and lost != self._lost:
            self._lost = lost
            raise self._board.lost_error(lost)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(
                "this subscriber was closed; make a new one with transport.subscriber()"
            )
        if self._board.closed:
            raise ClosedError("the weight transport was closed by the process that made it")
