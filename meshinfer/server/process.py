"""The server that lives in a process of its own."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import BaseContext
from multiprocessing.util import Finalize
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from meshinfer.arguments import as_context, as_count, as_seconds
from meshinfer.errors import ClosedError, TransportError
from meshinfer.inference.protocol import InferenceClient, InferenceTransport
from meshinfer.inference.resolver import inference_transport_kind
from meshinfer.inference.version import Key, as_key
from meshinfer.server import process_child as child
from meshinfer.server.config import (
    InferenceDeviceConfig,
    InferenceServerConfig,
    merged_config,
    merged_devices,
)
from meshinfer.server.lifetime import ServerHealth
from meshinfer.server.process_control import ServerProcess
from meshinfer.server.process_start import check_may_start, pickled_factory
from meshinfer.server.process_transport import SplitTransport, split_transport
from meshinfer.server.process_weights import pack_weights
from meshinfer.server.stats import ServerStats
from meshinfer.transport import TransportConfig

__all__ = ["ProcessInferenceServer"]

_EXIT_PRIORITY = 100
"""Before multiprocessing waits for processes that have not ended."""


class ProcessInferenceServer:
    """Serves one policy from a process of its own, which it starts, watches and ends.

    The policy is made there, so that nothing of it needs to be pickled and its work does not share this process's GIL.
    Clients are made here, before or after the start, and may be sent to other processes. When the server's process
    dies, every client that waits raises :class:`~meshinfer.errors.PeerLostError`, and :meth:`start` starts another
    one, with the policy as the factory makes it, for the same clients. When this process ends, however it does, the
    server's ends too. Ctrl-C in a terminal does not reach it.

    Args:
        policy_factory: called without arguments in the server's process; returns what
            :class:`~meshinfer.server.server.InferenceServer` serves. Picklable: a function of a module, a class, or a
            ``functools.partial`` of one.
        transport: a kind that crosses processes, a :class:`~meshinfer.transport.TransportConfig`, ``None``/``"auto"``,
            or a ready transport with ``serve_elsewhere()``. A ``"distributed"`` one listens on the loopback interface
            unless ``interface`` or ``host`` is among its options.
        num_slots: requests in flight, or clients, for transports with slots.
        request_spec, response_spec, transport_options: for a transport that is made here.
        max_batch_size, min_batch_size, timeout, static_batch_size, server_config: see
            :class:`~meshinfer.server.config.InferenceServerConfig`.
        in_keys, out_keys: for a plain ``nn.Module``.
        policy_device, output_device, device_config: where the model computes, and where replies go.
        policy_version: of the weights that the factory makes.
        policy_version_key: where clients find the version that computed their reply, ``None`` for nowhere.
        mp_context: ``"spawn"``, ``"forkserver"``, or ``"fork"``: only before CUDA is used here, and the policy
            computes with one thread unless its factory sets another number. Or a context of :mod:`multiprocessing`.
            By default the transport's ``ctx``, and ``"spawn"`` where it has none.
        startup_timeout: seconds for the process to start and the factory to return.

    Raises:
        ValueError, TypeError: an argument cannot work; names it and what to give instead.
    """

    def __init__(
        self,
        policy_factory: Callable[[], Any],
        transport: InferenceTransport | TransportConfig | str | None = "auto",
        *,
        num_slots: int | None = None,
        request_spec: TensorDictBase | None = None,
        response_spec: TensorDictBase | None = None,
        transport_options: Mapping[str, Any] | None = None,
        max_batch_size: int | None = None,
        min_batch_size: int | None = None,
        timeout: float | None = None,
        static_batch_size: int | None = None,
        in_keys: Sequence[Key] | None = None,
        out_keys: Sequence[Key] | None = None,
        policy_device: torch.device | str | int | None = None,
        output_device: torch.device | str | int | None = None,
        policy_version: int = 0,
        policy_version_key: Key | None = "policy_version",
        server_config: InferenceServerConfig | None = None,
        device_config: InferenceDeviceConfig | None = None,
        mp_context: BaseContext | str | None = None,
        startup_timeout: float = 300.0,
    ) -> None:
        self._factory = pickled_factory(policy_factory)
        self.config = merged_config(
            server_config,
            max_batch_size=max_batch_size,
            min_batch_size=min_batch_size,
            timeout=timeout,
            static_batch_size=static_batch_size,
        )
        devices = merged_devices(
            device_config, policy_device=policy_device, output_device=output_device
        )
        self._first_version = as_count("policy_version", policy_version, least=0)
        self._arguments = {
            "in_keys": in_keys,
            "out_keys": out_keys,
            "policy_version": policy_version,
            "policy_version_key": as_key(policy_version_key),
            "server_config": self.config,
            "device_config": devices,
        }
        context = None if mp_context is None else as_context("mp_context", mp_context)
        self._startup_timeout = as_seconds("startup_timeout", startup_timeout)
        self._lock = threading.Lock()
        self._closed = False
        self._request_spec = request_spec
        self._lives: list[ServerProcess] = []
        self._transport = split_transport(
            transport,
            num_slots=num_slots,
            request_spec=request_spec,
            response_spec=response_spec,
            transport_options=transport_options,
        )
        self._context: Any = context or as_context("ctx", getattr(self.transport, "ctx", None))
        self._owner = os.getpid()
        self._finalizer = Finalize(
            self, _end, (self._lives, self._transport), exitpriority=_EXIT_PRIORITY
        )

    @property
    def transport(self) -> InferenceTransport:
        """This process's side of the transport: it makes clients, and serves nobody."""
        return self._transport.clients

    @property
    def transport_kind(self) -> str:
        """The kind of the transport, ``"custom"`` for a class that meshinfer does not know."""
        return inference_transport_kind(self.transport)

    @property
    def transport_config(self) -> TransportConfig | None:
        """What was asked for, ``None`` for a ready transport."""
        return self._transport.config

    @property
    def is_alive(self) -> bool:
        """Whether the server's process runs and serves, as far as is known here. Never waits."""
        return bool(self._lives) and self._lives[-1].is_ready

    @property
    def pid(self) -> int | None:
        """Process id of the server, also when it has ended; ``None`` before the first start."""
        return self._lives[-1].pid if self._lives else None

    @property
    def policy_version(self) -> int:
        """Of the weights that serve now."""
        return self._lives[-1].policy_version if self._lives else self._first_version

    def start(self) -> ProcessInferenceServer:
        """Start the process and wait until it serves; returns the server.

        After the process has died, starts another one: the policy is the factory's again, and so is its version.

        Raises:
            RuntimeError: it runs already, or no process can be started from here.
            ClosedError: it was shut down.
            TimeoutError: it was not ready after ``startup_timeout`` seconds; the process has been killed.
            PeerLostError: the process has ended before it was ready.
            Exception: what ``policy_factory``, or the construction of the server, raised; its cause has the traceback.
        """
        with self._lock:
            self._check_open()
            if self._lives and not self._lives[-1].ended:
                raise RuntimeError("the server was started already")
            check_may_start(self._context)
            life = ServerProcess(self._context, self._setup(), self._first_version)
            self._lives[:] = [life]
        try:
            life.wait_until_ready(self._startup_timeout)
        except BaseException:
            life.stop(0.0)
            self._check_open()
            raise
        return self

    def shutdown(self, timeout: float = 5.0) -> None:
        """End the process: waiting requests and later ones raise :class:`~meshinfer.errors.ServerClosedError`.

        The batch that is being computed is answered. A process that does not end by itself is killed. Idempotent.

        Args:
            timeout: seconds for that batch.
        """
        as_seconds("timeout", timeout, zero=True)
        with self._lock:
            if self._closed or self._owner != os.getpid():  # a forked copy has nothing to end
                return
            self._closed = True
        self._finalizer.cancel()
        _end(self._lives, self._transport, timeout)

    def client(self) -> InferenceClient:
        """A new client of the transport, before or after the start."""
        self._check_open()
        return self.transport.client()

    def clients(self, count: int) -> list[InferenceClient]:
        """``count`` new clients."""
        as_count("count", count)
        return [self.client() for _ in range(count)]

    def update_model_weights(
        self, weights: Any, version: int | None = None, timeout: float = 60.0
    ) -> int:
        """Replace parameters and buffers between two batches.

        Args:
            weights: a module like the served one, its ``state_dict()``, or a TensorDict (``TensorDictParams``) of its
                parameters and buffers; on any device, of any dtype. Buffers that are not persistent may be missing.
            version: of the weights; by default one more than before.
            timeout: seconds.

        Returns:
            The new version. Every later reply is computed with, and stamped with, the new weights.

        Raises:
            ValueError: a name is missing or unknown, or a shape differs, as the message says; nothing has changed.
            TypeError: ``weights`` is something else, or the policy has no weights.
            TimeoutError: no answer; the update may still happen.
            PeerLostError: the process has ended.
            ClosedError, RuntimeError: the server was shut down, or has not been started.
        """
        if version is not None:
            as_count("version", version, least=0)
        packed = pack_weights(weights)
        return int(self._call(child.update_weights, packed, version, timeout=timeout))

    def update_policy_weights_(
        self, weights: Any, *, version: int | None = None, timeout: float = 60.0
    ) -> int:
        """As :meth:`update_model_weights`, under the name that every server has."""
        return self.update_model_weights(weights, version, timeout)

    def prepare(
        self,
        request_spec: TensorDictBase | None = None,
        *,
        interaction_type: InteractionType | None = None,
        timeout: float = 300.0,
    ) -> ProcessInferenceServer:
        """Let a compiled policy compile before the first client asks; returns the server.

        Arguments and errors as for :meth:`InferenceServer.prepare <meshinfer.server.server.InferenceServer.prepare>`,
        and as for :meth:`update_model_weights`. Call it after :meth:`start`.
        """
        spec = request_spec if request_spec is not None else self._request_spec
        self._call(child.prepare, spec, interaction_type, timeout=timeout)
        return self

    def stats(self, reset: bool = False, timeout: float = 10.0) -> ServerStats:
        """What has been served; ``reset=True`` begins anew. Errors as in :meth:`update_model_weights`."""
        found: ServerStats = self._call(child.stats, reset, timeout=timeout)
        return found

    def health(self, timeout: float = 5.0) -> ServerHealth:
        """How the server is, whatever has happened to it.

        Args:
            timeout: seconds for its answer.
        """
        life = self._lives[-1] if self._lives else None
        if life is None:
            return ServerHealth(
                False, None, None, False, self._first_version, "the server was not started"
            )
        serving, error = False, None
        try:
            serving = bool(life.call(child.health, timeout=timeout))
        except (TransportError, TimeoutError) as reason:
            error = str(reason)
        if error is None and not serving:
            error = "the serving thread has ended"
        return ServerHealth(
            not life.ended, life.pid, life.exitcode, serving, life.policy_version, error
        )

    def __enter__(self) -> ProcessInferenceServer:
        if not self._lives or self._lives[-1].ended:
            try:
                self.start()
            except BaseException:
                self.shutdown()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a ProcessInferenceServer stays in the process that made it; send its clients to others"
            " (server.client())"
        )

    def __repr__(self) -> str:
        started = str(self._lives[-1]) if self._lives else "not started"
        state = "closed" if self._closed else started
        return (
            f"ProcessInferenceServer({self.transport!r}, policy_version={self.policy_version},"
            f" {state})"
        )

    def _setup(self) -> child.ServerSetup:
        return child.ServerSetup(
            policy_factory=self._factory,
            open_transport=self._transport.server_opener(),
            arguments=self._arguments,
            forked=self._context.get_start_method() == "fork",
        )

    def _call(self, function: Callable[..., Any], *arguments: Any, timeout: float) -> Any:
        as_seconds("timeout", timeout, zero=True)
        self._check_open()
        if not self._lives:
            raise RuntimeError("the server was not started; call start() first")
        return self._lives[-1].call(function, *arguments, timeout=timeout)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this server was shut down; make a new one")


def _end(lives: list[ServerProcess], transport: SplitTransport, timeout: float = 5.0) -> None:
    """End without the server, also when it is collected or the interpreter exits."""
    for life in lives:
        life.stop(timeout)
    transport.close()
