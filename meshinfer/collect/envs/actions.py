"""Actions of a policy as Gymnasium's spaces want them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from meshinfer.collect.envs.protocol import Observation
from meshinfer.collect.envs.spaces import leaves_of, spec_of
from meshinfer.specs import short_key

__all__ = ["ActionReader", "checked_action"]

_Key = tuple[str, ...]
_Reply = TensorDictBase | Observation
_Read = Callable[[_Reply], Any]
_INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_INDICES = _INTEGERS | {np.dtype(word) for word in ("u1", "i1", "i2", "i4", "i8")}
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class ActionReader:
    """Reads the action of a space from a policy's reply, under ``"action"``.

    A discrete action is an index from 0: the space's ``start`` is added. Integers may have any width and so may
    floats; a ``MultiBinary`` takes bools too. Bounds of a ``Box`` are the environment's own matter.

    Args:
        space: of a single environment.
        num_envs: rows of a vector environment; ``None`` for a single one.
    """

    def __init__(self, space: Any, num_envs: int | None = None) -> None:
        self.spec: TensorDict = spec_of(list(leaves_of(space, ("action",), "action")), num_envs)
        self._batch = () if num_envs is None else (num_envs,)
        self.read: _Read = self._reader(space, ("action",))

    def _reader(self, space: Any, key: _Key) -> _Read:
        from gymnasium import spaces

        if isinstance(space, spaces.Dict):
            below = {name: self._reader(x, (*key, name)) for name, x in space.spaces.items()}
            return lambda reply: {name: read(reply) for name, read in below.items()}
        if isinstance(space, spaces.Tuple):
            parts = [self._reader(x, (*key, str(i))) for i, x in enumerate(space.spaces)]
            return lambda reply: tuple(read(reply) for read in parts)
        if isinstance(space, spaces.Discrete):
            counts, start = int(space.n), int(space.start)
            if not self._batch:
                return _Index(key, counts, start).read
            return _Array(key, space, self._batch, counts, start).read
        if isinstance(space, spaces.MultiDiscrete):
            return _Array(key, space, self._batch, space.nvec, getattr(space, "start", 0)).read
        return _Array(key, space, self._batch).read


class _Index:
    """One number, for a ``Discrete`` space: an int."""

    def __init__(self, key: _Key, count: int, start: int) -> None:
        self._key, self._count, self._start = short_key(key), count, start

    def read(self, reply: _Reply) -> int:
        try:
            index = reply[self._key]
            fits = index.dtype in _INDICES and index.shape == ()
        except (KeyError, AttributeError):
            fits = False
        if not fits:
            index = checked_action(reply, self._key, (), torch.int64)
        index = int(index.item())
        if not 0 <= index < self._count:
            raise _out_of_range(self._key, index, self._count, self._start)
        return index + self._start


class _Array:
    """An array in the dtype of its space; of its own, as environments are known to change their actions in place."""

    def __init__(
        self, key: _Key, space: Any, batch: tuple[int, ...], counts: Any = None, start: Any = 0
    ) -> None:
        self._key = short_key(key)
        self._shape = torch.Size(batch + space.shape)
        self._counts, self._start = counts, start
        self._wanted = torch.from_numpy(np.zeros((), space.dtype)).dtype

    def read(self, reply: _Reply) -> np.ndarray[Any, Any]:
        action = checked_action(reply, self._key, self._shape, self._wanted).numpy(force=True)
        array: np.ndarray[Any, Any] = np.array(action)
        if self._counts is None:
            return array
        if ((array < 0) | (array >= self._counts)).any():
            raise _out_of_range(self._key, array, self._counts, self._start)
        array += self._start
        return array


def checked_action(
    reply: _Reply, key: str | _Key, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """The tensor under ``key``, of that shape; another width of the same kind is cast to ``dtype``.

    Raises:
        KeyError: there is none.
        TypeError: another kind of dtype, or no tensor.
        ValueError: another shape, or an integer that ``dtype`` cannot hold.
    """
    expected = f"action {key!r}: expected {dtype}{list(shape)}".replace("torch.", "")
    try:
        action: Any = reply[key]
    except KeyError as exc:
        names: Any = reply.keys(True, True) if isinstance(reply, TensorDictBase) else reply.keys()
        present = ", ".join(sorted(map(repr, names))) or "no keys"
        raise KeyError(f"{expected}, found nothing; present: {present}") from exc
    if isinstance(action, np.ndarray):
        action = torch.from_numpy(action)
    if not isinstance(action, Tensor):
        raise TypeError(f"{expected}, found {type(action).__qualname__}")
    found = f"{action.dtype}{list(action.shape)}".replace("torch.", "")
    if action.dtype is not dtype and action.dtype not in _alike(dtype):
        raise TypeError(f"{expected}, found {found}")
    if action.shape != shape:
        raise ValueError(f"{expected}, found {found}")
    cast = action.to(dtype)
    if cast is not action and dtype in _INTEGERS and not torch.equal(cast.to(action.dtype), action):
        raise ValueError(f"{expected}, found {action.tolist()}, which it cannot hold")
    return cast


def _alike(wanted: torch.dtype) -> frozenset[torch.dtype]:
    """The dtypes that stand for the same kind of action as ``wanted``."""
    for kind in (_INTEGERS, _FLOATS):
        if wanted in kind:
            return kind | {torch.bool} if wanted is torch.int8 else kind
    return frozenset({wanted})


def _out_of_range(key: Any, found: Any, counts: Any, start: Any) -> ValueError:
    added = f" (the space's start, {start}, is added to it)" if np.any(start) else ""
    expected = f"an index from 0 to below {counts}{added}"
    return ValueError(f"action {key!r}: expected {expected}, found {found}")
