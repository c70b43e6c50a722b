"""Weights for the servers of one host, through shared memory."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, ClassVar

from meshinfer.arguments import as_count
from meshinfer.errors import ClosedError
from meshinfer.memory import BlockHandle
from meshinfer.weights.layout import WeightLayout
from meshinfer.weights.shared_memory.board import MOST_SUBSCRIBERS, WeightBoard
from meshinfer.weights.shared_memory.pool import BlockPool
from meshinfer.weights.shared_memory.publisher import SharedMemoryPublisher
from meshinfer.weights.shared_memory.subscriber import SharedMemorySubscriber

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["SharedMemoryWeights"]


class SharedMemoryWeights:
    """Weights between processes of one host: one copy into a block of shared memory, which every server maps.

    Implements :class:`~meshinfer.weights.protocol.WeightTransport`. A server's weights are views of the block, so an
    update costs one copy of its bytes, whatever the number of servers. There are as many blocks as servers keep from
    being written, usually three: the newest, what is served, and the one before that.

    Pickled, it finds the memory again in any process of the host, while the process that made it lives; the copy may
    subscribe, and publish. A publisher that dies leaves its subscribers the last version that they have received; the
    next one, here or in another process, begins a session of its own, whose versions are new whatever their numbers.

    Args:
        spec: see :meth:`WeightLayout.from_spec <meshinfer.weights.layout.WeightLayout.from_spec>`.
        max_subscribers: at one time, of all processes.

    Raises:
        ValueError, TypeError: an argument cannot work; names it.
        OSError: there is not enough memory, or no descriptor; says what is needed and what is there.
    """

    transport_kind: ClassVar[str] = "shared_memory"
    _board: WeightBoard | None
    _pool: BlockPool | None

    def __init__(self, spec: object, *, max_subscribers: int = 64) -> None:
        as_count("max_subscribers", max_subscribers, most=MOST_SUBSCRIBERS)
        self._layout = WeightLayout.from_spec(spec)
        self._max_subscribers = max_subscribers
        board = WeightBoard.create(max_subscribers)
        self._handle = board.block.handle
        self._begin(board)

    @property
    def layout(self) -> WeightLayout:
        """Of the weights."""
        return self._layout

    @property
    def max_subscribers(self) -> int:
        """At one time."""
        return self._max_subscribers

    def publisher(
        self, source: object = None, *, version: int = 0, cast: bool = False
    ) -> SharedMemoryPublisher:
        """The one publisher; see :class:`~meshinfer.weights.protocol.WeightTransport`.

        Raises:
            PeerLostError: this is a pickled copy, and the process that made the transport has ended.
        """
        board = self._open()
        if self._pool is None or self._pool.pid != os.getpid():
            self._pool = BlockPool(board, self._layout)
        return SharedMemoryPublisher(self._pool, board, self._layout, source, version, cast)

    def subscriber(self) -> SharedMemorySubscriber:
        """A new subscriber.

        Raises:
            ClosedError: the transport was closed.
            TransportError: there are ``max_subscribers``.
            PeerLostError: this is a pickled copy, and the process that made the transport has ended.
        """
        return SharedMemorySubscriber(self._open(), self._layout)

    def close(self) -> None:
        """End it, for everybody if this process made it. Idempotent."""
        self._closed = True
        self._pool = None
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> tuple[WeightLayout, int, BlockHandle]:
        self._check_open()
        return self._layout, self._max_subscribers, self._handle

    def __setstate__(self, state: tuple[WeightLayout, int, BlockHandle]) -> None:
        self._layout, self._max_subscribers, self._handle = state
        self._begin(None)

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return (
            f"SharedMemoryWeights({self._layout!r}, max_subscribers={self._max_subscribers}{state})"
        )

    def _begin(self, board: WeightBoard | None) -> None:
        self._board = board
        self._pool = None
        self._closed = False
        self._opening = threading.Lock()

    def _open(self) -> WeightBoard:
        self._check_open()
        board = self._board
        if board is None:
            with self._opening:
                board = self._board = WeightBoard(self._handle.open(), self._max_subscribers)
            self._check_open()
        return board

    def _check_open(self) -> None:
        if self._closed or (self._board is not None and self._board.closed):
            raise ClosedError("this weight transport was closed; make a new one")
