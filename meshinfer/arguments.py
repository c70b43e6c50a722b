"""Checks of arguments that several rooms take: each error names the argument, what was expected and what was found."""

from __future__ import annotations

import inspect
import math
import multiprocessing
from collections.abc import Callable
from multiprocessing.context import BaseContext
from typing import Any

import torch

__all__ = ["as_context", "as_count", "as_device", "as_seconds", "keyword_names"]


def as_seconds(name: str, value: object, *, zero: bool = False) -> float:
    """``value`` as a finite number of seconds, above zero, or with ``zero`` from zero on.

    Raises:
        TypeError: no number.
        ValueError: out of range.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}={value!r}: expected a number of seconds")
    if not (value >= 0 if zero else value > 0) or value == math.inf:
        least = "at least 0" if zero else "above 0"
        raise ValueError(f"{name}={value!r}: expected a finite number of seconds, {least}")
    return float(value)


def as_count(name: str, value: object, *, least: int = 1, most: int | None = None) -> int:
    """``value`` as an int of at least ``least``, and at most ``most``; errors as :func:`as_seconds`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r}: expected an int")
    if value < least or (most is not None and value > most):
        upto = "" if most is None else f" and at most {most}"
        raise ValueError(f"{name}={value}: expected at least {least}{upto}")
    return value


def as_device(name: str, value: object) -> torch.device | None:
    """``value`` as a device; a string or an ordinal names one, ``None`` stays.

    Raises:
        TypeError: none of these.
        ValueError: there is no such device type, or no accelerator that an ordinal could mean.
    """
    if value is None or isinstance(value, torch.device):
        return value
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise TypeError(f"{name}={value!r}: expected a device, such as 'cpu' or 'cuda:0'")
    try:
        return torch.device(value)
    except RuntimeError as error:
        raise ValueError(
            f"{name}={value!r}: expected a device, such as 'cpu' or 'cuda:0': {error}"
        ) from error


def as_context(name: str, value: object) -> BaseContext:
    """``value`` as a context of :mod:`multiprocessing`; a start method names one, ``None`` is ``"spawn"``.

    Raises:
        TypeError: none of these.
        ValueError: there is no such start method here.
    """
    if isinstance(value, BaseContext):
        return value
    methods = multiprocessing.get_all_start_methods()
    expected = f"expected a multiprocessing context or one of {', '.join(map(repr, methods))}"
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name}: {expected}, found {type(value).__name__}")
    if value is not None and value not in methods:
        raise ValueError(f"{name}={value!r}: {expected}")
    context: BaseContext = multiprocessing.get_context(value or "spawn")
    return context


def keyword_names(function: Callable[..., Any]) -> set[str] | None:
    """Names that ``function`` takes by keyword; ``None`` when it takes any."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
