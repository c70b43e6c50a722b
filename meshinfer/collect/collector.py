"""Batches of transitions from environments that step on their own, and a policy that serves all of them."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from meshinfer.arguments import as_context, as_count, as_seconds
from meshinfer.collect.arguments import as_backend, as_devices, as_factories, as_interaction
from meshinfer.collect.batches import BatchAssembler
from meshinfer.collect.closing import Closing
from meshinfer.collect.crew import Crew
from meshinfer.collect.probe import PolicyProbe
from meshinfer.collect.processes import portable
from meshinfer.collect.service import PolicySource, make_server
from meshinfer.collect.specs import make_plan
from meshinfer.errors import ClosedError, PeerLostError
from meshinfer.inference.protocol import InferenceTransport
from meshinfer.inference.version import Key
from meshinfer.server.config import InferenceDeviceConfig, InferenceServerConfig
from meshinfer.server.stats import ServerStats
from meshinfer.transport import TransportConfig

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["AsyncBatchedCollector", "CollectorStats"]

logger = logging.getLogger("meshinfer.collect")

_GIVING_UP_SECONDS = 2.0
_EXIT_PRIORITY = 110
"""Before the server, which ends at 100."""
_SPARE_STEPS = 2
"""Rows beyond an even share of a batch, so that nobody stops at the moment when a batch is full."""


@dataclass(frozen=True)
class CollectorStats:
    """What has been collected."""

    batches: int
    """That were handed out."""
    frames: int
    """Transitions in them."""
    buffered: int
    """Steps of environments that have been made, and not been handed out."""
    restarts: int
    """Environments that were made anew."""
    waited: float
    """Seconds that iteration has waited for environments."""
    server: ServerStats
    """Of the policy's server."""


class AsyncBatchedCollector:
    """Iterates batches of transitions, from environments that each step as fast as they can.

    No environment waits for another: each sends its observation to the policy's server, which computes a batch of
    whatever has arrived, and goes on with its action. While a batch is used, at most about one more is collected.

    A batch is a TensorDict, ``batch_size [frames_per_batch]``, environment by environment, each in the order of time.
    At its root: the observation, all that the policy returned, ``policy_version`` (that computed the action),
    ``env_index``, ``episode_id`` and ``step_index`` (of this environment; within the episode), all int64 ``[N]``.
    Under ``"next"``: the observation after the action (of an episode's last step the real one, not that of the
    reset), ``reward`` float32 ``[N, 1]``, ``terminated``, ``truncated`` and ``done`` bool ``[N, 1]``.

    Args:
        create_env_fn: functions that make the environments (Gymnasium's, single or vector, TorchRL's, or an
            :class:`~meshinfer.collect.Environment`), or one function and ``num_envs``. All of equal spaces. They are
            called in the thread or process that steps.
        policy: what :class:`~meshinfer.InferenceServer` serves. For another process it is pickled.
        policy_factory: a function that returns it, instead. For another process it is called there, and once here to
            see what it returns, unless both specs are given.
        num_envs: how often to call ``create_env_fn`` where that is one function.
        in_keys, out_keys: for a policy that is a plain ``nn.Module``.
        frames_per_batch: transitions in a batch.
        total_frames: transitions in all, exactly, so that the last batch may be short; -1 for no end.
        env_backend: ``"threading"`` or ``"multiprocessing"``: where environments step.
        policy_backend: likewise, where the policy computes.
        transport: how requests move: a kind, a :class:`~meshinfer.TransportConfig`, ``"auto"``, or a ready transport,
            which the collector then owns.
        transport_options: further arguments of the transport.
        max_batch_size, min_batch_size, timeout, server_config: see :class:`~meshinfer.InferenceServerConfig`.
        device_config: where the policy computes (``policy_device``) and where batches go (``storing_device``).
        policy_version: of the weights that the policy has now.
        policy_version_key: where transitions have it, ``None`` for nowhere.
        request_spec, response_spec: examples of one request and reply; by default what the policy's ``in_keys`` name
            (else the whole observation), and what one pass of the policy returns.
        initial_state: for recurrent policies: a TensorDict of what no environment makes, batch size ``[]``, such as
            ``{"hidden": zeros(64)}``. Every request carries it; the policy returns its next value, under
            ``("next", "hidden")`` or ``"hidden"``. An episode begins with the values given here. Transitions have the
            one that was used at the root and the next one under ``"next"``.
        max_inflight_per_env: in how many requests a vector environment is sent, each with an equal part of its rows.
        seed: of the first environment; each next row has one more. ``None`` for none.
        interaction_type: exploration mode under which the policy computes, also called ``exploration_type``; ``None``
            leaves it to the policy (where TorchRL's collectors ask for ``RANDOM``).
        restart_failed_envs: make an environment that failed anew, instead of raising. Its unfinished episode ends as
            truncated.
        max_restarts: for each environment; then it raises.
        step_timeout: seconds for one step of an environment, resets within it included, and for its first reset. One
            that takes longer has failed: its process is killed. A thread cannot be, and is not made anew either.
            ``None`` waits for ever.
        weight_transport: for the server, see :func:`~meshinfer.weights.make_weight_transport`.
        postproc: called with each batch; what it returns is handed out.
        start_method: of processes: ``"spawn"``, ``"forkserver"``, ``"fork"`` or a context of :mod:`multiprocessing`.
        startup_timeout: seconds for the environments to be made, and for the policy.

    Raises:
        ValueError, TypeError: an argument cannot work, or environments and policy do not fit; says which, and how.
        EnvironmentFailedError: an environment could not be made.
        TimeoutError: environments or the policy were not ready in time.
    """

    def __init__(
        self,
        create_env_fn: Callable[[], Any] | Sequence[Callable[[], Any]],
        policy: Any = None,
        *,
        policy_factory: Callable[[], Any] | None = None,
        num_envs: int | None = None,
        in_keys: Sequence[Key] | None = None,
        out_keys: Sequence[Key] | None = None,
        frames_per_batch: int,
        total_frames: int = -1,
        env_backend: str = "threading",
        policy_backend: str = "threading",
        transport: InferenceTransport | TransportConfig | str | None = "auto",
        transport_options: Mapping[str, Any] | None = None,
        max_batch_size: int | None = None,
        min_batch_size: int | None = None,
        timeout: float | None = None,
        server_config: InferenceServerConfig | None = None,
        device_config: InferenceDeviceConfig | None = None,
        policy_version: int = 0,
        policy_version_key: Key | None = "policy_version",
        request_spec: Any = None,
        response_spec: Any = None,
        initial_state: TensorDictBase | None = None,
        max_inflight_per_env: int = 1,
        seed: int | None = None,
        interaction_type: InteractionType | None = None,
        exploration_type: InteractionType | None = None,
        restart_failed_envs: bool = False,
        max_restarts: int = 10,
        step_timeout: float | None = None,
        weight_transport: Any = None,
        postproc: Callable[[TensorDictBase], Any] | None = None,
        start_method: BaseContext | str = "spawn",
        startup_timeout: float = 300.0,
    ) -> None:
        factories = as_factories(create_env_fn, num_envs)
        self.frames_per_batch = as_count("frames_per_batch", frames_per_batch)
        self.total_frames = (
            total_frames if total_frames == -1 else as_count("total_frames", total_frames)
        )
        self.env_backend = as_backend("env_backend", env_backend)
        self.policy_backend = as_backend("policy_backend", policy_backend)
        if seed is not None:
            as_count("seed", seed, least=0)
        as_count("max_restarts", max_restarts)
        if step_timeout is not None:
            as_seconds("step_timeout", step_timeout)
        as_count("max_inflight_per_env", max_inflight_per_env)
        as_seconds("startup_timeout", startup_timeout)
        source = PolicySource(policy, policy_factory)
        interaction = as_interaction(interaction_type, exploration_type)
        context = as_context("start_method", start_method)
        devices, self._storing_device = as_devices(device_config)
        if env_backend == "multiprocessing":
            factories = [portable(f"create_env_fn[{i}]", x) for i, x in enumerate(factories)]
        probe = PolicyProbe(
            source.here, in_keys, out_keys, devices.server_policy_device(), interaction
        )
        self._postproc = postproc
        self._frames = self._batches = 0
        self._waited = 0.0
        self._iterating = threading.Lock()
        self._crew = Crew(
            factories,
            context if env_backend == "multiprocessing" else None,
            seed=seed,
            interaction=interaction,
            max_restarts=max_restarts if restart_failed_envs else 0,
            startup_timeout=startup_timeout,
            step_timeout=step_timeout,
        )
        self._closing = Closing(self._crew)
        self._finalizer = Finalize(
            self, self._closing, (_GIVING_UP_SECONDS,), exitpriority=_EXIT_PRIORITY
        )
        try:
            plan = make_plan(
                self._crew.wait_until_made(),
                probe,
                request_spec=request_spec,
                response_spec=response_spec,
                initial_state=initial_state,
                version_key=policy_version_key,
                requests_per_step=max_inflight_per_env,
            )
            self.server, self.transport_config = make_server(
                source,
                plan,
                num_envs=len(factories),
                transport=transport,
                transport_options=transport_options,
                env_backend=env_backend,
                policy_backend=policy_backend,
                start_method=context,
                arguments={
                    "in_keys": in_keys,
                    "out_keys": out_keys,
                    "max_batch_size": max_batch_size,
                    "min_batch_size": min_batch_size,
                    "timeout": timeout,
                    "server_config": server_config,
                    "device_config": devices,
                    "policy_version": policy_version,
                    "policy_version_key": policy_version_key,
                    **_given(weight_transport=weight_transport),
                    **_given(
                        startup_timeout=startup_timeout if policy_backend != "threading" else None
                    ),
                },
            )
            self._closing.server = self.server
            self.server.start()
            steps = math.ceil(self.frames_per_batch / (len(factories) * plan.num_envs))
            self._crew.set_up(plan, self.server.client, steps + max(steps // 4, _SPARE_STEPS))
            self._assembler = BatchAssembler(
                plan, math.ceil(self.frames_per_batch / plan.num_envs) + 1
            )
        except BaseException:
            self._give_up()
            raise

    def __iter__(self) -> Iterator[Any]:
        """Go on collecting: batches until ``total_frames`` have been handed out, or until :meth:`shutdown`.

        Raises:
            EnvironmentFailedError: an environment raised, took longer than ``step_timeout``, or its process died; the
                collector has been shut down.
            PeerLostError: the policy's server has died; likewise.
            Exception: what the policy raised; likewise.
            RuntimeError: another loop iterates this collector.
            ClosedError: the collector was shut down before.
        """
        self._check_open()
        return self._iterate()

    def _iterate(self) -> Iterator[Any]:
        if not self._iterating.acquire(blocking=False):
            raise RuntimeError("another loop iterates this collector; one at a time can")
        try:
            while (frames := self._due()) and not self._closing.closed:
                batch = self._collect(frames)
                if batch is None:
                    return
                yield batch
        finally:
            self._iterating.release()

    def _due(self) -> int:
        if self.total_frames < 0:
            return self.frames_per_batch
        return min(self.frames_per_batch, self.total_frames - self._frames)

    def _collect(self, frames: int) -> Any:
        """The next batch, ``None`` once the collector is shut down; any failure shuts it down."""
        crew, assembler = self._crew, self._assembler
        try:
            if not crew.began:
                crew.begin()
            crew.move(assembler, frames)
            self._look()  # though all may be there: the others would hide for long that one has failed
            began = time.perf_counter()
            while assembler.frames < frames:
                if self._closing.closed:
                    return None
                crew.wait(frames - assembler.frames)
                self._look()
                crew.move(assembler, frames)
            self._waited += time.perf_counter() - began
            batch = assembler.batch(frames)
        except BaseException:
            if self._closing.closed:
                return None
            self._give_up()
            raise
        self._frames += frames
        self._batches += 1
        if self._storing_device is not None:
            batch = batch.to(self._storing_device)
        return batch if self._postproc is None else self._postproc(batch)

    def _look(self) -> None:
        """Now and then, raise if somebody has failed."""
        if self._crew.look() and not self.server.is_alive and not self._closing.closed:
            raise PeerLostError(f"the policy's server has ended: {self.server.health().error}")

    def _give_up(self) -> None:
        """After a failure, which is the one to raise."""
        try:
            self._closing(_GIVING_UP_SECONDS)
        except TimeoutError as error:
            logger.warning("%s", str(error))

    @property
    def policy_version(self) -> int:
        """Of the weights that serve now."""
        return self.server.policy_version

    @property
    def transport_kind(self) -> str:
        """The kind of the transport, ``"custom"`` for a class that meshinfer does not know."""
        return self.server.transport_kind

    def update_policy_weights_(self, weights: Any, *, version: int | None = None) -> int:
        """Replace the served policy's parameters and buffers between two of its batches, at any time.

        Args:
            weights: a module, its state dict, or a TensorDict of its parameters.
            version: of the weights; by default one more than before.

        Returns:
            The version. Every action that is computed from now on has it.

        Raises:
            ValueError, TypeError: ``weights`` do not fit the served policy; says where.
            ClosedError: the collector was shut down.
        """
        self._check_open()
        return self.server.update_policy_weights_(weights, version=version)

    def stats(self, reset: bool = False) -> CollectorStats:
        """What has been collected; ``reset=True`` begins the server's part anew.

        Also after :meth:`shutdown`; :class:`~meshinfer.errors.ClosedError` then if the policy's server has died.
        """
        rings = self._crew.rings
        return CollectorStats(
            batches=self._batches,
            frames=self._frames,
            buffered=sum(ring.written - ring.read for ring in rings),
            restarts=sum(self._crew.restarts),
            waited=self._waited,
            server=self.server.stats(reset),
        )

    def shutdown(self, timeout: float = 5.0) -> None:
        """Stop environments and server. A loop in another thread ends. Idempotent.

        Args:
            timeout: seconds for steps that are being made, and for the batch that the policy computes; then processes
                are killed. One that closes its environment has ten seconds more.

        Raises:
            TimeoutError: a thread is still in a step, or the policy, which cannot be ended by force.
        """
        as_seconds("timeout", timeout, zero=True)
        self._closing(timeout)

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def __reduce__(self) -> Any:
        raise TypeError("an AsyncBatchedCollector stays in the process that made it")

    def __repr__(self) -> str:
        state = ", closed" if self._closing.closed else ""
        return (
            f"AsyncBatchedCollector({len(self._crew.restarts)} environments by {self.env_backend}, "
            f"policy by {self.policy_backend}, {self._frames} frames{state})"
        )

    def _check_open(self) -> None:
        if self._closing.closed:
            raise ClosedError("this collector was shut down; make a new one")


def _given(**arguments: Any) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}
