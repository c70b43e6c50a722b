"""The public face of the queue between processes."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import Any, Literal

from tensordict import TensorDictBase

from meshinfer.arguments import as_context, as_count, as_seconds
from meshinfer.errors import ClosedError
from meshinfer.inference.future import ReplyFuture
from meshinfer.inference.queues.address import Address
from meshinfer.inference.queues.client import MPClient
from meshinfer.inference.queues.hub import Hub
from meshinfer.inference.queues.session import Request
from meshinfer.inference.remote_errors import encode_exception
from meshinfer.rendezvous import given_secret

__all__ = ["MPTransport"]


class MPTransport:
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
        self.timeout = as_seconds("timeout", timeout)
        self.role: str = role
        self.policy_version_key: tuple[str, ...] | None = ("policy_version",)
        self._address = _address(role, address, secret)
        self._closed = False
        self._own_client: MPClient | None = None
        self._hub = Hub(self._address) if role == "server" else None
        self._finalizer = weakref.finalize(self, _close, self._hub)

    # For everybody.

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
        return MPClient(self._address, self.timeout)

    def submit(self, payload: TensorDictBase) -> ReplyFuture:
        """Send a request through a client that the transport keeps for itself."""
        if self._own_client is None:
            self._own_client = self.client()
        return self._own_client.submit(payload)

    def serve_elsewhere(self) -> Callable[[], MPTransport]:
        """Let another process serve; this object only makes clients from now on.

        May be called again when that process has died. Clients made before and after find the new server; those that
        were connected to this one lose what they had in flight.

        Returns:
            A picklable function that opens the server's side in the process that calls it.
        """
        self._check_open()
        self.role = "client"
        hub, self._hub = self._hub, None
        if hub is not None:
            self._finalizer.detach()
            hub.close(silently=True)
        return _Opener(self._address, self.timeout, self.ctx.get_start_method())

    def close(self) -> None:
        """End it. At the server, waiting clients raise :class:`~meshinfer.errors.ServerClosedError`. Idempotent."""
        self._closed = True
        if self._own_client is not None:
            self._own_client.close()
        self._finalizer()

    def __enter__(self) -> MPTransport:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "an MPTransport cannot be pickled; give other processes client(), or serve_elsewhere() to the one that is"
            " to serve"
        )

    def __repr__(self) -> str:
        return f"MPTransport({self.role} at {self._address}{', closed' * self._closed})"

    # For the server.

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called, or the server's side has failed: nothing will come any more."""
        return self._closed or (self._hub is not None and self._hub.closed)

    @property
    def num_clients(self) -> int:
        """Clients connected now."""
        return self._server().clients

    @property
    def num_lost(self) -> int:
        """Clients that ended without a goodbye, up to now."""
        return self._server().lost

    @property
    def num_waiting(self) -> int:
        """Requests that are ready now."""
        return len(self._server().pending)

    def wait_until_left(self, num_clients: int | None = None, timeout: float | None = None) -> bool:
        """Wait until every client has come and left.

        Args:
            num_clients: how many must have come, by default one; each connection counts.
            timeout: seconds; ``None`` for no limit.

        Returns:
            ``False`` when ``timeout`` ran out.
        """
        if num_clients is not None:
            as_count("num_clients", num_clients)
        return self._server().wait_until_left(num_clients, timeout)

    def wait_for_work(self, timeout: float | None = None) -> bool:
        """Wait until a request is ready: whether one is. Returns early when closed or woken."""
        return self._server().wait_for_work(timeout)

    def wake(self) -> None:
        """Make :meth:`wait_for_work` return."""
        self._server().wake()

    def set_ready_callback(self, callback: Callable[[], None] | None) -> None:
        """Ignored: one thread receives for all clients, and lets new ones in; it must not compute meanwhile."""

    def drain(self, max_items: int) -> tuple[list[TensorDictBase], list[Request]]:
        """At most ``max_items`` waiting requests as independent TensorDicts, and a handle for each."""
        payloads, requests, _ = self.drain_with_timing(max_items)
        return payloads, requests

    def drain_with_timing(
        self, max_items: int
    ) -> tuple[list[TensorDictBase], list[Request], list[float]]:
        """As :meth:`drain`, with the ``time.perf_counter()`` at which each request arrived."""
        payloads: list[TensorDictBase] = []
        requests: list[Request] = []
        for request in self._server().take(max_items):
            try:
                payloads.append(request.take())
            except Exception as error:  # pickled payloads may do anything while they are rebuilt
                self.resolve_exception(request, _unreadable(error))
            else:
                requests.append(request)
        return payloads, requests, [request.arrived for request in requests]

    def resolve(self, callback: Request, result: TensorDictBase) -> None:
        """Send ``result`` to the client behind ``callback``.

        Raises:
            TypeError: it is no TensorDict or tensorclass, has a tensor that is not on the CPU, or cannot be pickled.
        """
        callback.session.reply(callback.identifier, self._server().packer.pack(result))

    def resolve_exception(self, callback: Request, exc: BaseException) -> None:
        """Make the client behind ``callback`` raise ``exc``."""
        callback.session.reply_error(callback.identifier, encode_exception(exc))

    def _server(self) -> Hub:
        hub = self._hub
        if hub is None:
            raise ValueError(
                f"this MPTransport only makes clients of {self._address}, it cannot serve; "
                "another process does, or make it with role='server' in the process that runs InferenceServer"
            )
        if hub.forked_from:
            raise ValueError(
                f"this MPTransport was copied by a fork of process {hub.forked_from}, which serves; here it only makes"
                " clients"
            )
        return hub

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this transport was closed; make a new one")


@dataclass(frozen=True)
class _Opener:
    """Opens the server's side of a transport, in another process."""

    address: Address
    timeout: float
    start_method: str

    def __call__(self) -> MPTransport:
        return MPTransport(
            ctx=self.start_method,
            timeout=self.timeout,
            address=self.address.name,
            secret=self.address.secret,
        )


def _close(hub: Hub | None) -> None:
    """Close without the transport, when it is collected or the interpreter exits."""
    if hub is not None:
        hub.close()


def _unreadable(error: Exception) -> TypeError:
    failure = TypeError(f"request: the server cannot rebuild the payload: {error!r}")
    failure.__cause__ = error
    return failure


def _address(role: str, name: str | None, secret: str | bytes | None) -> Address:
    if role not in ("server", "client"):
        raise ValueError(f"role={role!r}: expected 'server' or 'client'")
    given = given_secret(secret)
    if role == "client" and (name is None or given is None):
        raise ValueError(
            "role='client' needs to know where the server is: pass its address and its secret, or give this process "
            "clients of the server's transport"
        )
    return Address.of(name, given)
