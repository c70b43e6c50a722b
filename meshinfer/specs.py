"""Reading a spec: what may stand for an example payload, and the tensors in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from tensordict import is_non_tensor, is_tensor_collection
from torch import Tensor

__all__ = ["check_keys", "example_of", "short_key", "walk"]

_Key = tuple[str, ...]


def example_of(spec: object, name: str) -> Any:
    """The TensorDict, tensorclass or mapping that ``spec`` is or makes; :class:`TypeError` otherwise."""
    if not isinstance(spec, type):
        if is_tensor_collection(spec) or isinstance(spec, Mapping):
            return spec
        zero = getattr(spec, "zero", None)
        example = zero() if callable(zero) else None
        if example is not None and is_tensor_collection(example):
            return example
    found = spec.__qualname__ if isinstance(spec, type) else type(spec).__qualname__
    expected = "a TensorDict, a tensorclass, a mapping of keys to tensors or a TorchRL Composite"
    raise TypeError(f"{name} spec: expected {expected}, found {found}")


def walk(node: Any, prefix: _Key, name: str) -> Iterator[tuple[_Key, Tensor]]:
    """Every tensor below ``node`` with its full key; :class:`TypeError` for any other leaf."""
    for part, value in node.items():
        key = prefix + (part if isinstance(part, tuple) else (part,))
        if part == () or not all(isinstance(word, str) for word in key):
            raise TypeError(f"{name} spec: expected keys of str or tuples of it, found {part!r}")
        collection = is_tensor_collection(value) and not is_non_tensor(value)
        if isinstance(value, Tensor):
            yield key, value
        elif collection or isinstance(value, Mapping):
            yield from walk(value, key, name)
        else:
            found = type(value).__qualname__
            raise TypeError(f"{name} {short_key(key)!r}: expected an example tensor, found {found}")


def check_keys(keys: Sequence[_Key], name: str) -> None:
    """:class:`ValueError` without any key, or where a tensor stands where others are nested."""
    if not keys:
        raise ValueError(f"{name} spec: expected at least one tensor, found none")
    for key, after in pairwise(keys):
        if after[: len(key)] == key:
            clash = f"{short_key(after)!r} beside the tensor {short_key(key)!r}"
            raise ValueError(f"{name} spec: expected one tensor or level per key, found {clash}")


def short_key(key: _Key) -> str | _Key:
    """A key of one word as that word, as TensorDict writes it."""
    return key[0] if len(key) == 1 else key
