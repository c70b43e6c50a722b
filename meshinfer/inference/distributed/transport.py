"""The public face of the distributed transport."""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from tensordict import TensorDictBase

from meshinfer.arguments import as_count, as_seconds
from meshinfer.errors import ClosedError, TransportError
from meshinfer.inference.distributed.backends import row_backend
from meshinfer.inference.distributed.client import DistributedClient
from meshinfer.inference.distributed.join import Compared, Identity
from meshinfer.inference.distributed.locate import FixedAddress, Listed, Locator
from meshinfer.inference.distributed.plane import RowBackend
from meshinfer.inference.distributed.reception import Reception
from meshinfer.inference.distributed.session import Request
from meshinfer.inference.future import ReplyFuture
from meshinfer.inference.rowwise import RowwiseTransport
from meshinfer.rendezvous import (
    SECRET_VARIABLE,
    Directory,
    ServerAddress,
    choose_address,
    given_secret,
    resolve,
)

__all__ = ["DistributedTransport"]

logger = logging.getLogger("meshinfer.distributed")

_GOODBYE_SECONDS = 2.0


class DistributedTransport(RowwiseTransport):
    """Requests over standalone gloo and NCCL pairs, between any processes that reach each other by TCP.

    The server's side owns a private ``TCPStore``, bound to one interface, where clients join; each client gets a
    process group of its own with the server, and one message each way for each request. The user's default process
    group is neither needed nor touched. Requests and replies have fixed layouts, which both sides compare before a
    pair is built. Implements :class:`~meshinfer.inference.protocol.BatchedTransport`.

    Args:
        request_spec: example of one request: a TensorDict (or tensorclass) whose leaves have the shapes and dtypes of
            the real ones; ``batch_size=[B]`` for clients that step ``B`` environments at once. CPU tensors.
        response_spec: example of one reply, with the same ``batch_size``.
        backend: ``"gloo"`` for tensors in CPU memory; ``"nccl"`` for observations and actions that never leave the
            GPUs, see ``docs/nccl.md``; or a ready :class:`~meshinfer.inference.distributed.plane.RowBackend`. A server
            with ``"nccl"`` has clients of either kind.
        device: with ``"nccl"``, the GPU of this side: where a client's payloads lie and its replies arrive, where a
            server receives rows. By default the current CUDA device of the thread that connects, or makes the server.
        timeout: seconds for a client to connect; also how long a waiter without a deadline waits before it asks
            whether the server is alive, and how long a row over NCCL may take. Idling has no limit.
        role: ``"server"`` for the process that serves, ``"client"`` for one that only makes clients.
        host: server: the address to listen on (as ``interface``); client: the server's address.
        port: server: the port of the private store, 0 or ``None`` lets the system choose; client: the server's.
        secret: proves that both sides belong to one job. ``MESHINFER_SECRET`` by default; else a server makes one,
            which clients get with :meth:`client` or through the launcher's store.
        interface: name or address of the interface to use, see :func:`~meshinfer.rendezvous.choose_address`.
        window: requests of one client on the wire at once. The server keeps two rows for each client either way, so a
            ``min_batch_size`` of more than two for each client that asks always waits for its ``timeout``. Over NCCL
            two at most, so that no row is sent that has no place yet.
        directory: where the server is published, and looked up when no ``port`` is given. Set by the mesh.
        name: of this server in the directory; two servers of one job need two names.
        rank: of this process in its job: a client of the same rank that comes later takes over.
        expected_ranks: ranks whose clients a server waits for, see :meth:`wait_until_left`.
        spans_hosts: whether clients are on other hosts, so that a loopback address cannot work.

    Raises:
        ValueError, TypeError: an argument cannot work; says which and what to give instead.
    """

    transport_kind = "distributed"
    _title = "server"
    """What errors call the server."""

    def __init__(
        self,
        request_spec: Any,
        response_spec: Any,
        *,
        backend: Literal["gloo", "nccl"] | RowBackend = "gloo",
        device: torch.device | str | int | None = None,
        timeout: float = 60.0,
        role: Literal["server", "client"] = "server",
        host: str | None = None,
        port: int | None = None,
        secret: str | bytes | None = None,
        interface: str | None = None,
        window: int = 2,
        directory: Directory | None = None,
        name: str = "policy",
        rank: int | None = None,
        expected_ranks: Iterable[int] = (),
        spans_hosts: bool = False,
    ) -> None:
        _check(timeout=timeout, role=role, port=port, window=window)
        self._rows = row_backend(backend, device=device, window=window)
        self.may_lead = self._rows is None  # else rows of the same client would wait for the policy
        super().__init__(request_spec, response_spec)
        self.backend = "gloo" if self._rows is None else self._rows.name
        self.role = role
        self.timeout = float(timeout)
        self._window = window
        self._interface = interface
        self._rank = rank
        self._indices = itertools.count()
        self._closed = False
        self._own_client: DistributedClient | None = None
        self._reception: Reception | None = None
        given = given_secret(secret)
        if role == "server":
            reach = None if directory is None else (directory.host, directory.port)
            self.row_device = None if self._rows is None else _other_than_cpu(self._rows.device)
            self._reception = self._open(host, port, given, reach, spans_hosts, expected_ranks)
            self._locator: Locator = FixedAddress(self._reception.address)
            if directory is not None:
                directory.publish(
                    name, self._reception.address, timeout=self.timeout, with_secret=given is None
                )
        else:
            self._locator = _locator(host, port, given, directory, name)
        withdraw = (directory, name) if directory is not None and role == "server" else None
        self._finalizer = weakref.finalize(self, _close, self._reception, withdraw, os.getpid())

    def _open(
        self,
        host: str | None,
        port: int | None,
        secret: bytes | None,
        reach: tuple[str, int] | None,
        spans_hosts: bool,
        expected_ranks: Iterable[int],
    ) -> Reception:
        listen = interface = self._interface
        if interface is None and host is not None:
            listen = resolve(host)
        return Reception(
            self.request_layout,
            self.response_layout,
            host=choose_address(listen, reach=reach, spans_hosts=spans_hosts),
            port=port or 0,
            secret=secret if secret is not None else secrets.token_bytes(32),
            compared=self._compared(),
            title=self._title,
            expected_ranks=expected_ranks,
            join_timeout=min(self.timeout, 30.0),
            rows=self._rows,
            row_timeout=self.timeout,
        )

    # For everybody.

    def client(self, *, backend: Literal["gloo"] | None = None) -> DistributedClient:
        """A new client: picklable, connects on first use.

        Args:
            backend: ``"gloo"`` for one whose payloads are in CPU memory, whatever the transport's backend is.
        """
        self._check_open()
        if backend not in (None, "gloo"):
            raise ValueError(
                f"backend={backend!r}: expected 'gloo', or nothing for the transport's own, {self.backend!r}"
            )
        return DistributedClient(
            self._locator,
            self.request_layout,
            self.response_layout,
            identity=self._next_identity(),
            timeout=self.timeout,
            window=self._window,
            interface=self._interface,
            rows=self._rows if backend is None else None,
        )

    def submit(self, payload: TensorDictBase) -> ReplyFuture:
        """Send a request through a client that the transport keeps for itself."""
        if self._own_client is None:
            self._own_client = self.client()
        return self._own_client.submit(payload)

    def close(self) -> None:
        """End it. At the server, waiting clients raise :class:`~meshinfer.errors.ServerClosedError`. Idempotent."""
        self._closed = True
        if self._own_client is not None:
            self._own_client.close()
        self._finalizer()

    def __enter__(self) -> DistributedTransport:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = ", closed" if self._closed else ""
        return (
            f"DistributedTransport({self.role} of {self._locator}, backend={self.backend!r}{state})"
        )

    @property
    def address(self) -> ServerAddress | None:
        """Where the server listens; ``None`` at a client that looks it up."""
        locator = self._locator
        return locator.address if isinstance(locator, FixedAddress) else None

    # For the server.

    @property
    def num_clients(self) -> int:
        """Clients connected now."""
        return self._server().clients

    @property
    def num_waiting(self) -> int:
        """Requests that are ready now."""
        return len(self._server().pending)

    @property
    def policy_version_key(self) -> tuple[str, ...] | None:
        """Where clients put the policy version. Set before the first client joins."""
        return self._server().policy_version_key

    @policy_version_key.setter
    def policy_version_key(self, key: tuple[str, ...] | None) -> None:
        self._server().policy_version_key = key

    def wait_until_left(self, num_clients: int | None = None, timeout: float | None = None) -> bool:
        """Wait until every client has come and left.

        Args:
            num_clients: how many must have come; by default the expected ranks, or at least one client.
            timeout: seconds; ``None`` for no limit.

        Returns:
            ``False`` when ``timeout`` ran out.

        Raises:
            PeerLostError: an expected rank was lost and has not come back within 15 s, while all others have left.
        """
        return self._server().wait_until_left(num_clients, timeout)

    def wait_for_work(self, timeout: float | None = None) -> bool:
        """Wait until a request is ready: whether one is. Returns early when closed or woken."""
        return self._server().wait_for_work(timeout)

    def wake(self) -> None:
        """Make :meth:`wait_for_work` return."""
        self._server().wake()

    def set_ready_callback(self, callback: Callable[[], None] | None) -> None:
        """Have ``callback`` called by the thread that received a request, instead of waking ``wait_for_work``."""
        self._server().on_ready = callback

    def drain_slots(self, max_items: int) -> list[Request]:
        """At most ``max_items`` waiting requests, oldest first, still in their rows."""
        return self._server().take(max_items)

    def _compared(self) -> Compared:
        """What replies must have alike at both sides."""
        return self.response_layout

    def _next_identity(self) -> Identity:
        """With a rank, the same in every life of this process; without one, of nobody else."""
        identity = Identity(self._rank, next(self._indices))
        return identity if self._rank is not None else identity.copy()

    def _server(self) -> Reception:
        if self._reception is None:
            raise ValueError(
                "this DistributedTransport has role='client', it cannot serve; make it with role='server' in the "
                "process that runs InferenceServer"
            )
        return self._reception

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this transport was closed; make a new one")


def _close(reception: Reception | None, published: tuple[Directory, str] | None, pid: int) -> None:
    """Close without the transport, when it is collected or the interpreter exits; not in a forked child."""
    if reception is None or pid != os.getpid():
        return
    reception.close()
    if published is not None:
        directory, name = published
        try:
            directory.withdraw(name, timeout=_GOODBYE_SECONDS)
        except (TransportError, TimeoutError, ValueError, RuntimeError) as error:
            logger.debug("%s stays in the directory, which has gone first: %s", name, str(error))


def _other_than_cpu(device: torch.device) -> torch.device | None:
    return None if device.type == "cpu" else device


def _locator(
    host: str | None, port: int | None, secret: bytes | None, directory: Directory | None, name: str
) -> Locator:
    if port:
        if secret is None:
            raise ValueError(
                f"a client of {host}:{port} needs the job's secret: pass secret=, "
                f"or set {SECRET_VARIABLE} for both sides"
            )
        return FixedAddress(ServerAddress(host or "127.0.0.1", port, secret))
    if directory is None:
        raise ValueError(
            "role='client' needs to know where the server is: pass host= and port=, or use init_mesh() under a launcher"
        )
    return Listed(directory, name, secret)


def _check(*, timeout: float, role: str, port: int | None, window: int) -> None:
    if role not in ("server", "client"):
        raise ValueError(f"role={role!r}: expected 'server' or 'client'")
    as_seconds("timeout", timeout)
    as_count("window", window)
    if port is not None:
        as_count("port", port, least=0, most=65535)
