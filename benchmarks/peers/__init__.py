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

    from .collecting import Collecting

IN_THREADS = ("slot",)
# What weights travel over; the trainer is a thread of the conductor's process, and the only client.
IN_WEIGHTS = ("weights/shared_memory", "weights/distributed")
# Where a collector has its environments and its policy; there the transport is its own choice.
IN_COLLECTORS = ("threads", "processes")
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


@dataclass
class Trainer:
    """The one client where requests are updates: a thread of the process that has the service."""

    update: Callable[[], None]

    def connect(self, workload: Workload, client: int) -> Session:
        """At once."""
        return Session(self.update, _nothing)


def _nothing() -> None:
    """The service ends what the trainer has."""


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


def load_collecting(name: str, workload: Workload, where: str) -> Collecting:
    """The collector of a peer, not started; `where` is one of `IN_COLLECTORS`."""
    module = importlib.import_module(f"{__name__}.{name}_collector")
    made: Collecting = module.collecting(workload, where)
    return made
