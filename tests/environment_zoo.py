"""Environments whose every observation says where it comes from."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import VectorEnv


class Clock(gym.Env[Any, int]):
    """Observes (seed, episode, step) as a vector, pixels and nested numbers.

    Even episodes end by themselves after 3 steps; odd ones would last for ever.
    """

    observation_space = spaces.Dict(
        {
            "state": spaces.Box(-1e9, 1e9, (3,), np.float64),
            "pixels": spaces.Box(0, 255, (2, 2, 1), np.uint8),
            "nested": spaces.Dict(
                {
                    "phase": spaces.Discrete(8, start=100),
                    "pair": spaces.Tuple(
                        (spaces.MultiBinary(2), spaces.Box(0, 99, (), np.float32))
                    ),
                }
            ),
        }
    )
    action_space = spaces.Discrete(5, start=10)
    _seed, _episode, _step = -1, -1, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self._seed, self._episode = seed, -1
        self._episode, self._step = self._episode + 1, 0
        return self._observe(), {}

    def step(self, action: int) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if not self.action_space.contains(action):
            raise ValueError(f"the environment was given {action!r}")
        self._step += 1
        terminated = self._episode % 2 == 0 and self._step == 3
        return (
            self._observe(),
            float(action) / 4 + self._step,
            terminated,
            False,
            {"step": self._step},
        )

    def _observe(self) -> OrderedDict[str, Any]:
        step = self._step
        pair = np.array([step % 2, 1], np.int8), np.float32(step)
        return OrderedDict(
            state=np.array([self._seed, self._episode, step], np.float64),
            pixels=np.full((2, 2, 1), (10 * self._episode + step) % 250, np.uint8),
            nested={"phase": 100 + step, "pair": pair},
        )


def make_clock() -> gym.Env[Any, int]:
    """A :class:`Clock` whose odd episodes are cut after 5 steps."""
    return gym.wrappers.TimeLimit(Clock(), 5)


class Batched(VectorEnv):  # type: ignore[type-arg]
    """Two counters that are vectorised by hand: row 0 ends after 2 steps, row 1 after 3; ``infos`` hold batches."""

    num_envs = 2
    single_observation_space = spaces.Box(-9, 99, (1,), np.float32)
    single_action_space = spaces.Discrete(2)

    def __init__(self, final_key: str | None = "final_obs", **metadata: Any) -> None:
        self.metadata, self._final_key = metadata, final_key
        self._count = np.zeros((2, 1), np.float32)

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._count[:] = 0
        return self._count.copy(), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self._count += 1
        final, ended = self._count.copy(), self._count[:, 0] == [2, 3]
        self._count[ended] = 0
        infos = {self._final_key: final} if self._final_key and ended.any() else {}
        return self._count.copy(), [1, 1], ended.astype(np.int8), np.zeros(2, np.int8), infos


class OneArray(gym.Env[Any, int]):
    """Counts to 3 in the one array that it ever gives."""

    observation_space = spaces.Box(0, 3, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def __init__(self, reward: Any = 1) -> None:
        self._array, self._reward = np.zeros(1, np.float32), reward

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        self._array[0] = 0
        return self._array, {}

    def step(self, action: int) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        self._array += 1
        return self._array, self._reward, self._array[0] == 3, False, {}


class Fixed(gym.Env[Any, Any]):
    """Observes what it is told to, and keeps the last action it was given."""

    def __init__(self, observation: Any = 0.0, space: Any = None, action_space: Any = None) -> None:
        self.observation = observation
        self.observation_space = spaces.Box(0, 1, (), np.float32) if space is None else space
        self.action_space = spaces.Discrete(2) if action_space is None else action_space
        self.action: Any = None

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        return self.observation, {}

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        if not self.action_space.contains(action):
            raise ValueError(f"{self.action_space} does not contain {action!r}")
        self.action = action
        return self.observation, 0, False, False, {}
