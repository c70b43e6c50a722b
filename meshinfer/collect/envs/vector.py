"""Vector environments of Gymnasium, whichever way they reset their rows."""

from __future__ import annotations

from typing import Any

import numpy as np
from tensordict import TensorDict, TensorDictBase

from meshinfer.collect.envs.actions import ActionReader
from meshinfer.collect.envs.protocol import Observation, StepResult
from meshinfer.collect.envs.spaces import observation_leaves, observation_reader, spec_of

__all__ = ["VectorEnvironment", "vector_environment"]

_Array = np.ndarray[Any, Any]
# Before 1.0, and since.
_FINAL_KEYS = ("final_observation", "final_obs")


def vector_environment(env: Any) -> VectorEnvironment:
    """The adapter for the environment's autoreset mode.

    Raises:
        TypeError: a space without fixed shape, or without a dtype of torch.
        ValueError: the environment does not say how it resets its rows, or says it in an unknown word.
    """
    mode = _autoreset_mode(env)
    if mode not in _BY_MODE:
        raise ValueError(
            f"metadata['autoreset_mode']: expected one of {', '.join(_BY_MODE)} of"
            f" gymnasium.vector.AutoresetMode, found {mode!r}; set it to what {env} does"
        )
    return _BY_MODE[mode](env)


class VectorEnvironment:
    """A ``gymnasium.vector.VectorEnv``; each row's episodes follow each other. ``info`` is dropped."""

    is_batched = True

    def __init__(self, env: Any) -> None:
        self.num_envs = int(env.num_envs)
        leaves = observation_leaves(env.single_observation_space)
        actions = ActionReader(env.single_action_space, self.num_envs)
        self._env, self._leaves = env, leaves
        self._observe, self._read_action = observation_reader(leaves), actions.read
        self.observation_spec: TensorDict = spec_of(leaves, self.num_envs)
        self.action_spec = actions.spec

    def reset(self, seed: int | None = None) -> Observation:
        """Begin an episode in every row; without ``seed`` the rows' generators go on."""
        observation, _ = self._env.reset(seed=seed)
        return self._observe(observation)

    def step(self, action: TensorDictBase | Observation) -> StepResult:
        """One step of every row."""
        observation, reward, terminated, truncated, infos = self._env.step(
            self._read_action(action)
        )
        reward, terminated, truncated = (
            np.asarray(reward),
            np.asarray(terminated, bool),
            np.asarray(truncated, bool),
        )
        for name, array in (
            ("reward", reward),
            ("terminated", terminated),
            ("truncated", truncated),
        ):
            if array.shape != (self.num_envs,):
                raise ValueError(f"{name}: expected [{self.num_envs}], found {list(array.shape)}")
        result = StepResult(self._observe(observation), reward, terminated, truncated, {})
        return self._finish(result, terminated | truncated, infos)

    def close(self) -> None:
        """Close the environment."""
        self._env.close()

    def _finish(self, result: StepResult, ended: _Array, infos: dict[str, Any]) -> StepResult:
        """The result with the real last observations and the ones to go on with, where rows have ended."""
        raise TypeError(f"{type(self).__qualname__} is made by vector_environment")


class _NextStep(VectorEnvironment):
    """A row that has ended is reset by the next step, which ignores its action."""

    _stepped: _Array | None = None

    def reset(self, seed: int | None = None) -> Observation:
        self._stepped = None
        return super().reset(seed)

    def _finish(self, result: StepResult, ended: _Array, infos: dict[str, Any]) -> StepResult:
        stepped, self._stepped = self._stepped, ~ended if ended.any() else None
        return result._replace(observation=result.next, stepped=stepped)


class _SameStep(VectorEnvironment):
    """A row that has ended is reset within the step; its last observation is among the infos."""

    def _finish(self, result: StepResult, ended: _Array, infos: dict[str, Any]) -> StepResult:
        after = result.next
        if not ended.any():
            return result._replace(observation=after)
        rows = {int(row): self._final(infos, int(row)) for row in np.flatnonzero(ended)}
        following = {key: np.array(array) for key, array in after.items()}
        for row, final in rows.items():
            for key, leaf in final.items():
                following[key][row] = _row_of(leaf, key, following[key])
        return result._replace(next=following, observation=after)

    def _final(self, infos: dict[str, Any], row: int) -> Observation:
        final = next((infos[key] for key in _FINAL_KEYS if key in infos), None)
        if isinstance(final, np.ndarray) and final.dtype == object:
            final = final[row]
            if final is not None:
                return self._observe(final)
        elif final is not None:
            return {key: array[row] for key, array in self._observe(final).items()}
        raise ValueError(
            f"row {row} ended its episode and was reset at once, but infos hold no last observation of it under"
            f" {' or '.join(map(repr, _FINAL_KEYS))}; found {sorted(infos)}"
        )


class _Disabled(VectorEnvironment):
    """A row that has ended waits to be reset by a mask."""

    def _finish(self, result: StepResult, ended: _Array, infos: dict[str, Any]) -> StepResult:
        if not ended.any():
            return result._replace(observation=result.next)
        # The reset may write into the very memory that it gave us.
        following = {key: np.array(array) for key, array in result.next.items()}
        observation, _ = self._env.reset(options={"reset_mask": ended.copy()})
        after = {}
        for key, first in self._observe(observation).items():
            after[key] = following[key].copy()
            after[key][ended] = first[ended]
        return result._replace(next=following, observation=after)


_BY_MODE = {"NextStep": _NextStep, "SameStep": _SameStep, "Disabled": _Disabled}


def _autoreset_mode(env: Any) -> Any:
    mode = (env.metadata or {}).get("autoreset_mode")
    if mode is not None:
        return getattr(mode, "value", mode)
    import gymnasium

    # What had no name before 1.1 was the same for all environments of a version.
    major, minor = gymnasium.__version__.split(".")[:2]
    if major == "0":
        return "SameStep"
    return "NextStep" if (major, minor) == ("1", "0") else None


def _row_of(leaf: Any, key: Any, batch: _Array) -> _Array:
    """The leaf of one row, whose shape and dtype must be those of the batch."""
    array = np.asarray(leaf)
    number = isinstance(leaf, (bool, int, float)) and np.can_cast(
        type(leaf), batch.dtype, "same_kind"
    )
    if array.shape != batch.shape[1:] or not (number or array.dtype == batch.dtype):
        expected, found = (
            f"{x.dtype}{list(shape)}"
            for x, shape in ((batch, batch.shape[1:]), (array, array.shape))
        )
        raise (ValueError if array.dtype == batch.dtype else TypeError)(
            f"last observation of an episode {key!r}: expected {expected}, found {found}"
        )
    return array
