"""The peers: what the harness asks of each, and how it finds one by name."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..workload import Workload

if TYPE_CHECKING:
    import torch


@dataclass
class Session:
    """A connected client: `request()` is one full round trip and gives the action, if any."""

    request: Callable[[], torch.Tensor | None]
    close: Callable[[], None]


class Connector(Protocol):
    """A client before it connects. It reaches its process as an argument of a spawned one."""

    def prepare(self) -> None:
        """Do what takes long and concerns no server, such as imports."""

    def connect(self, workload: Workload, client: int) -> Session:
        """Connect as client number `client`; the server is running."""


class Service(Protocol):
    """One server. Every method is called by the conductor, which is its parent process."""

    def connectors(self) -> Sequence[Connector]:
        """One per client of the workload; called once, before `start`."""

    def start(self) -> int:
        """Start the server process, wait until it serves and return its process id."""

    def stop(self) -> None:
        """End the server in the way its users would; the clients have closed."""


class Peer(Protocol):
    """A module of this package: `NAME`, `PACKAGES` whose versions matter, and `open_service`."""

    NAME: str
    PACKAGES: tuple[str, ...]

    def open_service(self, workload: Workload) -> Service:
        """Set up what parent and children share; no server process yet."""


def load_peer(name: str) -> Peer:
    """Import one peer and nothing of the others, which this interpreter may not have."""
    return importlib.import_module(f"{__name__}.{name}")  # type: ignore[return-value]
