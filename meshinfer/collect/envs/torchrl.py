"""Environments of TorchRL."""

from __future__ import annotations

from typing import Any

import numpy as np
from tensordict import TensorDict, TensorDictBase

from meshinfer.collect.envs.actions import checked_action
from meshinfer.collect.envs.protocol import Observation, StepResult
from meshinfer.specs import short_key, walk

__all__ = ["TorchRLEnvironment"]


class TorchRLEnvironment:
    """A TorchRL ``EnvBase`` of batch size ``[]`` or ``[B]``; rows that are done are reset by its own ``maybe_reset``.

    Raises:
        TypeError: a leaf of the specs that is no tensor, or has a dtype that NumPy lacks.
        ValueError: more batch dimensions, a size that is not fixed, several rewards or ends per row, or observations
            that only the policy can give (``TensorDictPrimer``).
    """

    def __init__(self, env: Any) -> None:
        if len(env.batch_size) > 1:
            raise ValueError(f"batch_size: expected [] or [B], found {list(env.batch_size)}")
        self._env = env
        self._root: Any = None
        self.is_batched = len(env.batch_size) == 1
        self.num_envs = int(env.batch_size.numel())
        self.observation_spec = _zeros("observation", env.observation_spec, env.batch_size)
        self.action_spec = _zeros("action", env.full_action_spec, env.batch_size)
        self._keys = list(self.observation_spec.keys(True, True))
        self._actions = [
            (k, leaf.shape, leaf.dtype) for k, leaf in self.action_spec.items(True, True)
        ]
        _check_outcome(env)
        _check_transforms(env)

    def reset(self, seed: int | None = None) -> Observation:
        """Begin an episode in every row; seeds go through ``set_seed``."""
        if seed is not None:
            self._env.set_seed(seed)
        self._root = self._env.reset()
        return self._observe(self._root)

    def step(self, action: TensorDictBase | Observation) -> StepResult:
        """One step of every row, and a reset of those that are done."""
        for key, shape, dtype in self._actions:
            self._root.set(key, checked_action(action, key, shape, dtype).clone())
        stepped, self._root = self._env.step_and_maybe_reset(self._root)
        following = stepped["next"]
        reward, terminated, done = (
            self._column(following, key) for key in ("reward", "terminated", "done")
        )
        truncated = self._column(following, "truncated")
        seen = self._observe(following)
        # TorchRL counts an end without a cause as the task's own.
        terminated = terminated | (done & ~truncated)
        after = self._observe(self._root) if done.any() else seen
        if self.is_batched:
            return StepResult(seen, reward, terminated, truncated, after)
        return StepResult(seen, float(reward), bool(terminated), bool(truncated), after)

    def close(self) -> None:
        """Close the environment."""
        if not self._env.is_closed:
            self._env.close()

    def _observe(self, data: Any) -> Observation:
        return {key: data[key].numpy(force=True) for key in self._keys}

    def _column(self, data: Any, key: str) -> Any:
        """One number per row, as an array ``[B]`` or ``[]``; zeros where the environment has no such key."""
        tensor = data.get(key, None)
        shape = (self.num_envs,) if self.is_batched else ()
        return np.zeros(shape, bool) if tensor is None else tensor.numpy(force=True).reshape(shape)


def _zeros(what: str, spec: Any, batch_size: Any) -> TensorDict:
    """The spec's leaves as plain zeros on the CPU."""
    zeros = TensorDict({}, batch_size)
    for words, leaf in walk(spec.zero(), (), what):
        key = short_key(words)
        if any(size < 0 for size in spec[key].shape):
            raise ValueError(
                f"{what} spec {key!r}: expected fixed sizes, found {list(spec[key].shape)}"
            )
        try:
            leaf.numpy(force=True)
        except TypeError as exc:
            raise TypeError(f"{what} spec {key!r}: NumPy has no dtype for {leaf.dtype}") from exc
        zeros[key] = leaf.cpu()
    return zeros


def _check_outcome(env: Any) -> None:
    ends = {"done", "terminated", "truncated"}
    if env.reward_keys != ["reward"] or not set(env.done_keys) <= ends:
        expected = "one 'reward' and one 'done' for each row, at the root"
        raise ValueError(
            f"environment: expected {expected}, found {env.reward_keys} and {env.done_keys}"
        )
    if list(env.reward_spec.shape) not in ([*env.batch_size], [*env.batch_size, 1]):
        per_row = [*env.batch_size, 1]
        raise ValueError(f"reward spec: expected {per_row}, found {list(env.reward_spec.shape)}")


def _check_transforms(env: Any) -> None:
    # A batched environment that has not started takes any attribute for one of its parts', for ever.
    if "TransformedEnv" not in {base.__name__ for base in type(env).__mro__}:
        return
    parts = getattr(env.transform, "transforms", [env.transform])
    names = {base.__name__ for part in parts for base in type(part).__mro__}
    if "TensorDictPrimer" in names:
        raise ValueError(
            "TensorDictPrimer: its keys come from the policy, and only actions come back to an environment;"
            " remove it and let the policy keep its hidden state"
        )
