"""The server that lives in a thread of the process that made it."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from meshinfer.arguments import as_count, as_seconds
from meshinfer.inference.interaction import encode_interaction
from meshinfer.inference.protocol import InferenceTransport, ServedTransport
from meshinfer.inference.resolver import make_inference_transport
from meshinfer.inference.version import Key, as_key
from meshinfer.server.batcher import Batcher
from meshinfer.server.config import (
    InferenceDeviceConfig,
    InferenceServerConfig,
    merged_config,
    merged_devices,
)
from meshinfer.server.devices import device_pass, staging_device, with_index
from meshinfer.server.lifetime import NOT_STARTED, ServerHealth
from meshinfer.server.parts import ServerParts
from meshinfer.server.policy import ServedPolicy
from meshinfer.server.server import InferenceServer
from meshinfer.server.sources import make_source
from meshinfer.server.static import example_batch
from meshinfer.server.stats import ServerStats, StatsRecorder
from meshinfer.transport import TransportConfig, as_transport_config
from meshinfer.weights.protocol import WeightTransport

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ThreadInferenceServer"]


class ThreadInferenceServer(InferenceServer):
    """Serves one policy from a thread of this process: batches what has arrived, computes, answers each row.

    ``InferenceServer(model, ...)`` makes one.

    Args:
        model: a ``TensorDictModule``, any callable from TensorDict to TensorDict, or with ``in_keys`` and ``out_keys``
            a plain ``nn.Module``. Its input has ``batch_size [N]``, N rows of however many requests (the batch
            dimensions of vectorised requests are flattened); it is valid during the call only: clone what you keep.
            A module is copied, so that training it in this process changes nothing until :meth:`update_model`.
        transport: a ready transport, a kind, a :class:`~meshinfer.transport.TransportConfig`, or ``None``/``"auto"``;
            or a sequence of them, see :class:`~meshinfer.inference.merged.MergedTransport`.
        num_slots: for a transport with slots: one for each client.
        max_batch_size: requests in one forward pass, at most.
        min_batch_size: requests to wait for, for at most ``timeout``.
        timeout: seconds that the oldest request may wait for ``min_batch_size``.
        static_batch_size: requests in every forward pass, see :class:`InferenceServerConfig` and :meth:`prepare`.
        in_keys, out_keys: for a plain ``nn.Module``.
        collate_fn: makes the policy's input of a list of request TensorDicts, instead of the row-wise gather; its
            first dimension must be the requests.
        policy_device: where the model computes; by default wherever it is.
        output_device: where replies go; by default to where their requests lay. Other than ``"cpu"`` only with a
            transport between threads that keeps tensors where they are.
        policy_version: of the weights that ``model`` has now.
        policy_version_key: where clients find the version that computed their reply, ``None`` for nowhere.
        share_weights: serve ``model`` itself instead of a copy.
        weight_transport: where new weights come from: a ready :class:`~meshinfer.weights.protocol.WeightTransport`, or
            a kind or config, for the weights of ``model``. The trainer has ``server.weight_transport.publisher()``.
        request_spec, response_spec, transport_options: for a transport that is made here.
        server_config: the batching arguments as one object, instead of ``max_batch_size``, ``min_batch_size``,
            ``timeout`` and ``static_batch_size``.
        device_config: the devices as one object, instead of ``policy_device`` and ``output_device``.

    Raises:
        ValueError, TypeError: an argument cannot work; names it and what to give instead.
        TransportError: another process serves ``transport``.
    """

    service_backend = "thread"

    def __init__(
        self,
        model: Callable[..., Any],
        transport: InferenceTransport | TransportConfig | str | Sequence[Any] | None = "auto",
        *,
        num_slots: int | None = None,
        max_batch_size: int | None = None,
        min_batch_size: int | None = None,
        timeout: float | None = None,
        static_batch_size: int | None = None,
        in_keys: Sequence[Key] | None = None,
        out_keys: Sequence[Key] | None = None,
        collate_fn: Callable[[list[TensorDictBase]], TensorDictBase] | None = None,
        policy_device: torch.device | str | int | None = None,
        output_device: torch.device | str | int | None = None,
        policy_version: int = 0,
        policy_version_key: Key | None = "policy_version",
        share_weights: bool = False,
        weight_transport: WeightTransport | TransportConfig | str | None = None,
        request_spec: Any = None,
        response_spec: Any = None,
        transport_options: Mapping[str, Any] | None = None,
        server_config: InferenceServerConfig | None = None,
        device_config: InferenceDeviceConfig | None = None,
    ) -> None:
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
        self._policy = ServedPolicy(
            model,
            in_keys=in_keys,
            out_keys=out_keys,
            share_weights=share_weights,
            device=with_index(devices.server_policy_device()),
            version=policy_version,
        )
        asked = isinstance(transport, str | TransportConfig | None)
        self.transport_config = None
        if asked:
            self.transport_config = as_transport_config(transport).with_options(transport_options)  # type: ignore[arg-type]
        self.transport = make_inference_transport(
            self.transport_config if asked else transport,
            policy_backend="threading",
            num_slots=num_slots,
            request_spec=request_spec,
            response_spec=response_spec,
            transport_options=None if asked else transport_options,
        )
        try:
            self._check_inline()
            if isinstance(self.transport, ServedTransport):
                self.transport.wake()  # begins to serve, or says why this process cannot
            self._policy.device_pass = device_pass(
                self.transport, self._policy.device, devices.server_output_device(), collate_fn
            )
            self.weight_transport = self._policy.weight_transport(weight_transport)
        except (ValueError, TypeError):
            if asked:
                self.transport.close()
            raise
        self.policy_version_key = as_key(policy_version_key)
        self._collate = collate_fn
        self._request_spec = request_spec
        self._stats = StatsRecorder(self.config.stats_window)
        self._batcher: Batcher | None = None
        self._parts = ServerParts(
            self.transport, self.weight_transport, self.weight_transport is not weight_transport
        )
        self._closed = False
        if isinstance(self.transport, ServedTransport):
            self.transport.policy_version_key = self.policy_version_key
        self._finalizer = weakref.finalize(self, self._parts.stop)

    @property
    def is_alive(self) -> bool:
        """Whether the serving thread runs."""
        return self._batcher is not None and self._batcher.is_alive

    @property
    def policy_version(self) -> int:
        """Of the weights that serve now."""
        return self._policy.version

    def start(self) -> Self:
        """Begin to serve, in a thread; returns the server.

        Raises:
            RuntimeError: it was started before.
            ClosedError: it was shut down, or its ``weight_transport`` was closed.
        """
        self._check_open()
        if self._batcher is not None:
            raise RuntimeError("the server was started already")
        self._batcher = self._parts.start(self._make_batcher(), self._policy)
        return self

    def serve(self, num_clients: int | None = None, timeout: float | None = None) -> None:
        """Serve until every client has come and left; starts the server if need be.

        Args:
            num_clients: how many clients must have come. By default the ranks that the mesh assigned to this server,
                or at least one client.
            timeout: seconds; ``None`` for no limit.

        Raises:
            TimeoutError: clients were still there after ``timeout`` seconds. The server goes on.
            PeerLostError: a rank of the mesh was lost, as when it is killed, and has not come back within 15 s, while
                all others have left.
            TypeError: the transport does not know its clients.
            RuntimeError: the transport failed under the serving thread.
        """
        if timeout is not None:
            as_seconds("timeout", timeout, zero=True)
        if num_clients is not None:
            as_count("num_clients", num_clients)
        if self._batcher is None:
            self.start()
        wait = getattr(self.transport, "wait_until_left", None)
        if wait is None:
            raise TypeError(
                f"{type(self.transport).__name__} does not know when its clients leave; use start()"
            )
        if not wait(num_clients, timeout):
            raise TimeoutError(
                f"clients were still connected, or had not come yet, after {timeout:g} s"
            )
        if self._batcher is not None and self._batcher.failure is not None:
            raise RuntimeError("the serving thread failed") from self._batcher.failure

    def shutdown(self, timeout: float = 5.0) -> None:
        """Stop: waiting requests and later ones raise :class:`~meshinfer.errors.ServerClosedError`. Idempotent.

        The batch that is being computed is answered. The transport is closed too, since nobody would answer.

        Args:
            timeout: seconds for that batch.

        Raises:
            TimeoutError: the policy was still computing. Clients have been told all the same.
        """
        as_seconds("timeout", timeout, zero=True)
        if self._closed:
            return
        self._closed = True
        self._finalizer.detach()
        if not self._parts.stop(timeout):
            raise TimeoutError(
                f"the policy was still computing {timeout:g} s after shutdown() was called"
            )

    def prepare(
        self, request_spec: Any = None, *, interaction_type: InteractionType | None = None
    ) -> Self:
        """Let a compiled policy compile before the first client asks; returns the server.

        The policy computes a static batch of one request a few times, for nobody: neither clients nor statistics see
        it. Once for each exploration mode that clients will ask for. Best before :meth:`start`: CUDA graphs belong to
        the thread that captures them, so the serving thread begins with the same. Requests that arrive meanwhile wait.

        Args:
            request_spec: one request, or a spec, for zeros; by default what this server or its transport was made with.
            interaction_type: what a client has set.

        Raises:
            ValueError: without ``static_batch_size`` (each number of requests may compile anew), or without a spec.
            Exception: what the policy raised.
        """
        self._check_open()
        size = self.config.static_batch_size
        if size is None:
            raise ValueError("prepare() needs static_batch_size=, the one size to prepare for")
        layout = getattr(self.transport, "request_layout", None)
        batch = example_batch((request_spec, self._request_spec, layout), size, self._collate)
        device = staging_device(self.transport, self._collate, self._policy.device)
        if device is not None:  # the transport would have brought it there
            batch = batch.to(device)
        with self._turn():
            self._policy.warm_up(batch, encode_interaction(interaction_type))
        return self

    def update_model(self, change: Callable[[Any], object], *, version: int | None = None) -> int:
        """Change the served model between two batches.

        Args:
            change: called with the model, under ``torch.no_grad()``; for example ``lambda m: m.load_state_dict(new)``.
            version: of the weights afterwards; by default one more than before.

        Returns:
            The new version. Every later reply is computed with, and stamped with, the new weights.
        """
        with self._turn():
            return self._policy.update(change, version)

    def update_policy_weights_(self, weights: Any, *, version: int | None = None) -> int:
        """Copy new weights into the served model between two batches: parameters and buffers, all or none.

        Args:
            weights: a module, its state dict, or a TensorDict as ``TensorDict.from_module`` makes it; on any device, of
                any dtype, of a compiled module or not.
            version: of the weights afterwards; by default one more than before.

        Returns:
            The new version. Every later reply is computed with, and stamped with, the new weights.

        Raises:
            ValueError: a name is missing or unknown, or a shape differs; nothing has changed.
            TypeError: ``weights`` is none of these, or the served model is no ``nn.Module``.
        """
        with self._turn():
            return self._policy.load(weights, version)

    def health(self) -> ServerHealth:
        """How the server is; its process is this one."""
        error = None
        if not self.is_alive:
            error = "the serving thread has ended" if self._was_started else NOT_STARTED
        return ServerHealth(True, os.getpid(), None, self.is_alive, self.policy_version, error)

    def stats(self, reset: bool = False) -> ServerStats:
        """What has been served; ``reset=True`` begins anew."""
        clients = int(getattr(self.transport, "num_clients", 0))
        return self._stats.snapshot(
            clients=clients,
            policy_version=self._policy.version,
            weight_updates=self._policy.updates,
            reset=reset,
        )

    def __repr__(self) -> str:
        state = "closed" if self._closed else "serving" if self.is_alive else "not started"
        return f"InferenceServer({self.transport!r}, policy_version={self.policy_version}, {state})"

    @property
    def _was_started(self) -> bool:
        return self._batcher is not None

    def own_model(self) -> Self:
        """Before :meth:`start`, by who has made the model for this server and for nobody else; returns the server."""
        self._policy.owns_model = True
        return self

    def _make_batcher(self) -> Batcher:
        device, key = self._policy.device, self.policy_version_key
        return Batcher(
            self.transport,
            make_source(self.transport, self.config, self._collate, key, device),
            self._policy,
            self.config,
            self._stats,
            stamp=key is not None,
            inline=self._serves_inline(),
        )

    def _turn(self) -> AbstractContextManager[object]:
        """The right to use the model: between batches, or before there are any."""
        return self._policy.turn if self._batcher is None else self._batcher.turn()

    def _check_inline(self) -> None:
        if self.config.inline and not getattr(self.transport, "may_lead", True):
            raise ValueError(
                "inline=True: rows that follow their headers, as over backend='nccl', wait for the thread that would "
                "compute; leave it out"
            )

    def _serves_inline(self) -> bool:
        if not getattr(self.transport, "may_lead", True):
            return False
        if self.config.inline is not None:
            return self.config.inline
        on_cpu = self._policy.device is None or self._policy.device.type == "cpu"
        return on_cpu and self.config.min_batch_size == 1 and torch.get_num_threads() == 1
