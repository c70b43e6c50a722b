"""Functions on their way to where a server lives."""

from __future__ import annotations

import reprlib
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

__all__ = ["Pickler", "pickled_function"]

Pickler: TypeAlias = Callable[[Any], bytes]


def pickled_function(name: str, function: Any, place: str, dumps: Pickler) -> bytes:
    """``function`` for another process.

    Args:
        name: of the argument.
        function: what was given for it.
        place: where it goes, for the error.
        dumps: pickles as that place does.

    Raises:
        TypeError: it is no function, or cannot go there.
    """
    if not callable(function) or isinstance(function, torch.nn.Module):
        what = "the policy" if name == "policy_factory" else "a batch"
        raise TypeError(
            f"{name}: expected a function that returns {what}, found {type(function).__name__}; it"
            f" is called in {place}"
        )
    try:
        return dumps(function)
    except Exception as error:  # a class may raise anything while it is pickled
        raise TypeError(
            f"{name}={reprlib.repr(function)} cannot be sent to {place} ({error}); give a"
            " function at the top level of a module, or functools.partial of one"
        ) from error
