"""How a client finds its server: a fixed address, or a name in the job's directory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from meshinfer.rendezvous import Directory, ServerAddress

__all__ = ["FixedAddress", "Listed", "Locator"]


class Locator(Protocol):
    """Picklable; asked again at every connect, so that a restarted server is found where it is now."""

    @property
    def moves(self) -> bool:
        """Whether a server that has closed may come back somewhere else."""

    def find(self, timeout: float) -> ServerAddress:
        """Where the server is; raises :class:`TimeoutError` after ``timeout`` seconds."""


@dataclass(frozen=True)
class FixedAddress:
    """The server is where it is said to be."""

    address: ServerAddress
    moves = False

    def find(self, timeout: float) -> ServerAddress:
        """The address."""
        return self.address

    def __str__(self) -> str:
        return f"{self.address.host}:{self.address.port}"


@dataclass(frozen=True)
class Listed:
    """The server publishes its address under ``name``."""

    directory: Directory
    name: str
    secret: bytes | None = field(default=None, repr=False)
    moves = True

    def find(self, timeout: float) -> ServerAddress:
        """What the directory says now; errors as in :meth:`Directory.lookup`."""
        return self.directory.lookup(self.name, timeout=timeout, secret=self.secret)

    def __str__(self) -> str:
        return f"server {self.name!r}"
