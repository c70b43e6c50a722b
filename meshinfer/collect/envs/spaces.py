"""Gymnasium's spaces as specs: which leaves they have, under which keys, of what shapes and dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict

from meshinfer.collect.envs.protocol import Observation
from meshinfer.specs import short_key

__all__ = ["SpaceLeaf", "leaves_of", "observation_leaves", "observation_reader", "spec_of"]

_RESERVED = frozenset({"action", "next", "reward", "done", "terminated", "truncated"})
_Path = tuple[Any, ...]


class SpaceLeaf(NamedTuple):
    """One tensor of a space: its key in a TensorDict, and the way to it through dicts and tuples."""

    key: tuple[str, ...]
    path: _Path
    space: Any


def observation_leaves(space: Any) -> list[SpaceLeaf]:
    """The leaves of a single observation space; those of a ``Dict`` have their keys at the root.

    Raises:
        TypeError: a space without fixed shape, or one that is not known.
        ValueError: a key of the ``Dict`` that a transition has already.
    """
    from gymnasium import spaces

    is_dict = isinstance(space, spaces.Dict)
    leaves = list(leaves_of(space, () if is_dict else ("observation",), "observation"))
    if taken := sorted({leaf.key[0] for leaf in leaves} & _RESERVED):
        remedy = "rename them in a wrapper of the environment"
        raise ValueError(f"observation space: {taken} are keys of the transition itself; {remedy}")
    if not leaves:
        raise ValueError(f"observation space: expected at least one leaf, found {space}")
    return leaves


def leaves_of(space: Any, key: tuple[str, ...], what: str, path: _Path = ()) -> Iterator[SpaceLeaf]:
    """Every leaf below ``space``, in its own order."""
    from gymnasium import spaces

    if isinstance(space, (spaces.Dict, spaces.Tuple)):
        parts = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
        for part, below in parts:
            word = str(part) if isinstance(space, spaces.Tuple) else part
            if not isinstance(word, str):
                raise TypeError(f"{what} space: expected keys of str, found {part!r} in {space}")
            yield from leaves_of(below, (*key, word), what, (*path, part))
    elif isinstance(space, (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)):
        yield SpaceLeaf(key, path, space)
    else:
        raise TypeError(_unsupported(space, key, what))


def spec_of(leaves: list[SpaceLeaf], num_envs: int | None) -> TensorDict:
    """Zeros for the leaves, with a leading dimension of ``num_envs`` unless it is ``None``."""
    batch = () if num_envs is None else (num_envs,)
    spec = TensorDict({}, batch)
    for leaf in leaves:
        try:
            zeros = torch.from_numpy(np.zeros(batch + leaf.space.shape, leaf.space.dtype))
        except TypeError as exc:
            found = f"{leaf.space.dtype} of {leaf.space}"
            raise TypeError(
                f"space {short_key(leaf.key)!r}: torch has no dtype for {found}"
            ) from exc
        spec[leaf.key] = zeros
    return spec


def observation_reader(leaves: list[SpaceLeaf]) -> Callable[[Any], Observation]:
    """A function from what the environment returns to arrays by key; the arrays are not checked."""
    if len(leaves) == 1 and not leaves[0].path:
        key = short_key(leaves[0].key)
        return lambda observation: {key: observation}
    plan = [(short_key(leaf.key), leaf.path) for leaf in leaves]
    return lambda observation: {key: _at(observation, path, key) for key, path in plan}


def _at(observation: Any, path: _Path, key: Any) -> Any:
    try:
        for part in path:
            observation = observation[part]
    except (LookupError, TypeError) as exc:
        keys = (
            sorted(map(repr, observation)) if isinstance(observation, dict) else type(observation)
        )
        raise ValueError(f"observation {key!r}: the space declares it, found {keys}") from exc
    return observation


def _unsupported(space: Any, key: tuple[str, ...], what: str) -> str:
    label = f"{what} space {short_key(key)!r}" if key else f"{what} space"
    expected = "Box, Discrete, MultiDiscrete, MultiBinary, or a Dict or Tuple of them"
    remedy = "give it a fixed shape with gymnasium.wrappers.TransformObservation or TransformAction"
    return f"{label}: expected {expected}, found {type(space).__qualname__}; {remedy}"
