"""New values for the parameters and buffers of a served module."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

__all__ = ["copy_weights", "named_weights"]

_NAMES_SHOWN = 5
_COMPILED = "_orig_mod."
"""What ``torch.compile`` puts into the names of a module's weights."""


def copy_weights(model: object, weights: object) -> None:
    """Copy ``weights`` into the parameters and buffers of ``model``, in place; nothing is copied unless all fit.

    Args:
        model: an ``nn.Module``, compiled or not.
        weights: another module, a state dict, or a TensorDict of parameters (nested as ``TensorDict.from_module``
            makes it). Values are cast; buffers that no state dict has may be left out.

    Raises:
        TypeError: ``model`` has no weights, or ``weights`` is none of these.
        ValueError: a name is missing or unknown, or a shape differs.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"the served model is a {type(model).__name__}, not an nn.Module, so it has no named weights; "
            "use update_model()"
        )
    targets, sources = _weights_of(model), named_weights(weights)
    kept = {_plain(name) for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    _check_names("has no value for", kept - sources.keys())
    _check_names("has unknown", sources.keys() - targets.keys())
    for name, source in sources.items():
        if source.shape != targets[name].shape:
            expected, found = list(targets[name].shape), list(source.shape)
            raise ValueError(f"weights {name!r}: expected shape {expected}, found {found}")
    with torch.no_grad():
        for name, source in sources.items():
            targets[name].copy_(source)


def named_weights(weights: object) -> dict[str, Tensor]:
    """Each parameter and buffer by name, in the storage that it has; errors as in :func:`copy_weights`."""
    if isinstance(weights, TensorDictBase):  # first: TensorDictParams is a module as well
        found: Mapping[Any, Any] = dict(weights.flatten_keys(".").items())
    elif isinstance(weights, nn.Module):
        return _weights_of(weights)
    elif isinstance(weights, Mapping):
        found = weights
    else:
        raise TypeError(
            f"weights: expected an nn.Module, a state dict or a TensorDict, found {type(weights).__name__}"
        )
    for name, value in found.items():
        if not isinstance(value, Tensor):
            raise TypeError(
                f"weights {name!r}: expected a tensor, found {type(value).__name__}; use update_model() for it"
            )
    return {_plain(name): value for name, value in found.items()}


def _weights_of(model: nn.Module) -> dict[str, Tensor]:
    named = chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    return {_plain(name): value for name, value in named}


def _plain(name: str) -> str:
    return name.replace(_COMPILED, "")


def _check_names(problem: str, names: set[str]) -> None:
    if names:
        shown = sorted(map(repr, names))
        more = f" and {len(shown) - _NAMES_SHOWN} more" if len(shown) > _NAMES_SHOWN else ""
        raise ValueError(f"weights: {problem} {', '.join(shown[:_NAMES_SHOWN])}{more}")
