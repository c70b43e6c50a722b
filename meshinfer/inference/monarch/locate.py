"""Where a server is, as others may be told."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from meshinfer.errors import PeerLostError
from meshinfer.inference.monarch.mortality import ProcessName
from meshinfer.inference.queues.wire import BadFrameError

__all__ = ["FixedServer", "MonarchAddress", "MonarchWhereabouts"]

_ATTEMPT_SECONDS: Final = 5.0


@dataclass(frozen=True)
class MonarchAddress:
    """A port, its process, and the secret of those who may send to it. Picklable.

    Attributes:
        port: monarch's name of it.
        process: that has it.
        host: name of its host, for messages.
        secret: of the job; never shown.
    """

    port: str
    process: ProcessName
    host: str
    secret: bytes = field(repr=False)

    @classmethod
    def own(cls, port: str, secret: bytes | None) -> MonarchAddress:
        """Of a port of this process; with a new secret that nobody can guess, where none is given."""
        key = secrets.token_bytes(32) if secret is None else secret
        return cls(port, ProcessName.own(), socket.gethostname(), key)

    @classmethod
    def read(cls, facts: Mapping[str, Any], secret: bytes) -> MonarchAddress:
        """From :attr:`facts`; :class:`BadFrameError` for a mapping without them."""
        try:
            process = ProcessName.read(facts["process"])
            return cls(str(facts["port"]), process, str(facts["host"]), secret)
        except (KeyError, TypeError, ValueError) as error:
            raise BadFrameError(f"no address: {error!r}") from error

    @property
    def facts(self) -> dict[str, Any]:
        """All but the secret, for JSON."""
        return {"port": self.port, "process": self.process.facts, "host": self.host}

    def __str__(self) -> str:
        return f"process {self.process.pid} on {self.host}"


class MonarchWhereabouts(Protocol):
    """How a client finds its server: :class:`~meshinfer.inference.queues.locate.Whereabouts` for monarch. Picklable."""

    @property
    def attempt_seconds(self) -> float:
        """How long one attempt to join may take, before :meth:`find` is asked again."""

    def find(self, deadline: float, stale: MonarchAddress | None) -> MonarchAddress:
        """Where the server is, or who knows; see :class:`~meshinfer.inference.queues.locate.Whereabouts`."""

    def account(self) -> str:
        """What is known of a server that has gone without a goodbye, for an error."""


@dataclass(frozen=True)
class FixedServer:
    """The server, or who knows where it is, is where it is said to be."""

    address: MonarchAddress
    attempt_seconds = _ATTEMPT_SECONDS

    def __str__(self) -> str:
        return str(self.address)

    def find(self, deadline: float, stale: MonarchAddress | None) -> MonarchAddress:
        """The address; :class:`~meshinfer.errors.PeerLostError` if nobody was there and its process has ended."""
        if stale is not None and self.address.process.has_ended:
            raise PeerLostError(f"{self.address} has ended")
        return self.address

    def account(self) -> str:
        """Nothing is known."""
        return ""
