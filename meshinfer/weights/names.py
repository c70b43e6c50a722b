"""The weights of a model by name, wherever they come from."""

from __future__ import annotations

from collections.abc import Mapping, Set
from itertools import chain
from typing import Any

from tensordict import TensorDictBase
from torch import Tensor, nn

__all__ = ["check_names", "named_weights", "plain_name"]

_NAMES_SHOWN = 5
_COMPILED = "_orig_mod."
"""What ``torch.compile`` puts into the names of a module's weights."""


def named_weights(weights: object) -> dict[str, Tensor]:
    """Each parameter and buffer by its dotted name, in the storage that it has; shared ones under each name.

    Args:
        weights: an ``nn.Module``, compiled or not, a state dict, or a TensorDict of parameters (nested as
            ``TensorDict.from_module`` makes it).

    Raises:
        TypeError: ``weights`` is none of these, or has an entry that is no tensor.
    """
    if isinstance(weights, TensorDictBase):  # first: TensorDictParams is a module as well
        found: Mapping[Any, Any] = dict(weights.flatten_keys(".").items())
    elif isinstance(weights, nn.Module):
        found = dict(
            chain(
                weights.named_parameters(remove_duplicate=False),
                weights.named_buffers(remove_duplicate=False),
            )
        )
    elif isinstance(weights, Mapping):
        found = weights
    else:
        raise TypeError(
            f"weights: expected an nn.Module, a state dict or a TensorDict, found {type(weights).__name__}"
        )
    for name, value in found.items():
        if not isinstance(name, str):
            raise TypeError(f"weights: expected names of str, found {name!r}")
        if not isinstance(value, Tensor):
            raise TypeError(
                f"weights {name!r}: expected a tensor, found {type(value).__name__}; use update_model() for it"
            )
    return {plain_name(name): value for name, value in found.items()}


def plain_name(name: str) -> str:
    """``name`` without what ``torch.compile`` has put into it."""
    return name.replace(_COMPILED, "")


def check_names(problem: str, names: Set[str]) -> None:
    """:class:`ValueError` that lists the first of ``names``, if there are any."""
    if names:
        shown = sorted(map(repr, names))
        more = f" and {len(shown) - _NAMES_SHOWN} more" if len(shown) > _NAMES_SHOWN else ""
        raise ValueError(f"weights: {problem} {', '.join(shown[:_NAMES_SHOWN])}{more}")
