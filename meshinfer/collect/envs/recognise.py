"""From whatever an environment factory made to something that can be collected from."""

from __future__ import annotations

import sys
from typing import Any

from tensordict import TensorDict

from meshinfer.collect.envs.protocol import Environment
from meshinfer.collect.envs.single import GymnasiumEnvironment
from meshinfer.collect.envs.torchrl import TorchRLEnvironment
from meshinfer.collect.envs.vector import vector_environment

__all__ = ["as_environment"]


def as_environment(env: Any) -> Environment:
    """``env`` as an :class:`Environment`.

    Args:
        env: a ``gymnasium.Env``, a ``gymnasium.vector.VectorEnv`` (0.29, or 1.x with any autoreset mode), a TorchRL
            ``EnvBase``, or an :class:`Environment`, which is returned unchanged.

    Raises:
        TypeError: none of these, or spaces of which no spec can be made.
        ValueError: a vector environment that does not say how it resets its rows, or an ``EnvBase`` of more than
            one batch dimension, reward or end per row.
    """
    # What has not been imported has no instances, and is not imported for this.
    gymnasium = sys.modules.get("gymnasium")
    if gymnasium is not None and isinstance(env, gymnasium.vector.VectorEnv):
        return vector_environment(env)
    if gymnasium is not None and isinstance(env, gymnasium.Env):
        return GymnasiumEnvironment(env)
    torchrl = sys.modules.get("torchrl.envs")
    if torchrl is not None and isinstance(env, torchrl.EnvBase):
        return TorchRLEnvironment(env)
    has_spec = isinstance(getattr(env, "observation_spec", None), TensorDict)
    if has_spec and not isinstance(env, type) and isinstance(env, Environment):
        return env
    raise TypeError(_unknown(env))


def _unknown(env: Any) -> str:
    found = env.__qualname__ if isinstance(env, type) else type(env).__qualname__
    expected = (
        "a gymnasium.Env, a gymnasium.vector.VectorEnv, a TorchRL EnvBase"
        " or a meshinfer.collect.Environment"
    )
    remedy = "; call it" if callable(env) else ""
    return f"environment: expected {expected}, found {found}{remedy}"
