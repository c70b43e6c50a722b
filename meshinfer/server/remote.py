"""What servers that live elsewhere have in common, however their life is run."""

from __future__ import annotations

import contextlib
import os
import pickle
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from meshinfer.arguments import as_count, as_seconds
from meshinfer.errors import ClosedError, TransportError
from meshinfer.inference.protocol import InferenceTransport
from meshinfer.inference.version import Key, as_key
from meshinfer.server import requests
from meshinfer.server.config import (
    InferenceDeviceConfig,
    InferenceServerConfig,
    merged_config,
    merged_devices,
)
from meshinfer.server.life import ServerLife
from meshinfer.server.lifetime import NOT_STARTED, ServerHealth
from meshinfer.server.pickled import Pickler, pickled_function
from meshinfer.server.process_weights import pack_weights
from meshinfer.server.server import InferenceServer
from meshinfer.server.setup import ServerSetup
from meshinfer.server.split import SplitTransport, split_transport
from meshinfer.server.stats import ServerStats
from meshinfer.transport import POLICY_BACKEND_OF, PolicyBackend, TransportConfig
from meshinfer.weights.protocol import WeightTransport
from meshinfer.weights.resolver import make_weight_transport

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["RemoteInferenceServer"]

_LAST_STATS_SECONDS = 1.0
_EXIT_PRIORITY = 100
"""Before multiprocessing waits for processes that have not ended."""


class RemoteInferenceServer(InferenceServer):
    """A server that lives elsewhere: started, watched and ended from here, by its owner.

    A subclass says how a life begins. The policy is made there, so that nothing of it needs to be pickled and its work
    does not share this process's GIL. Clients are made here, before or after the start, and may be sent to other
    processes.

    Args:
        policy_factory: called without arguments where the server lives; returns what
            :class:`~meshinfer.server.thread.ThreadInferenceServer` serves.
        transport: a kind that reaches the server there, a :class:`~meshinfer.transport.TransportConfig`,
            ``None``/``"auto"``, or a ready transport with ``serve_elsewhere()``.
        num_slots: requests in flight, or clients, for transports with slots.
        request_spec, response_spec, transport_options: for a transport that is made here.
        max_batch_size, min_batch_size, timeout, static_batch_size, server_config: see
            :class:`~meshinfer.server.config.InferenceServerConfig`.
        in_keys, out_keys: for a plain ``nn.Module``.
        collate_fn: as for a server in a thread; it is sent to the server as ``policy_factory`` is.
        policy_device, output_device, device_config: where the model computes, and where replies go.
        policy_version: of the weights that the factory makes.
        policy_version_key: where clients find the version that computed their reply, ``None`` for nowhere.
        weight_transport: where new weights come from by themselves: a ready
            :class:`~meshinfer.weights.protocol.WeightTransport` that reaches the server there, or a
            :class:`~meshinfer.transport.TransportConfig` with the weights' ``spec`` among its options. The trainer
            publishes by ``server.weight_transport.publisher(...)``; ``shutdown`` closes a transport that was made here.
        startup_timeout: seconds for the server to start and the factory to return.

    Raises:
        ValueError, TypeError: an argument cannot work; names it and what to give instead.
    """

    _place: ClassVar[str]
    """Where the server lives, for errors."""

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
        collate_fn: Callable[[list[TensorDictBase]], TensorDictBase] | None = None,
        policy_device: torch.device | str | int | None = None,
        output_device: torch.device | str | int | None = None,
        policy_version: int = 0,
        policy_version_key: Key | None = "policy_version",
        server_config: InferenceServerConfig | None = None,
        device_config: InferenceDeviceConfig | None = None,
        weight_transport: WeightTransport | TransportConfig | str | None = None,
        startup_timeout: float = 300.0,
    ) -> None:
        dumps = self._pickler()
        self._factory = pickled_function("policy_factory", policy_factory, self._place, dumps)
        self._collate = collate_fn and pickled_function(
            "collate_fn", collate_fn, self._place, dumps
        )
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
        self._startup_timeout = as_seconds("startup_timeout", startup_timeout)
        self._lock = threading.Lock()
        self._closed = False
        self._request_spec = request_spec
        self._lives: list[ServerLife] = []
        self._last_stats: ServerStats | None = None
        policy_backend = POLICY_BACKEND_OF[self.service_backend]
        self._split = split_transport(
            transport,
            policy_backend=policy_backend,
            num_slots=num_slots,
            request_spec=request_spec,
            response_spec=response_spec,
            transport_options=transport_options,
        )
        try:
            self.weight_transport = _weights_there(weight_transport, policy_backend)
        except BaseException:
            if self._split.config is not None:
                self._split.close()
            raise
        ready = self.weight_transport is weight_transport
        # this process's side: it makes clients, and serves nobody
        self.transport = self._split.clients
        self.transport_config = self._split.config
        self._owner = os.getpid()
        self._finalizer = Finalize(
            self,
            _end,
            (self._lives, self._split, None if ready else self.weight_transport),
            exitpriority=_EXIT_PRIORITY,
        )
        self._made_weights = None if ready else self.weight_transport

    @property
    def is_alive(self) -> bool:
        """Whether the server runs and serves, as far as is known here. Never waits."""
        return bool(self._lives) and self._lives[-1].is_ready

    @property
    def pid(self) -> int | None:
        """Id of the server's process where it runs, also when it has ended; ``None`` before the first start."""
        return self._lives[-1].pid if self._lives else None

    @property
    def policy_version(self) -> int:
        """Of the weights that serve now, as of the last answer: of ``stats``, ``health`` or an update."""
        return self._lives[-1].policy_version if self._lives else self._first_version

    def start(self) -> Self:
        """Start the server and wait until it serves; returns it.

        After it has died, starts another one: the policy is the factory's again, and so is its version.

        Raises:
            RuntimeError: it runs already, or none can be started from here.
            ClosedError: it was shut down.
            TimeoutError: it was not ready after ``startup_timeout`` seconds; it has been ended.
            PeerLostError: its process has ended before it was ready.
            Exception: what ``policy_factory``, or the construction of the server, raised; its cause has the traceback.
        """
        with self._lock:
            self._check_open()
            if self._lives and not self._lives[-1].ended:
                raise RuntimeError("the server was started already")
            for former in self._lives:
                former.stop(
                    0.0
                )  # it may have been given up while its process lives, or hold a name
            life = self._begin(self._setup())
            self._lives[:] = [life]
        try:
            life.wait_until_ready(self._startup_timeout)
        except BaseException:
            life.stop(0.0)
            self._check_open()
            raise
        return self

    def shutdown(self, timeout: float = 5.0) -> None:
        """End the server: waiting requests and later ones raise :class:`~meshinfer.errors.ServerClosedError`.

        The batch that is being computed is answered. A server that does not end by itself is killed. Idempotent.

        Args:
            timeout: seconds for that batch.
        """
        as_seconds("timeout", timeout, zero=True)
        with self._lock:
            if self._closed or self._owner != os.getpid():  # a forked copy has nothing to end
                return
            self._closed = True
        self._finalizer.cancel()
        self._keep_stats()
        _end(self._lives, self._split, self._made_weights, timeout)

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
            PeerLostError: the server's process has ended.
            ClosedError, RuntimeError: the server was shut down, or has not been started.
        """
        if version is not None:
            as_count("version", version, least=0)
        packed = pack_weights(weights)
        return int(self._call(requests.update_weights, packed, version, timeout=timeout))

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
    ) -> Self:
        """Let a compiled policy compile before the first client asks; returns the server.

        Arguments and errors as for :meth:`ThreadInferenceServer.prepare
        <meshinfer.server.thread.ThreadInferenceServer.prepare>`, and as for :meth:`update_model_weights`. Call it
        after :meth:`start`.
        """
        spec = request_spec if request_spec is not None else self._request_spec
        self._call(requests.prepare, spec, interaction_type, timeout=timeout)
        return self

    def stats(self, reset: bool = False, timeout: float = 10.0) -> ServerStats:
        """What has been served; ``reset=True`` begins anew. Errors as in :meth:`update_model_weights`.

        After :meth:`shutdown`, what had been served when it was called, but for the batch that was being computed;
        :class:`~meshinfer.errors.ClosedError` if the server did not tell.
        """
        if not self._closed:
            found: ServerStats = self._call(requests.stats, reset, timeout=timeout)
            return found
        if self._last_stats is None:
            raise ClosedError(
                "this server was shut down, and did not tell before what it had served: ask for stats() earlier"
            )
        return self._last_stats

    def health(self, timeout: float = 5.0) -> ServerHealth:
        """How the server is, whatever has happened to it.

        Args:
            timeout: seconds for its answer.
        """
        life = self._lives[-1] if self._lives else None
        if life is None:
            return ServerHealth(False, None, None, False, self._first_version, NOT_STARTED)
        serving, error = False, None
        try:
            serving = bool(life.call(requests.health, timeout=timeout))
        except (TransportError, TimeoutError) as reason:
            error = str(reason)
        if error is None and not serving:
            error = "the serving thread has ended"
        return ServerHealth(
            not life.ended, life.pid, life.exitcode, serving, life.policy_version, error
        )

    def __repr__(self) -> str:
        started = str(self._lives[-1]) if self._lives else "not started"
        state = "closed" if self._closed else started
        return (
            f"{type(self).__name__}({self.transport!r}, policy_version={self.policy_version},"
            f" {state})"
        )

    @abstractmethod
    def _begin(self, setup: ServerSetup) -> ServerLife:
        """A new life of the server, which may not be ready yet. Does not wait for it."""

    @abstractmethod
    def _pickler(self) -> Pickler:
        """What sends functions to where the server lives; first of all checks that there is such a place."""

    def _keep_stats(self) -> None:
        """Of a server that is about to end."""
        if self.is_alive:
            with contextlib.suppress(Exception):  # whatever it is, the server has to be ended
                found = self._lives[-1].call(requests.stats, False, timeout=_LAST_STATS_SECONDS)
                self._last_stats = replace(found, clients=0)

    @property
    def _was_started(self) -> bool:
        return bool(self._lives) and not self._lives[-1].ended

    def _setup(self) -> ServerSetup:
        weights = self.weight_transport
        return ServerSetup(
            policy_factory=self._factory,
            open_transport=self._split.server_opener(),
            arguments=self._arguments,
            collate_fn=self._collate,
            weight_transport=None if weights is None else pickle.dumps(weights),
        )

    def _call(self, function: Callable[..., Any], *arguments: Any, timeout: float) -> Any:
        as_seconds("timeout", timeout, zero=True)
        self._check_open()
        if not self._lives:
            raise RuntimeError(f"{NOT_STARTED}; call start() first")
        return self._lives[-1].call(function, *arguments, timeout=timeout)


def _weights_there(
    asked: WeightTransport | TransportConfig | str | None, policy_backend: PolicyBackend
) -> WeightTransport | None:
    """The weight transport that was asked for; :class:`TypeError` for one that does not leave this process."""
    if asked is None:
        return None
    found = make_weight_transport(asked, policy_backend=policy_backend)
    try:
        pickle.dumps(found)
    except Exception as error:  # a class may raise anything while it is pickled
        raise TypeError(
            f"weight_transport: the {type(found).__name__} cannot be sent to the server: {error}"
        ) from error
    return found


def _end(
    lives: list[ServerLife],
    transport: SplitTransport,
    weights: WeightTransport | None,
    timeout: float = 5.0,
) -> None:
    """End without the server, also when it is collected or the interpreter exits."""
    for life in lives:
        life.stop(timeout)
    transport.close()
    if weights is not None:
        weights.close()
