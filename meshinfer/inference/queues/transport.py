"""The public face of the queue between the processes of one host."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import Literal

from meshinfer.arguments import as_context
from meshinfer.inference.queues.address import UnixAddress
from meshinfer.inference.queues.client import MPClient
from meshinfer.inference.queues.locate import FixedPlace
from meshinfer.inference.queues.served import QueueTransport, check_role
from meshinfer.rendezvous import given_secret

__all__ = ["MPTransport"]


class MPTransport(QueueTransport):
    """Requests over AF_UNIX sockets, between any processes of one host, with no layout fixed in advance.

    A payload may be whatever can be pickled. If its leaves are plain tensors nothing is: they travel as one row of
    bytes, whose layout is described once for each connection. Clients come and go at any time, before or after the
    processes start, and however those are started. The server listens in the abstract socket namespace (no file stays
    behind), admits processes of its own user only, and interprets nothing before both sides have proved to hold the
    secret, which travels inside pickled clients. No reply waits for its client: what that does not take at once is
    kept, and a client that has 64 MiB of requests and replies lying at the server is not read from until it takes some.
    Implements :class:`~meshinfer.inference.protocol.ServedTransport`.

    Args:
        ctx: a ``multiprocessing`` context or the name of a start method, ``"spawn"`` by default. For those who start
            the server's process; the transport itself starts none.
        timeout: seconds for a client to connect, and for the server to take a request. Idling has no limit.
        role: ``"server"`` for the process that serves, ``"client"`` for one that only makes clients.
        address: where to listen, or where the server listens: a name of your choice, by default a new one.
        secret: proves that both sides belong to one job. ``MESHINFER_SECRET`` by default; else a server makes one.

    Raises:
        ValueError, TypeError: an argument cannot work; says which and what to give instead.
    """

    transport_kind = "queue"

    def __init__(
        self,
        *,
        ctx: BaseContext | str | None = None,
        timeout: float = 60.0,
        role: Literal["server", "client"] = "server",
        address: str | None = None,
        secret: str | bytes | None = None,
    ) -> None:
        self.ctx = as_context("ctx", ctx)
        self._address = _address(role, address, secret)
        super().__init__(self._address if role == "server" else None, timeout)

    @property
    def address(self) -> str:
        """The name at which the server listens."""
        return self._address.name

    @property
    def secret(self) -> bytes:
        """What a transport of ``role="client"`` elsewhere needs besides the address. Keep it to yourself."""
        return self._address.secret

    def client(self) -> MPClient:
        """A new client: picklable, connects on first use."""
        self._check_open()
        return MPClient(FixedPlace(self._address), self.timeout)

    def serve_elsewhere(self) -> Callable[[], MPTransport]:
        """Let another process serve; this object only makes clients from now on.

        May be called again when that process has died. Clients made before and after find the new server; those that
        were connected to this one lose what they had in flight.

        Returns:
            A picklable function that opens the server's side in the process that calls it.
        """
        self._stop_serving_here()
        return _Opener(self._address, self.timeout, self.ctx.get_start_method())

    def _place(self) -> UnixAddress:
        return self._address


@dataclass(frozen=True)
class _Opener:
    """Opens the server's side of a transport, in another process."""

    address: UnixAddress
    timeout: float
    start_method: str

    def __call__(self) -> MPTransport:
        return MPTransport(
            ctx=self.start_method,
            timeout=self.timeout,
            address=self.address.name,
            secret=self.address.secret,
        )


def _address(role: str, name: str | None, secret: str | bytes | None) -> UnixAddress:
    check_role(role)
    given = given_secret(secret)
    if role == "client" and (name is None or given is None):
        raise ValueError(
            "role='client' needs to know where the server is: pass its address and its secret, or give this process "
            "clients of the server's transport"
        )
    return UnixAddress.of(name, given)
