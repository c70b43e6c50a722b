"""Observations on their way into the collector's memory, each leaf checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

__all__ = ["ObservationRows"]

_Leaf = tuple[Any, "np.dtype[Any]", tuple[int, ...], "np.ndarray[Any, Any]"]


class ObservationRows:
    """Memory for observations, one row for each of several steps.

    Args:
        spec: the ``observation_spec`` of the environment.
        rows: memory for the spec's keys, ``[T, *shape]`` each: a TensorDict on the CPU, or arrays of NumPy by key.

    Raises:
        ValueError: a leaf of ``rows`` is missing or has another shape or dtype.
        TypeError: a leaf has a dtype that NumPy lacks.
    """

    def __init__(self, spec: TensorDict, rows: TensorDictBase | Mapping[Any, Any]) -> None:
        leaves: Any = spec.items(True, True)
        self._plan = [_leaf(key, leaf, rows) for key, leaf in leaves]

    def write(self, row: int, observation: Mapping[Any, Any]) -> None:
        """Copy an observation into row number ``row``.

        Raises:
            ValueError: a key is missing, or a leaf has another shape.
            TypeError: a leaf has another dtype, or is no array; nothing is cast.
        """
        for key, dtype, shape, target in self._plan:
            try:
                leaf = observation[key]
            except (LookupError, TypeError) as exc:
                raise _missing(key, dtype, shape, observation) from exc
            try:
                fits = leaf.dtype == dtype and leaf.shape == shape
            except AttributeError:
                fits = False
            target[row] = leaf if fits else _converted(leaf, key, dtype, shape)


def _leaf(key: Any, leaf: Tensor, rows: TensorDictBase | Mapping[Any, Any]) -> _Leaf:
    expected, target = leaf.numpy(), rows.get(key)
    if isinstance(target, Tensor):
        target = target.numpy()
    label = f"rows {key!r}: expected {expected.dtype}{['T', *expected.shape]}"
    if not isinstance(target, np.ndarray):
        raise ValueError(f"{label}, found {type(target).__qualname__}")
    if target.dtype != expected.dtype or target.shape[1:] != expected.shape:
        raise ValueError(f"{label}, found {_text(target)}")
    return key, expected.dtype, expected.shape, target


def _converted(
    leaf: Any, key: Any, dtype: np.dtype[Any], shape: tuple[int, ...]
) -> np.ndarray[Any, Any]:
    """A leaf that is no array of the right kind at sight: a tensor, or a number of Python's."""
    array: Any = leaf
    if isinstance(leaf, Tensor):
        array = leaf.numpy(force=True)
    elif isinstance(leaf, (bool, int, float)) and np.can_cast(type(leaf), dtype, "same_kind"):
        array = np.asarray(leaf, dtype)
    if not isinstance(array, (np.ndarray, np.generic)):
        found = f"{type(leaf).__qualname__} {leaf!r}"[:80]
        raise TypeError(f"{_expected(key, dtype, shape)}, found {found}")
    if array.dtype != dtype:
        remedy = "declare it in the space, or cast it in a wrapper of the environment"
        raise TypeError(
            f"{_expected(key, dtype, shape)}, found {_text(array)}; nothing is cast: {remedy}"
        )
    if array.shape != shape:
        raise ValueError(f"{_expected(key, dtype, shape)}, found {_text(array)}")
    return np.asarray(array)


def _missing(key: Any, dtype: np.dtype[Any], shape: tuple[int, ...], found: Any) -> ValueError:
    present = (
        sorted(map(repr, found.keys())) if hasattr(found, "keys") else type(found).__qualname__
    )
    return ValueError(f"{_expected(key, dtype, shape)}, found nothing; present: {present}")


def _expected(key: Any, dtype: np.dtype[Any], shape: tuple[int, ...]) -> str:
    return f"observation {key!r}: expected {dtype}{list(shape)} as the space declares"


def _text(array: Any) -> str:
    return f"{array.dtype}{list(array.shape)}"
