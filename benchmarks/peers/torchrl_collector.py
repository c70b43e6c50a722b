"""TorchRL's collector, as its documentation would have it fast; run by an interpreter that has TorchRL."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..workload import Workload
from .collecting import FRAMES_PER_BATCH, Collecting
from .meshinfer_collector import make_module


def collecting(workload: Workload, where: str) -> Collecting:
    return Collecting(partial(_MAKERS[where], workload))


def make_env() -> Any:
    from torchrl.envs import GymEnv

    # Without a one-hot action, which is the cheaper way here.
    return GymEnv("CartPole-v1", categorical_action_encoding=True)


def _in_threads(workload: Workload) -> Any:
    return _make(workload, policy=make_module(), backend="threading", transport="driver")


def _in_processes(workload: Workload) -> Any:
    """Its fast path: the policy in a process of its own, which the environments' processes reach directly."""
    collector = _make(
        workload, policy_factory=make_module, env_backend="multiprocessing", transport="auto"
    )
    if collector.server_backend != "process":
        raise RuntimeError(f"TorchRL serves in a {collector.server_backend}, not in a process")
    return collector


def _make(workload: Workload, **arguments: Any) -> Any:
    from torchrl.collectors import AsyncBatchedCollector
    from torchrl.modules.inference_server import InferenceServerConfig

    config = InferenceServerConfig(max_batch_size=workload.clients, min_batch_size=1, timeout=0.001)
    return AsyncBatchedCollector(
        create_env_fn=[make_env] * workload.clients,
        frames_per_batch=FRAMES_PER_BATCH,
        server_config=config,
        **arguments,
    )


_MAKERS = {"threads": _in_threads, "processes": _in_processes}
