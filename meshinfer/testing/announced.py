"""Announced rows without a GPU: channels over gloo, so that the protocol of NCCL rows can be tried and measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, Work

from meshinfer.inference.distributed.pair import FOREVER
from meshinfer.inference.distributed.plane import Channel
from meshinfer.streams import PASSED, Mark

__all__ = ["GlooChannel", "GlooRows"]

_TAG = 0
_TAG_ABORT = 1


@dataclass(frozen=True)
class GlooRows:
    """A :class:`~meshinfer.inference.distributed.plane.RowBackend` in CPU memory.

    Each direction has a gloo group of its own, as it would have an NCCL communicator::

        DistributedTransport(request_spec, response_spec, backend=GlooRows())
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
        with torch.inference_mode(False):
            return torch.zeros(nbytes, dtype=torch.uint8, device="cpu")

    def channel(self, store: Store, rank: int, *, sends: bool, timeout: float) -> Channel:
        """See :meth:`~meshinfer.inference.distributed.plane.RowBackend.channel`."""
        return GlooChannel(store, rank, sends=sends, timeout=timeout)


class GlooChannel:
    """A :class:`~meshinfer.inference.distributed.plane.Channel` over a gloo group of two.

    Args:
        store, rank, sends, timeout: as for :meth:`~meshinfer.inference.distributed.plane.RowBackend.channel`.
    """

    def __init__(self, store: Store, rank: int, *, sends: bool, timeout: float) -> None:
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=timeout)
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._threads = 0
        try:
            self._group: Any = ProcessGroupGloo(PrefixStore("rows", store), rank, 2, options)
        except RuntimeError as error:
            raise TimeoutError(f"no channel within {timeout:g} s: {error}") from error
        self._peer = 1 - rank
        self._store = store
        row = torch.ones(1, dtype=torch.uint8)
        (self.send if sends else self.receive)(row, PASSED).wait()

    def send(self, row: Tensor, after: Mark) -> Mark:
        """See :class:`~meshinfer.inference.distributed.plane.Channel`."""
        return _WorkMark(self._group.send([row], self._peer, _TAG))

    def receive(self, row: Tensor, after: Mark) -> Mark:
        """See :class:`~meshinfer.inference.distributed.plane.Channel`."""
        return _WorkMark(self._group.recv([row], self._peer, _TAG))

    def abort(self) -> None:
        """See :class:`~meshinfer.inference.distributed.plane.Channel`."""
        try:  # gloo closes a connection when one of its waits runs out
            nothing = torch.zeros(1, dtype=torch.uint8)
            self._group.recv([nothing], self._peer, _TAG_ABORT).wait(timedelta(milliseconds=1))
        except RuntimeError:
            return  # the expected end


class _WorkMark:
    """Passes when a send or a receive is done."""

    def __init__(self, work: Work) -> None:
        self._work = work

    def wait(self) -> None:
        self._work.wait(FOREVER)

    def passed(self) -> bool:
        return self._work.is_completed()

    def hold_up(self, stream: torch.cuda.Stream) -> None:
        """Nothing of a CPU's is in a stream."""
