"""One environment of Gymnasium."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from tensordict import TensorDict, TensorDictBase

from meshinfer.collect.envs.actions import ActionReader
from meshinfer.collect.envs.protocol import Observation, StepResult
from meshinfer.collect.envs.spaces import observation_leaves, observation_reader, spec_of

__all__ = ["GymnasiumEnvironment"]


class GymnasiumEnvironment:
    """A ``gymnasium.Env`` whose episodes follow each other: one that has ended is reset within its last step.

    ``info`` is dropped. A time limit is a wrapper's (``gymnasium.make(..., max_episode_steps=...)``) and arrives as
    ``truncated``.

    Raises:
        TypeError: a space without fixed shape, or without a dtype of torch.
    """

    num_envs = 1
    is_batched = False

    def __init__(self, env: Any) -> None:
        leaves, actions = observation_leaves(env.observation_space), ActionReader(env.action_space)
        self._env = env
        self._observe, self._read_action = observation_reader(leaves), actions.read
        self.observation_spec: TensorDict = spec_of(leaves, None)
        self.action_spec = actions.spec

    def reset(self, seed: int | None = None) -> Observation:
        """Begin an episode; without ``seed`` the environment's generator goes on."""
        observation, _ = self._env.reset(seed=seed)
        return self._observe(observation)

    def step(self, action: TensorDictBase | Observation) -> StepResult:
        """One step, and a reset if it ended the episode."""
        observation, reward, terminated, truncated, _ = self._env.step(self._read_action(action))
        try:
            reward = float(reward)
        except TypeError as exc:
            raise TypeError(f"reward: expected a number, found {reward!r}") from exc
        if terminated or truncated:
            # The reset may write into the very arrays that the step gave us.
            following = self._observe(deepcopy(observation))
            return StepResult(following, reward, bool(terminated), bool(truncated), self.reset())
        following = self._observe(observation)
        return StepResult(following, reward, False, False, following)

    def close(self) -> None:
        """Close the environment."""
        self._env.close()
