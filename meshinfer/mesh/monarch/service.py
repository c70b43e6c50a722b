"""The servers of a policy, as their owner has them. Imports monarch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import cloudpickle  # type: ignore[import-untyped]  # monarch brings it

from meshinfer.arguments import as_seconds
from meshinfer.mesh.monarch.board import Notice
from meshinfer.mesh.monarch.seats import Seat
from meshinfer.server.monarch_actor import ServerActor
from meshinfer.server.monarch_control import ServerActorLife
from meshinfer.server.pickled import Pickler
from meshinfer.server.remote import RemoteInferenceServer
from meshinfer.server.setup import ServerSetup
from meshinfer.weights.protocol import WeightTransport

__all__ = ["Landlord", "RankServer", "Service"]

T = TypeVar("T")


class Landlord(Protocol):
    """What the servers need of their mesh."""

    def spawn_at(self, seat: Seat, name: str, cls: type) -> Any:
        """An actor in the process of a seat that has its proc mesh for itself."""

    def respawn(self, group: str, rank: int) -> None:
        """A new process for a rank; then every server that had one there is begun again."""

    def tell(self, server: str, notice: Notice) -> None:
        """Put a notice up in every process."""

    def forget_service(self, service: Service) -> None:
        """It has ended."""


class RankServer(RemoteInferenceServer):
    """One server, in the process of one seat.

    Args:
        name: on the boards.
        begin: spawns the server's actor where the seat is now.
        arguments: of :class:`~meshinfer.server.remote.RemoteInferenceServer`.
    """

    service_backend = "monarch"
    _place = "the process of a server rank"

    def __init__(self, name: str, begin: Callable[[], Any], **arguments: Any) -> None:
        self.name = name
        self._spawn = begin
        super().__init__(**arguments)

    @property
    def address(self) -> Any:
        """Where it listens, for a transport that does not find it by itself."""
        return getattr(self._lives[-1], "address", None) if self._lives else None

    @property
    def has_died(self) -> bool:
        """Whether it was started, and serves no more."""
        return bool(self._lives) and self._lives[-1].ended

    def bury(self, cause: str) -> None:
        """Its actor or its process has died."""
        for life in self._lives:
            life.bury(f"has died: {cause}")  # type: ignore[attr-defined]

    def _begin(self, setup: ServerSetup) -> ServerActorLife:
        return ServerActorLife(
            self._spawn(), setup, self._first_version, name=f"server {self.name!r}"
        )

    def _pickler(self) -> Pickler:
        return cloudpickle.dumps  # type: ignore[no-any-return]  # as monarch: a script's own functions too


class Service:
    """All servers of one policy.

    Args:
        landlord: the mesh.
        name: of the policy.
        seats: the group's, by rank; always those of now.
        make_server: the server of a rank, by its name on the boards and how its actor is spawned.
    """

    def __init__(
        self,
        landlord: Landlord,
        name: str,
        group: str,
        seats: Sequence[Seat],
        make_server: Callable[[int, str, Callable[[], Any]], RankServer],
    ) -> None:
        self.group = group
        self.closed = False
        self.made_weights: WeightTransport | None = None
        """To be closed with the servers."""
        self._name = name
        self._landlord = landlord
        self._lock = threading.RLock()
        self.servers: list[RankServer] = []
        for rank in range(len(seats)):
            begin = self._spawner(seats, rank)
            self.servers.append(make_server(rank, f"{name}/{rank}", begin))

    @property
    def actor_name(self) -> str:
        """Of the server actors, for reports."""
        return f"server_{self._name}"

    def begin(self) -> None:
        """Start all servers at once."""
        self.each(self._start)

    def begin_again(self, rank: int) -> None:
        """Serve on a rank whose process has just been replaced."""
        with self._lock:
            if not self.closed:
                self._start(self.servers[rank])

    def revive(self) -> None:
        """Serve again on every rank where nobody does."""
        with self._lock:
            for rank, server in enumerate(self.servers):
                if server.has_died:
                    self._landlord.respawn(self.group, rank)

    def bury(self, rank: int, cause: str) -> None:
        """The server of a rank has died."""
        server = self.servers[rank]
        server.bury(cause)
        if not self.closed:
            self._landlord.tell(server.name, Notice())

    def each(self, do: Callable[[RankServer], T]) -> list[T]:
        """Do it with every server at once; the first error is raised when all are done."""
        with ThreadPoolExecutor(len(self.servers), "meshinfer-servers") as pool:
            done = [pool.submit(do, server) for server in self.servers]
        return [one.result() for one in done]

    def shutdown(self, timeout: float) -> None:
        """End all servers, and tell their clients that there will be no others."""
        as_seconds("timeout", timeout, zero=True)
        with self._lock:
            if self.closed:
                return
            self.closed = True
        try:
            self.each(lambda server: server.shutdown(timeout))
        finally:
            for server in self.servers:
                self._landlord.tell(server.name, Notice(closed=True))
            if self.made_weights is not None:
                self.made_weights.close()
            self._landlord.forget_service(self)

    def __str__(self) -> str:
        return "closed" if self.closed else f"{sum(s.is_alive for s in self.servers)} alive"

    def _spawner(self, seats: Sequence[Seat], rank: int) -> Callable[[], Any]:
        return lambda: self._landlord.spawn_at(seats[rank], self.actor_name, ServerActor)

    def _start(self, server: RankServer) -> None:
        server.start()
        if server.address is not None:
            self._landlord.tell(server.name, Notice(server.address))
