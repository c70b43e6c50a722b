"""What every queue between processes offers, whatever its address and however its clients find it."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, NoReturn

from tensordict import TensorDictBase

from meshinfer.arguments import as_count, as_seconds
from meshinfer.errors import ClosedError
from meshinfer.inference.draining import Draining
from meshinfer.inference.future import ReplyFuture
from meshinfer.inference.queues.address import Address
from meshinfer.inference.queues.client import QueueClient
from meshinfer.inference.queues.hub import Hub
from meshinfer.inference.queues.session import Request
from meshinfer.inference.remote_errors import encode_exception

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["QueueTransport", "check_role"]


class QueueTransport(Draining):
    """The server's side, which one thread receives for, and the maker of clients.

    Implements :class:`~meshinfer.inference.protocol.ServedTransport`. A subclass says where to listen, how clients
    find that, and who else may serve.

    Args:
        address: where to listen; ``None`` for a side that only makes clients.
        timeout: seconds for a client to connect, and for the server to take a request. Idling has no limit.
    """

    transport_kind: ClassVar[str]

    def __init__(self, address: Address | None, timeout: float) -> None:
        self.timeout = as_seconds("timeout", timeout)
        self.role = "client"
        self.policy_version_key: tuple[str, ...] | None = ("policy_version",)
        self._closed = False
        self._own_client: QueueClient | None = None
        self._hub: Hub | None = None
        self._finalizer = weakref.finalize(self, _close, None)
        if address is not None:
            self._serve_with(Hub(address))

    def _serve_with(self, hub: Hub) -> None:
        """Be the server's side, with ``hub``, which is closed with this object."""
        self.role, self._hub = "server", hub
        self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _close, hub)

    # For everybody.

    @abstractmethod
    def client(self) -> QueueClient:
        """A new client: picklable, connects on first use."""

    @abstractmethod
    def serve_elsewhere(self) -> Callable[[], QueueTransport]:
        """Let another process serve; this object only makes clients from now on.

        Returns:
            A picklable function that opens the server's side in the process that calls it.
        """

    @abstractmethod
    def _place(self) -> object:
        """Where the server is, for messages."""

    def submit(self, payload: TensorDictBase) -> ReplyFuture:
        """Send a request through a client that the transport keeps for itself."""
        if self._own_client is None:
            self._own_client = self.client()
        return self._own_client.submit(payload)

    def _stop_serving_here(self) -> None:
        """Another process is to serve. Says nothing to the clients that this one has."""
        self._check_open()
        self.role = "client"
        hub, self._hub = self._hub, None
        if hub is not None:
            self._finalizer.detach()
            hub.close(silently=True)

    def close(self) -> None:
        """End it. At the server, waiting clients raise :class:`~meshinfer.errors.ServerClosedError`. Idempotent."""
        self._closed = True
        if self._own_client is not None:
            self._own_client.close()
        self._finalizer()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled; give other processes client(), or serve_elsewhere() to the one"
            " that is to serve"
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.role} at {self._place()}{', closed' * self._closed})"

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

    def drain_with_timing(
        self, max_items: int
    ) -> tuple[list[TensorDictBase], list[Request], list[float]]:
        """See :meth:`~meshinfer.inference.draining.Draining.drain_with_timing`."""
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
                f"this {type(self).__name__} only makes clients of {self._place()}, it cannot serve; "
                "another process does, or make it with role='server' in the process that runs InferenceServer"
            )
        if hub.forked_from:
            raise ValueError(
                f"this {type(self).__name__} was copied by a fork of process {hub.forked_from}, which serves; here it"
                " only makes clients"
            )
        return hub

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this transport was closed; make a new one")


def check_role(role: str) -> None:
    """:class:`ValueError` for anything but ``"server"`` and ``"client"``."""
    if role not in ("server", "client"):
        raise ValueError(f"role={role!r}: expected 'server' or 'client'")


def _close(hub: Hub | None) -> None:
    """Close without the transport, when it is collected or the interpreter exits."""
    if hub is not None:
        hub.close()


def _unreadable(error: Exception) -> TypeError:
    failure = TypeError(f"request: the server cannot rebuild the payload: {error!r}")
    failure.__cause__ = error
    return failure
