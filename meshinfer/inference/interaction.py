"""The exploration mode that travels with each request: TensorDict's interaction type, as a small integer."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager
from typing import Any

from tensordict.nn.probabilistic import (
    InteractionType,
    interaction_type,
    set_interaction_type,
)

__all__ = [
    "UNSET",
    "computing_under",
    "current_interaction",
    "decode_interaction",
    "encode_interaction",
]

UNSET = 0
"""The client asked for nothing: the server's own mode applies."""

# Numbered by hand: the order of TensorDict's enumeration is not part of its interface, these numbers are of our wire.
_CODES = {"MODE": 1, "MEDIAN": 2, "MEAN": 3, "RANDOM": 4, "DETERMINISTIC": 5}
_TYPES = {code: getattr(InteractionType, name) for name, code in _CODES.items()}

_ALONE: dict[str, Any] = (
    {"thread_local": True}
    if "thread_local" in inspect.signature(set_interaction_type).parameters
    else {}
)
"""Before 0.15 tensordict has one mode for all threads of a process, and what one sets another may put back."""


def computing_under(kind: InteractionType) -> AbstractContextManager[Any]:
    """Set the interaction type, in this thread alone: clients in other threads read theirs meanwhile."""
    return set_interaction_type(kind, **_ALONE)


def current_interaction() -> int:
    """Code of the interaction type that is set in this thread, :data:`UNSET` without one."""
    return encode_interaction(interaction_type())


def encode_interaction(kind: InteractionType | None) -> int:
    """Code of an interaction type."""
    return UNSET if kind is None else _CODES[kind.name]


def decode_interaction(code: int) -> InteractionType | None:
    """The interaction type behind a code of :func:`current_interaction`."""
    return _TYPES.get(code)
