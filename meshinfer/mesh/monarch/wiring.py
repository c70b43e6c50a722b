"""The transport between one server of a mesh and its clients, and what a client's process gets of it."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from meshinfer.errors import MeshError
from meshinfer.inference.distributed import DistributedTransport
from meshinfer.inference.protocol import InferenceClient
from meshinfer.mesh.monarch.board import PostedDirectory, board_of
from meshinfer.transport import listed

__all__ = ["ClientSide", "PostedTransport", "ServerPlace", "client_side", "open_posted"]

_OURS = ("role", "directory", "name", "rank", "expected_ranks", "spans_hosts", "port")


@dataclass(frozen=True)
class ServerPlace:
    """Where a server runs, as its processes and those of its clients were found.

    Args:
        host_name: for errors.
        address: where monarch reaches its host, if it uses TCP.
        spans_hosts: whether clients are on other machines.
        expected_ranks: numbers of the ranks whose clients it has.
    """

    host_name: str
    address: str | None
    spans_hosts: bool
    expected_ranks: tuple[int, ...]


class ClientSide(Protocol):
    """Picklable: in any process of the mesh it makes that one's clients."""

    def client(self, number: int | None) -> InferenceClient:
        """A new client for this process, which is the rank with that number among all of the mesh."""


def client_side(transport: Any) -> ClientSide:
    """What of a server's transport goes to its clients."""
    if isinstance(transport, PostedTransport):
        return transport.side
    return _MessageSide(transport, None)


@dataclass(frozen=True)
class _MessageSide:
    """For a transport whose clients find the server by themselves, wherever they are."""

    transport: Any
    pattern: bytes | None

    def client(self, number: int | None) -> InferenceClient:
        """See :class:`ClientSide`."""
        made: InferenceClient = (
            self.transport.client() if self.pattern is None else pickle.loads(self.pattern)
        )
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        pattern = self.pattern or pickle.dumps(self.transport.client())
        return _MessageSide, (None, pattern)


@dataclass(frozen=True)
class _PostedSide:
    """For gloo: the address of the server is on the board of each process."""

    token: str
    server: str
    arguments: bytes = field(repr=False)
    """As bytes: other ways of pickling would move the tensors of the specs to shared memory."""

    def client(self, number: int | None) -> InferenceClient:
        """See :class:`ClientSide`."""
        transports = board_of(self.token).transports
        key = f"{self.server} {number}"
        if key not in transports:  # one for all clients of a rank, which it tells apart
            transports[key] = DistributedTransport(
                **pickle.loads(self.arguments),
                role="client",
                directory=PostedDirectory(prefix=self.token),
                name=self.server,
                rank=number,
            )
        made: InferenceClient = transports[key].client()
        return made


class PostedTransport(DistributedTransport):
    """The controller's end of a :class:`~meshinfer.DistributedTransport`, whose address goes round by messages.

    Args:
        token: of the mesh.
        server: name of the server on the boards.
        locate: asked before each start of the server: where it will be.
        options: for both sides; ``host`` is the server's.

    Raises:
        ValueError, TypeError: an option cannot work.
    """

    def __init__(
        self,
        token: str,
        server: str,
        locate: Callable[[], ServerPlace],
        options: Mapping[str, Any],
    ) -> None:
        if taken := [name for name in _OURS if name in options]:
            raise ValueError(f"{listed(taken)} cannot be given: the mesh decides")
        shared = dict(options)
        self._host: str | None = shared.pop("host", None)
        self._locate = locate
        super().__init__(
            **shared, role="client", directory=PostedDirectory(prefix=token), name=server
        )
        self.side = _PostedSide(token, server, pickle.dumps(shared))

    def serve_elsewhere(self) -> Callable[[], DistributedTransport]:
        """A picklable function that opens the server's side where it is called; once for each start."""
        return functools.partial(open_posted, self.side.arguments, self._host, self._locate())


def open_posted(arguments: bytes, host: str | None, place: ServerPlace) -> DistributedTransport:
    """Listen where clients can reach it: on what the user named, else where monarch reaches this host."""
    options = pickle.loads(arguments)
    if host is None and options.get("interface") is None and place.spans_hosts:
        host = place.address
    try:
        return DistributedTransport(
            **options,
            role="server",
            host=host,
            expected_ranks=place.expected_ranks,
            spans_hosts=place.spans_hosts,
        )
    except MeshError as error:
        raise MeshError(f"the server on {place.host_name}: {error}") from error
