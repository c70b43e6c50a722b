"""A transport whose server is in another process than the one that hands out its clients."""

from __future__ import annotations

import functools
import os
import pickle
import secrets
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tensordict import TensorDictBase
from torch.distributed import TCPStore

from meshinfer.errors import ServerClosedError
from meshinfer.inference.distributed import DistributedTransport
from meshinfer.inference.protocol import InferenceTransport
from meshinfer.inference.resolver import make_inference_transport
from meshinfer.rendezvous import (
    SECRET_VARIABLE,
    Directory,
    PrivateStore,
    choose_address,
    resolve,
)
from meshinfer.transport import INFERENCE_TRANSPORTS, TransportConfig, as_transport_config, listed

__all__ = ["SplitTransport", "split_transport"]

_OURS = ("role", "directory")
_SERVER_ONLY = ("host", "port")


@dataclass(frozen=True)
class _OwnersDirectory(Directory):
    """Hosted by who starts the servers, before there is any client: where nobody listens, there will be no server."""

    def _connect(self, timeout: float) -> TCPStore:
        try:
            socket.create_connection((self.host, self.port), timeout).close()
        except ConnectionRefusedError as error:
            raise ServerClosedError(
                "the server was shut down, or the process that started it has ended"
            ) from error
        return super()._connect(timeout)


@dataclass(frozen=True)
class SplitTransport:
    """Both sides of one transport.

    Args:
        clients: the side of this process, which makes clients.
        config: what was asked for, ``None`` for a ready instance.
        server_opener: called before each start of a server process: a picklable function that opens its side there.
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
    num_slots: int | None,
    request_spec: TensorDictBase | None,
    response_spec: TensorDictBase | None,
    transport_options: Mapping[str, Any] | None,
) -> SplitTransport:
    """The transport of a server process.

    Arguments as in :func:`~meshinfer.inference.resolver.make_inference_transport`.

    Raises:
        ValueError, TypeError: as there, and for a ready transport that cannot be served from another process.
    """
    asked = isinstance(transport, str | TransportConfig | None)
    config = None
    if asked:
        config = as_transport_config(transport).with_options(transport_options)  # type: ignore[arg-type]
    facts = {"request_spec": request_spec, "response_spec": response_spec, "num_slots": num_slots}
    if config is not None and config.kind == "distributed":
        return _split_distributed(config, facts)
    if isinstance(transport, DistributedTransport):
        raise ValueError(
            "a ready DistributedTransport has its server in the process that made it; give"
            " transport='distributed', the specs and transport_options= instead"
        )
    made = make_inference_transport(
        transport if config is None else config,
        policy_backend="multiprocessing",
        transport_options=transport_options if config is None else None,
        **facts,  # type: ignore[arg-type]
    )
    opener = getattr(made, "serve_elsewhere", None)
    if opener is None:
        raise TypeError(
            f"{type(made).__name__} cannot be served from another process; give one of the kinds"
            f" {listed(_kinds())}, or a transport that has serve_elsewhere()"
        )
    return SplitTransport(made, config, opener)


def _kinds() -> list[str]:
    rows = INFERENCE_TRANSPORTS
    return sorted({row.kind for row in rows if "multiprocessing" in row.policy_backends})


def _split_distributed(config: TransportConfig, facts: dict[str, Any]) -> SplitTransport:
    """The server publishes where it is in a store of ours, so that clients find the next one too."""
    options = config.options
    if taken := [name for name in _OURS if name in options]:
        raise ValueError(f"{listed(taken)} cannot be given: the server process decides")
    secret = options.get("secret")
    if secret is None:
        secret = os.environ.get(SECRET_VARIABLE, secrets.token_hex(32))
    store = PrivateStore(_listening_address(options))
    directory = _OwnersDirectory(store.host, store.port, "meshinfer")
    shared = {"directory": directory, "secret": secret}
    try:
        clients = make_inference_transport(
            TransportConfig("distributed", _without(options, "secret", *_SERVER_ONLY)),
            policy_backend="multiprocessing",
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


def _listening_address(options: Mapping[str, Any]) -> str:
    interface, host = options.get("interface"), options.get("host")
    return choose_address(
        resolve(host) if interface is None and host is not None else interface,
        spans_hosts=bool(options.get("spans_hosts", False)),
    )


def _without(options: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name not in names}
