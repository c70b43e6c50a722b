"""A transport whose server is in another process than the one that hands out its clients."""

from __future__ import annotations

import functools
import os
import pickle
import secrets
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase
from torch.distributed import TCPStore

from meshinfer.errors import ServerClosedError
from meshinfer.inference.distributed import DistributedTransport
from meshinfer.inference.merged import SEVERAL_ELSEWHERE
from meshinfer.inference.nodes import node_address
from meshinfer.inference.protocol import InferenceTransport
from meshinfer.inference.resolver import kinds_for, make_inference_transport
from meshinfer.rendezvous import (
    INTERFACE_VARIABLE,
    SECRET_VARIABLE,
    Directory,
    PrivateStore,
    choose_address,
    resolve,
)
from meshinfer.transport import PolicyBackend, TransportConfig, as_transport_config, listed

__all__ = ["SplitTransport", "split_transport"]

_OURS = ("role", "directory")
_SERVER_ONLY = ("host", "port", "device")


@dataclass(frozen=True)
class _OwnersDirectory(Directory):
    """Hosted by who starts the servers, before there is any client: where nobody listens, there will be no server."""

    def connect(self, timeout: float) -> TCPStore:
        """As there; :class:`~meshinfer.errors.ServerClosedError` where nobody listens."""
        try:
            socket.create_connection((self.host, self.port), timeout).close()
        except ConnectionRefusedError as error:
            raise ServerClosedError(
                "the server was shut down, or the process that started it has ended"
            ) from error
        return super().connect(timeout)


@dataclass(frozen=True)
class SplitTransport:
    """Both sides of one transport.

    Args:
        clients: the side of this process, which makes clients.
        config: what was asked for, ``None`` for a ready instance.
        server_opener: called before each start of a server: a picklable function that opens its side there.
        store: where the two sides find each other, if they need that.
    """

    clients: InferenceTransport
    config: TransportConfig | None
    server_opener: Callable[[], Callable[[], InferenceTransport]]
    store: PrivateStore | None = None

    def close(self) -> None:
        """End it for the clients."""
        self.clients.close()
        if self.store is not None:
            self.store.close()


def split_transport(
    transport: InferenceTransport | TransportConfig | str | None,
    *,
    policy_backend: PolicyBackend,
    num_slots: int | None,
    request_spec: TensorDictBase | None,
    response_spec: TensorDictBase | None,
    transport_options: Mapping[str, Any] | None,
) -> SplitTransport:
    """The transport of a server that lives elsewhere.

    Arguments as in :func:`~meshinfer.inference.resolver.make_inference_transport`.

    Raises:
        ValueError, TypeError: as there, and for a ready transport that cannot be served from another process.
    """
    if isinstance(transport, Sequence) and not isinstance(transport, str):
        raise TypeError(SEVERAL_ELSEWHERE)
    asked = isinstance(transport, str | TransportConfig | None)
    config = None
    if asked:
        config = as_transport_config(transport).with_options(transport_options)  # type: ignore[arg-type]
    facts = {"request_spec": request_spec, "response_spec": response_spec, "num_slots": num_slots}
    if config is not None and config.kind == "distributed":
        return _split_distributed(config, policy_backend, facts)
    if isinstance(transport, DistributedTransport) and not hasattr(transport, "serve_elsewhere"):
        raise ValueError(
            "a ready DistributedTransport has its server in the process that made it; give"
            " transport='distributed', the specs and transport_options= instead"
        )
    made = make_inference_transport(
        transport if config is None else config,
        policy_backend=policy_backend,
        transport_options=transport_options if config is None else None,
        **facts,  # type: ignore[arg-type]
    )
    opener = getattr(made, "serve_elsewhere", None)
    if opener is None:
        raise TypeError(
            f"{type(made).__name__} cannot be served from another process; give one of the kinds"
            f" {listed(kinds_for(policy_backend))}, or a transport that has serve_elsewhere()"
        )
    return SplitTransport(made, config, opener)


def _split_distributed(
    config: TransportConfig, policy_backend: PolicyBackend, facts: dict[str, Any]
) -> SplitTransport:
    """The server publishes where it is in a store of ours, so that clients find the next one too."""
    options = config.options
    if taken := [name for name in _OURS if name in options]:
        raise ValueError(f"{listed(taken)} cannot be given: the server process decides")
    secret = options.get("secret")
    if secret is None:
        secret = os.environ.get(SECRET_VARIABLE, secrets.token_hex(32))
    store = PrivateStore(_listening_address(options, policy_backend))
    directory = _OwnersDirectory(store.host, store.port, "meshinfer")
    shared = {"directory": directory, "secret": secret}
    try:
        clients = make_inference_transport(
            TransportConfig("distributed", _without(options, "secret", *_SERVER_ONLY)),
            policy_backend=policy_backend,
            transport_options={**shared, "role": "client"},
            **facts,
        )
        del facts["num_slots"]
        specs = {name: spec for name, spec in facts.items() if spec is not None}
        # as bytes: multiprocessing would move the tensors of a spec to shared memory
        arguments = pickle.dumps({**specs, **options, **shared, "role": "server"})
    except BaseException:
        store.close()
        raise
    opener = functools.partial(_open_distributed, arguments)
    return SplitTransport(clients, config, lambda: opener, store)


def _open_distributed(arguments: bytes) -> DistributedTransport:
    return DistributedTransport(**pickle.loads(arguments))


def _listening_address(options: Mapping[str, Any], policy_backend: PolicyBackend) -> str:
    """Of the store: by ``interface``, else where the server and its clients reach this node.

    The server listens at the address by which it reaches the store.
    """
    interface, host = options.get("interface"), options.get("host")
    spans_hosts = bool(options.get("spans_hosts", False))
    if interface is None and host is not None and policy_backend == "multiprocessing":
        interface = resolve(host)
    if interface is None and not os.environ.get(INTERFACE_VARIABLE):
        interface = node_address(policy_backend)
    return choose_address(interface, spans_hosts=spans_hosts)


def _without(options: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names}
