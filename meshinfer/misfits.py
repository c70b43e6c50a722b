"""What is said of payloads and layouts that do not fit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

__all__ = ["leaf_difference", "misfit", "text", "word"]


def misfit(
    label: str,
    payload: TensorDictBase,
    leaf: object,
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device | None,
) -> Exception:
    """What to raise for ``leaf`` of ``payload``, which is not of this shape, dtype and device.

    Args:
        label: whose leaf, and what was expected of it, up to ``found``.
        payload: where it was looked for.
        leaf: ``None`` for none.
        shape, dtype, device: as declared; ``None`` where the device is free.
    """
    if leaf is None:
        missing = f"{label} nothing; present: {_present(payload)}"
        return KeyError(missing) if device is None else ValueError(missing)
    if not isinstance(leaf, Tensor):
        return TypeError(f"{label} {type(leaf).__qualname__}; only tensors travel")
    if leaf.layout is not torch.strided:
        return TypeError(f"{label} a tensor of {leaf.layout}; make it dense first")
    if leaf.dtype != dtype:
        return TypeError(f"{label} {text(leaf)}; nothing is cast, call .to({dtype}) first")
    if leaf.shape != shape:
        return ValueError(f"{label} {text(leaf)}")
    remedy = ".cpu()" if device == torch.device("cpu") else f".to({str(device)!r})"
    return TypeError(f"{label} it on {leaf.device}, not on {device}; call {remedy} first")


def leaf_difference(key: str, here: Mapping[str, Any], there: Mapping[str, Any]) -> str:
    """How one leaf of two layouts differs."""
    if key not in there or key not in here:
        return f"key {key} only {'there' if key in there else 'here'}"
    mine, other = ("".join(map(str, side[key])) for side in (here, there))
    return f"key {key}: {mine} here, {other} there"


def _present(payload: TensorDictBase) -> str:
    return ", ".join(sorted(map(repr, payload.keys(True, True)))) or "no keys"


def word(dtype: torch.dtype) -> str:
    """As in ``float32``."""
    return str(dtype).removeprefix("torch.")


def text(tensor: Tensor) -> str:
    """As in ``float32[3, 4]``."""
    return f"{word(tensor.dtype)}{list(tensor.shape)}"
