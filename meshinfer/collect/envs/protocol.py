"""What an environment must offer to be collected from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from tensordict import TensorDict, TensorDictBase

__all__ = ["Environment", "Observation", "StepResult"]

Observation: TypeAlias = Mapping[Any, Any]
"""An array for each key of the ``observation_spec``, in its shape and dtype.

The keys are those that ``observation_spec.keys(True, True)`` gives: a word, or a tuple of words where they are
nested. The arrays are NumPy's, or CPU tensors; a TensorDict serves too.
"""


class StepResult(NamedTuple):
    """What one step gave. With ``B`` rows (``is_batched``), each number is an array ``[B]`` of NumPy.

    Attributes:
        next: the observation after the action: where an episode ended, its real last one.
        reward: float; ``float[B]``.
        terminated: the task's own end of the episode; bool, ``bool[B]``.
        truncated: an end from outside, such as a time limit; bool, ``bool[B]``.
        observation: what to act on next: the first one of a new episode where one has ended and was reset at once,
            and ``next`` elsewhere. It is the same object as ``next`` where nothing differs.
        stepped: ``bool[B]``, or ``None`` for all: a row that is False ignored its action, because it was reset by
            this step, and made no transition. Its ``observation`` begins an episode; nothing else of it counts.
    """

    next: Observation
    reward: Any
    terminated: Any
    truncated: Any
    observation: Observation
    stepped: Any = None


@runtime_checkable
class Environment(Protocol):
    """One environment, or ``num_envs`` in a row that are stepped together; episodes follow each other by themselves.

    One thread at a time calls it. Observations belong to the environment: they are valid until its next ``reset`` or
    ``step``, and the caller changes nothing in them. An exception of any method ends the episode and this object.

    Attributes:
        num_envs: how many rows it steps at once; 1 unless ``is_batched``.
        is_batched: whether every leaf has a leading dimension of ``num_envs``.
        observation_spec: zeros of the shapes and dtypes, of batch size ``[]``, or ``[num_envs]`` if batched.
        action_spec: likewise what ``step`` reads from the policy's reply, zeros being a valid action wherever the
            environment's bounds include it.
    """

    num_envs: int
    is_batched: bool
    observation_spec: TensorDict
    action_spec: TensorDict

    def reset(self, seed: int | None = None) -> Observation:
        """Begin an episode in every row; ``seed`` gives each row a generator of its own, ``None`` lets it go on."""
        ...

    def step(self, action: TensorDictBase | Mapping[Any, Any]) -> StepResult:
        """Take the keys of ``action_spec`` from ``action``, whatever else is in it, and do one step with a copy.

        ``action`` is the policy's reply, a TensorDict, or arrays of NumPy by key.

        Raises:
            KeyError: ``action`` lacks a key.
            TypeError: a dtype that the environment's action is not made of.
            ValueError: another shape, or a discrete action out of range.
        """
        ...

    def close(self) -> None:
        """Release what the environment holds; a second call does nothing."""
        ...
