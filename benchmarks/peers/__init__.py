"""The peers: what the harness asks of each, and how it finds one by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..workload import Workload

if TYPE_CHECKING:
    import torch

IN_THREADS = ("slot",)
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


class Peer(Protocol):
    """A module of this package.

    `NAME`, `PACKAGES` whose versions matter, `MODULES` that server and clients import, and `open_service`.
    """

    NAME: str
    PACKAGES: tuple[str, ...]
    MODULES: tuple[str, ...]

    def open_service(self, workload: Workload, transport: str) -> Service:
        """Set up what parent and children share; no server yet."""


def load_peer(name: str) -> Peer:
    """Import one peer and nothing of the others, which this interpreter may not have."""
    return importlib.import_module(f"{__name__}.{name}")  # type: ignore[return-value]
