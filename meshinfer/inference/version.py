"""Where the version of the weights that computed a reply is written."""

from __future__ import annotations

from collections.abc import Container
from functools import lru_cache
from typing import TypeAlias

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

__all__ = ["Key", "as_key", "declared_stamp", "stamp_version", "stamped"]

Key: TypeAlias = str | tuple[str, ...]


def as_key(key: Key | None) -> tuple[str, ...] | None:
    """A key as a tuple."""
    return (key,) if isinstance(key, str) else None if key is None else tuple(key)


def declared_stamp(
    key: tuple[str, ...] | None, version: int | None, declared: Container[tuple[str, ...]]
) -> tuple[tuple[str, ...], int] | None:
    """The key and the version to write into a reply that has a leaf for it; ``None`` for nothing to write."""
    return None if version is None or key is None or key not in declared else (key, version)


def stamp_version(payload: TensorDictBase, key: tuple[str, ...], version: int) -> TensorDictBase:
    """Set ``key`` to ``version``, an int64 for each row; returns ``payload``."""
    stamp = torch.full(
        payload.batch_size, version, dtype=torch.int64, device=payload.device or "cpu"
    )
    payload.set(key, stamp)
    return payload


def stamped(results: TensorDictBase, key: tuple[str, ...], version: int) -> TensorDictBase:
    """As :func:`stamp_version` on a shallow copy; the stamp is shared by those who ask alike, so copy it on."""
    if len(key) > 1 or type(results) is not TensorDict or results.device is not None:
        return stamp_version(results.copy(), key, version)
    source = dict(results.items())
    source[key[0]] = _stamp(results.batch_size, version)
    made: TensorDict = TensorDict._new_unsafe(source, batch_size=results.batch_size)  # type: ignore[arg-type]
    return made


@lru_cache(maxsize=128)
def _stamp(batch_size: torch.Size, version: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.full(batch_size, version, dtype=torch.int64, device="cpu")
