"""What the processes of a mesh have been told: who they are, and where the servers are now.

Every process of a :class:`~meshinfer.mesh.monarch.mesh.MonarchMesh` has one :class:`Board` for it, the controller too.
Notices come by messages (:mod:`~meshinfer.mesh.monarch.agent`), so neither a store nor a port is needed for them.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from typing import Any

from meshinfer.errors import MeshError, ServerClosedError
from meshinfer.rendezvous import Directory, ServerAddress

__all__ = ["Board", "Notice", "Place", "PostedDirectory", "board_of", "forget_board"]


@dataclass(frozen=True)
class Place:
    """Which rank of which group a process is."""

    group: str
    rank: int


@dataclass(frozen=True)
class Notice:
    """The last word on one server.

    Args:
        address: where it listens; ``None`` while it does not.
        closed: whether it was shut down, so that nobody needs to wait for another one.
    """

    address: ServerAddress | None = None
    closed: bool = False


class Board:
    """Of one mesh in one process."""

    def __init__(self) -> None:
        self.place: Place | None = None
        self.transports: dict[str, Any] = {}
        """The client side of each server that this process talks to, so that its clients are told apart."""
        self._notices: dict[str, Notice] = {}
        self._changed = threading.Condition()

    def post(self, server: str, notice: Notice) -> None:
        """Put up what is new about a server."""
        with self._changed:
            self._notices[server] = notice
            self._changed.notify_all()

    def read(self, server: str) -> Notice:
        """The last word; an empty notice where nothing was said."""
        with self._changed:
            return self._notices.get(server, Notice())

    def notices(self) -> dict[str, Notice]:
        """The last word on every server."""
        with self._changed:
            return dict(self._notices)

    def find(self, server: str, timeout: float) -> ServerAddress:
        """Where the server listens, waiting until it does.

        Args:
            server: its name.
            timeout: seconds.

        Raises:
            TimeoutError: nobody has said so.
            ServerClosedError: it was shut down.
        """
        deadline = time.monotonic() + timeout
        with self._changed:
            while True:
                notice = self._notices.get(server, Notice())
                if notice.closed:
                    raise ServerClosedError(f"server {server!r} has shut down")
                if notice.address is not None:
                    return notice.address
                if not self._changed.wait(max(deadline - time.monotonic(), 0.0)):
                    raise TimeoutError(
                        f"waited {timeout:g} s to be told where server {server!r} is; has it been "
                        "started, and the last one not been lost?"
                    )


_boards: dict[str, Board] = {}
_lock = threading.Lock()


def board_of(mesh: str) -> Board:
    """This process's board for the mesh with this token."""
    with _lock:
        return _boards.setdefault(mesh, Board())


def forget_board(mesh: str) -> None:
    """The mesh has ended."""
    with _lock:
        _boards.pop(mesh, None)


@dataclass(frozen=True)
class PostedDirectory(Directory):
    """Looks servers up on this process's board instead of in a store."""

    host: str = ""
    port: int = 0
    prefix: str = ""
    known: tuple[tuple[str, ServerAddress], ...] = field(default=(), repr=False)
    """What was known where this was pickled, for processes that nobody tells anything."""

    def lookup(self, name: str, *, timeout: float, secret: bytes | None) -> ServerAddress:
        """See :meth:`Board.find`; errors as there."""
        board = board_of(self.prefix)
        carried = dict(self.known).get(name)
        if carried is not None and board.place is None and board.read(name) == Notice():
            return carried
        return board.find(name, timeout)

    def publish(self, *_: Any, **__: Any) -> None:
        """Raises :class:`MeshError`: the controller tells everybody."""
        raise MeshError("servers of a monarch mesh are made known by its controller")

    def __reduce__(self) -> tuple[Any, ...]:
        notices = board_of(self.prefix).notices().items()
        known = tuple((name, n.address) for name, n in notices if n.address is not None)
        return PostedDirectory, (self.host, self.port, self.prefix, known or self.known)
