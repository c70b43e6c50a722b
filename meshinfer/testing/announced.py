"""Announced rows without a GPU: channels over gloo, so that the protocol of NCCL rows can be tried and measured."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, Work

from meshinfer.inference.distributed.pair import FOREVER, GlooDevice
from meshinfer.inference.distributed.plane import Channel
from meshinfer.streams import Mark

__all__ = ["GlooChannel", "GlooRows"]

_LOOPBACK = "127.0.0.1"
_TAG_ROW, _TAG_END, _TAG_ABORT = 0, 1, 2
_MOMENT = timedelta(milliseconds=1)
_ABORT_SECONDS = 5.0


@dataclass(frozen=True)
class GlooRows:
    """A :class:`~meshinfer.inference.distributed.plane.RowBackend` in CPU memory, for processes of one host.

    Rows are announced and sent as those of ``backend="nccl"`` are, but each direction has a gloo group where those have
    an NCCL communicator::

        DistributedTransport(request_spec, response_spec, backend=GlooRows())

    For tests: ``backend="gloo"`` has the same rows in half as many messages.

    Args:
        name: of the backend; a client and its server need the same.
    """

    name: str = "announced-gloo"

    @property
    def device(self) -> torch.device:
        """The CPU."""
        return torch.device("cpu")

    def describe(self) -> dict[str, Any]:
        """Nothing that the other side must know."""
        return {}

    def objection(self, theirs: Mapping[str, Any]) -> str | None:
        """None."""
        return None

    def new_row(self, nbytes: int) -> Tensor:
        """Zeroed memory, uint8 ``[nbytes]``."""
        return _zeros(nbytes)

    def channel(self, store: Store, rank: int, *, sends: bool, timeout: float) -> Channel:
        """See :meth:`~meshinfer.inference.distributed.plane.RowBackend.channel`."""
        return GlooChannel(store, rank, sends=sends, timeout=timeout)


class GlooChannel:
    """A :class:`~meshinfer.inference.distributed.plane.Channel` over a gloo group of two, on the loopback interface.

    A short message follows each row: gloo never wakes who waits for a row that had come in part when the peer died, but
    it does wake who waits for a later one. A thread of its own waits for what is sent, since gloo does not say that
    something has left unless it is waited for.

    Args:
        store, rank, sends, timeout: as for :meth:`~meshinfer.inference.distributed.plane.RowBackend.channel`.
    """

    def __init__(self, store: Store, rank: int, *, sends: bool, timeout: float) -> None:
        self._peer = 1 - rank
        self._store = store  # the group keeps the C++ half only
        self._aborted = threading.Event()
        self._device = GlooDevice.at(_LOOPBACK, rank)
        self._under_way: SimpleQueue[_Sending | None] = SimpleQueue()
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=timeout)
        options._devices = [self._device.handle]
        options._threads = 0
        first = _zeros(1)
        try:
            self._group: Any = ProcessGroupGloo(PrefixStore("rows", store), rank, 2, options)
            work = self._send(first) if sends else self._receive(first)
            work.wait(options._timeout)
        except RuntimeError as error:
            raise TimeoutError(f"no channel within {timeout:g} s: {error}") from error
        self._waiter = threading.Thread(
            target=_await_sent, args=(self._under_way,), name="meshinfer-gloo-rows", daemon=True
        )
        if sends:
            self._waiter.start()

    def send(self, row: Tensor, after: Mark) -> Mark:
        """See :class:`~meshinfer.inference.distributed.plane.Channel`."""
        self._check()
        sending = _Sending(self._send(row))
        self._under_way.put(sending)
        return sending

    def receive(self, row: Tensor, after: Mark) -> Mark:
        """See :class:`~meshinfer.inference.distributed.plane.Channel`. The mark has passed once it was waited for."""
        self._check()
        return _Receiving(self._receive(row), self._aborted)

    def abort(self) -> None:
        """See :class:`~meshinfer.inference.distributed.plane.Channel`."""
        self._aborted.set()
        try:  # gloo closes a connection when one of its waits runs out
            self._group.recv([_zeros(1)], self._peer, _TAG_ABORT).wait(_MOMENT)
        except RuntimeError:
            return  # the expected end
        finally:
            self._under_way.put(None)
            if (
                self._waiter.is_alive()
            ):  # it was in C++, where the end of the interpreter must not find it
                self._waiter.join(_ABORT_SECONDS)

    def _check(self) -> None:
        if self._aborted.is_set():
            raise RuntimeError("the channel was aborted")

    def _send(self, row: Tensor) -> _Row:
        end = _zeros(1)
        work = self._group.send([row], self._peer, _TAG_ROW)
        return _Row(work, self._group.send([end], self._peer, _TAG_END), end)

    def _receive(self, row: Tensor) -> _Row:
        end = _zeros(1)
        work = self._group.recv([row], self._peer, _TAG_ROW)
        return _Row(work, self._group.recv([end], self._peer, _TAG_END), end)


class _Row:
    """A row on its way, and the short message that follows it."""

    def __init__(self, work: Work, following: Work, end: Tensor) -> None:
        self._work, self._following, self._end = work, following, end

    def wait(self, timeout: timedelta) -> None:
        self._following.wait(timeout)
        self._work.wait(timeout)


class _Receiving:
    """Passes when a row is here."""

    def __init__(self, row: _Row, aborted: threading.Event) -> None:
        self._row, self._aborted = row, aborted
        self._here = False

    def wait(self) -> None:
        try:
            self._row.wait(FOREVER)
        except RuntimeError as error:
            why = "was aborted" if self._aborted.is_set() else f"broke: {error}"
            raise RuntimeError(f"the channel {why}") from error
        self._here = True

    def passed(self) -> bool:
        return self._here

    def hold_up(self, stream: torch.cuda.Stream) -> None:
        """Nothing of a CPU's is in a stream."""


class _Sending:
    """Passes when a row has left."""

    def __init__(self, row: _Row) -> None:
        self._row = row
        self._over = threading.Event()
        self._error: RuntimeError | None = None

    def await_sent(self) -> None:
        """The thread that waits."""
        try:
            self._row.wait(FOREVER)
        except RuntimeError as error:
            self._error = RuntimeError(f"the channel broke: {error}")
        self._over.set()

    def wait(self) -> None:
        self._over.wait()
        if self._error is not None:
            raise self._error

    def passed(self) -> bool:
        return self._error is None and self._over.is_set()

    def hold_up(self, stream: torch.cuda.Stream) -> None:
        """Nothing of a CPU's is in a stream."""


def _await_sent(under_way: SimpleQueue[_Sending | None]) -> None:
    while (sending := under_way.get()) is not None:
        sending.await_sent()


def _zeros(nbytes: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
