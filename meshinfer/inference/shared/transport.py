"""What both slot transports do alike: a board in shared memory, and the desk of who serves it."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from functools import partial
from multiprocessing.context import BaseContext
from typing import Any, Generic, TypeVar

import torch

from meshinfer.arguments import as_context, as_count, as_seconds
from meshinfer.device_rows import DeviceReplies, DeviceRequests
from meshinfer.errors import ClosedError, TransportError
from meshinfer.inference.rowwise import RowwiseTransport
from meshinfer.inference.shared.board import Board, BoardHandle
from meshinfer.inference.shared.client import (
    SlotClient,
)
from meshinfer.inference.shared.desk import Desk, SlotRequest
from meshinfer.rows import RowBlock

__all__ = ["SharedTransport"]

C = TypeVar("C", bound=SlotClient)


class SharedTransport(RowwiseTransport, Generic[C]):
    """What both have in common: a board in shared memory, and the desk of who serves it.

    Args:
        request_spec, response_spec, num_slots, timeout, ctx: see :class:`ProcessSlotTransport`.
        board: instead of a new one.
    """

    transport_kind: str

    def __init__(
        self,
        request_spec: Any,
        response_spec: Any,
        *,
        num_slots: int,
        timeout: float = 60.0,
        ctx: BaseContext | str | None = None,
        board: BoardHandle | None = None,
    ) -> None:
        as_count("num_slots", num_slots)
        self.timeout = as_seconds("timeout", timeout)
        self.ctx = as_context("ctx", ctx)
        super().__init__(request_spec, response_spec)
        self.num_slots = num_slots
        if board is None:
            self._board = Board.create(self.request_layout, self.response_layout, num_slots)
        else:
            self._board = board.open()
        self._owns = board is None
        self._pid = os.getpid()
        self._desk: Desk | None = None
        self._elsewhere = False
        self._version_key: tuple[tuple[str, ...] | None] | None = None
        self._closed = False
        self._beginning = threading.RLock()  # a signal handler may ask again
        self._desks: list[Desk] = []
        end = self._board.close if self._owns else self._board.leave
        self._finalizer = weakref.finalize(self, _close, end, self._owns, self._desks, self._pid)

    # For everybody.

    def client(self) -> C:
        """A new client: picklable, finds the memory on first use."""
        raise TypeError(f"{type(self).__name__} does not say what its clients are")

    def serve_elsewhere(self) -> Callable[[], SharedTransport[C]]:
        """Let another process serve: a picklable function that makes the server's side there.

        From now on this object only makes clients. Call it again for each restart.
        """
        self._check_open()
        if self._desk is not None:
            raise TransportError(
                "this process serves the transport already; only one process can, so make another transport"
            )
        self._elsewhere = True
        return partial(
            type(self),
            self.request_layout,
            self.response_layout,
            num_slots=self.num_slots,
            timeout=self.timeout,
            board=self._board.handle,
            **self._options(),
        )

    def close(self) -> None:
        """End it for everyone: waiting clients raise :class:`~meshinfer.errors.ServerClosedError`. Idempotent."""
        self._closed = True
        if self._pid == os.getpid():
            self._finalizer()

    def __enter__(self) -> SharedTransport[C]:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError(
            f"{type(self).__name__} stays in the process that made it; send clients to other processes "
            "(transport.client()), or serve in another one with ProcessInferenceServer"
        )

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return f"{type(self).__name__}(num_slots={self.num_slots}{state})"

    # For the server.

    @property
    def closed(self) -> bool:
        """Whether it was closed, here or by the process that made it."""
        return self._closed or self._board.ended

    @property
    def num_waiting(self) -> int:
        """Requests that are ready now."""
        return self._server().num_waiting

    @property
    def policy_version_key(self) -> tuple[str, ...] | None:
        """Where clients put the policy version that travels with each reply."""
        # Asked for with each batch: only another process's server could have changed what was set here.
        return self._board.version_key if self._version_key is None else self._version_key[0]

    @policy_version_key.setter
    def policy_version_key(self, key: tuple[str, ...] | None) -> None:
        self._board.version_key = key
        self._version_key = (key,)

    def wait_for_work(self, timeout: float | None = None) -> bool:
        """Wait until a request is ready: whether one is. Returns early when closed or woken."""
        return self._server().wait(timeout)

    def wake(self) -> None:
        """Make :meth:`wait_for_work` return."""
        self._server().wake()

    def set_ready_callback(self, callback: Callable[[], None] | None) -> None:
        """Nothing: no thread receives here, the one that serves looks itself."""

    def request_batch(
        self, capacity: int, device: torch.device | None = None
    ) -> RowBlock | DeviceRequests:
        """Staging for ``capacity`` requests, or for as many as there are slots: no more can wait at once."""
        return super().request_batch(min(capacity, self.num_slots), device)

    def response_batch(
        self, capacity: int, device: torch.device | None = None
    ) -> RowBlock | DeviceReplies:
        """Staging for ``capacity`` replies, likewise."""
        return super().response_batch(min(capacity, self.num_slots), device)

    def drain_slots(self, max_items: int) -> list[SlotRequest]:
        """At most ``max_items`` waiting requests, oldest first, still in their slots."""
        return self._server().take(max_items)

    def _server(self) -> Desk:
        desk = self._desk
        return self._begin_serving() if desk is None else desk

    def _begin_serving(self) -> Desk:
        """Once, though who wakes a server that has just started may come while it begins."""
        with self._beginning:
            if self._desk is None:
                self._desk = self._new_desk()
                self._desks.append(self._desk)
            return self._desk

    def _new_desk(self) -> Desk:
        self._check_open()
        if self._elsewhere:
            raise TransportError(
                "another process serves this transport; this one only makes clients"
            )
        return Desk(self._board)

    def _options(self) -> dict[str, Any]:
        """Arguments of the subclass, for the server's side in another process."""
        return {}

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"this {type(self).__name__} was closed; make a new one")


def _close(end: Callable[[], None], owns: bool, desks: list[Desk], pid: int) -> None:
    """Without the transport, also when it is collected or the interpreter exits."""
    if pid != os.getpid():
        return  # a copy that a fork made
    if owns or desks:
        end()
    for desk in desks:
        desk.close()
