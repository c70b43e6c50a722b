"""Keys of TensorDicts, as tuples."""

from __future__ import annotations

from typing import Any

from tensordict import TensorDictBase
from tensordict.utils import unravel_key
from torch import Tensor

from meshinfer.layout import PayloadLayout

__all__ = ["as_tuple", "keys_of", "leaves_by_key", "next_key"]

_Key = tuple[str, ...]


def keys_of(layout: PayloadLayout) -> list[_Key]:
    """Keys of the leaves, in the layout's order."""
    return [leaf.key for leaf in layout.leaves]


def next_key(key: _Key) -> _Key:
    """Where a transition has what ``key`` became."""
    return "next", *key


def as_tuple(key: Any) -> _Key:
    """A key as a tuple of words."""
    found = unravel_key(key)  # type: ignore[no-untyped-call]
    return (found,) if isinstance(found, str) else tuple(found)


def leaves_by_key(source: TensorDictBase) -> dict[_Key, Tensor]:
    """Every leaf with its full key."""
    return {as_tuple(key): value for key, value in source.items(True, True)}  # type: ignore[misc]
