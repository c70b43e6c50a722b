"""meshinfer's collector, with its own defaults."""

from __future__ import annotations

from functools import partial
from typing import Any

from ..workload import Workload
from .collecting import FRAMES_PER_BATCH, Collecting

_BACKENDS = {"threads": "threading", "processes": "multiprocessing"}


def collecting(workload: Workload, where: str) -> Collecting:
    return Collecting(partial(_make, workload, _BACKENDS[where]))


def make_env() -> Any:
    import gymnasium

    return gymnasium.make("CartPole-v1")


def make_module() -> Any:
    from tensordict.nn import TensorDictModule

    from ..policy import CartPolePolicy, make_policy

    return TensorDictModule(make_policy(CartPolePolicy), ["observation"], ["action"])


def _make(workload: Workload, backend: str) -> Any:
    from meshinfer.collect import AsyncBatchedCollector

    return AsyncBatchedCollector(
        make_env,
        policy_factory=make_module,
        num_envs=workload.clients,
        frames_per_batch=FRAMES_PER_BATCH,
        env_backend=backend,
        policy_backend=backend,
        seed=0,
    )
