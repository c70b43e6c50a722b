"""The peers: what the harness asks of each, and how it finds one by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from ..workload import Workload

if TYPE_CHECKING:
    import torch

IN_THREADS = ("slot",)
# A distributed transport between actors is another row than between processes.
MONARCH_DISTRIBUTED, RAY_DISTRIBUTED = "distributed/monarch", "distributed/ray"
IN_MONARCH, IN_RAY = ("monarch", MONARCH_DISTRIBUTED), ("ray", RAY_DISTRIBUTED)
IN_ACTORS = (*IN_MONARCH, *IN_RAY)
# Forked from one process that has made every import, or 64 clients would take minutes to start.
START_METHOD = "forkserver"


@dataclass
class Session:
    """A connected client: `request()` is one full round trip and gives the action, if any."""

    request: Callable[[], torch.Tensor | None]
    close: Callable[[], None]


class Connector(Protocol):
    """A client before it connects, picklable unless the service is in threads."""

    def connect(self, workload: Workload, client: int) -> Session:
        """Connect as client number `client`; the server is running."""


Serving: TypeAlias = Callable[[Workload], AbstractContextManager[Sequence[Any]]]
"""Serves while it is entered, and gives the handles that the workload's clients connect with."""


class ClientEnd(Protocol):
    """The conductor's end of one client, which obeys as `client.Client` does."""

    def tell(self, command: Any) -> None:
        """Give it a command without waiting for the outcome."""

    def answer(self) -> Any:
        """Wait for the outcome; raises what the client raised, or an error that shows it."""


class Service(Protocol):
    """One server. Every method is called by the conductor, the parent of its process and of its clients' processes.

    Where the transport is one `IN_THREADS`, server and clients are threads of the conductor's process.
    """

    def connectors(self) -> Sequence[Connector]:
        """One per client of the workload; called once, before `start`."""

    def start(self) -> int:
        """Start the server, wait until it serves and return its process id."""

    def stop(self) -> None:
        """End the server in the way its users would; the clients have closed."""


class ActorService(Protocol):
    """One server and its clients, each an actor in a process that the actors' own library starts."""

    def start(self) -> int:
        """Start the server and the clients, which do not connect yet; the server's process id."""

    def clients(self) -> Sequence[ClientEnd]:
        """The workload's clients."""

    def stop(self) -> None:
        """End clients, server and what started them; the clients have closed."""


class Peer(Protocol):
    """A module of this package.

    `NAME`, `PACKAGES` whose versions matter, `MODULES` that server and clients import, and `open_service`.
    """

    NAME: str
    PACKAGES: tuple[str, ...]
    MODULES: tuple[str, ...]

    def open_service(self, workload: Workload, transport: str) -> Service | ActorService:
        """Set up what parent and children share; no server yet. Actors where the transport is one `IN_ACTORS`."""


def load_peer(name: str) -> Peer:
    """Import one peer and nothing of the others, which this interpreter may not have."""
    return importlib.import_module(f"{__name__}.{name}")  # type: ignore[return-value]
