"""Where the version of the weights that computed a reply is written."""

from __future__ import annotations

from typing import TypeAlias

import torch
from tensordict import TensorDictBase

__all__ = ["Key", "as_key", "stamp_version"]

Key: TypeAlias = str | tuple[str, ...]


def as_key(key: Key | None) -> tuple[str, ...] | None:
    """A key as a tuple."""
    return (key,) if isinstance(key, str) else None if key is None else tuple(key)


def stamp_version(payload: TensorDictBase, key: tuple[str, ...], version: int) -> TensorDictBase:
    """Set ``key`` to ``version``, an int64 for each row; returns ``payload``."""
    stamp = torch.full(
        payload.batch_size, version, dtype=torch.int64, device=payload.device or "cpu"
    )
    payload.set(key, stamp)
    return payload
