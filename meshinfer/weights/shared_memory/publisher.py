"""The publisher's side: a copy of the weights into a block that nobody reads."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Mapping

from torch import Tensor

from meshinfer.errors import ClosedError
from meshinfer.weights.layout import WeightLayout
from meshinfer.weights.publishing import PublisherBase
from meshinfer.weights.shared_memory.board import WeightBoard
from meshinfer.weights.shared_memory.pool import BlockPool

__all__ = ["SharedMemoryPublisher"]

_LOOK_SECONDS = 0.25
"""How often a waiter looks whether the subscribers live."""


class SharedMemoryPublisher(PublisherBase):
    """Publishes through a board. Implements :class:`~meshinfer.weights.protocol.WeightPublisher`.

    Args:
        pool: where versions are kept.
        board: of the transport.
        layout, source, version, cast: see :class:`~meshinfer.weights.publishing.PublisherBase`.

    Raises:
        RuntimeError: there is a publisher.
    """

    def __init__(
        self,
        pool: BlockPool,
        board: WeightBoard,
        layout: WeightLayout,
        source: object,
        version: int,
        cast: bool,
    ) -> None:
        super().__init__(layout, source, version, cast)
        self._pool = pool
        self._board = board
        self._last: int | None = None
        self._session = board.begin_session()
        self._finalizer = weakref.finalize(self, _end, board, pool)

    @property
    def subscribers(self) -> int:
        """How many are there now."""
        return sum(1 for _ in self._board.subscribers())

    def _store(self, version: int, given: Mapping[str, Tensor]) -> None:
        """See :class:`~meshinfer.weights.publishing.PublisherBase`.

        Raises:
            OSError: there is no memory for it; says how much is needed, and the last version stays the newest.
        """
        index = self._pool.take()
        base = None if self._last is None else self._pool.views(self._last)
        self.layout.write(self._pool.views(index), given, base)
        self._board.publish(index, self._pool.record(index, self._session, version))
        self._last = index

    def _wait(self, version: int, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while True:
            self._board.acknowledged.drain()
            self._check_open()
            behind = self._behind(version)
            if not behind:
                return
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(
                    f"version {version} is not served within {timeout:g} s by {', '.join(behind)}"
                )
            self._board.acknowledged.wait(min(left, _LOOK_SECONDS))

    def _behind(self, version: int) -> list[str]:
        """Which subscribers serve an older version, and which."""
        behind = []
        for slot in self._board.subscribers():
            served = self._board.applied(slot, self._session)
            if served is None or served < version:
                what = "none of this publisher's" if served is None else f"version {served}"
                behind.append(f"the one in process {self._board.holder(slot)} ({what})")
        return behind

    def _close(self) -> None:
        self._finalizer()

    def _check_open(self) -> None:
        super()._check_open()
        if self._board.closed:
            raise ClosedError("the weight transport was closed by the process that made it")
        if self._pool.pid != os.getpid():
            raise ClosedError(
                f"this publisher is that of process {self._pool.pid}, from which this one was forked"
            )


def _end(board: WeightBoard, pool: BlockPool) -> None:
    if pool.pid == os.getpid():
        board.end_session()
        pool.keep_newest()
