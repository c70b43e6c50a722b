"""Checks of a collector's arguments: each error names the argument, what was expected and what was found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict.nn import InteractionType

from meshinfer.arguments import as_count
from meshinfer.server.config import InferenceDeviceConfig

__all__ = ["as_backend", "as_devices", "as_factories", "as_interaction"]

_BACKENDS = ("threading", "multiprocessing")


def as_backend(name: str, value: object) -> str:
    """``value`` as one of the two backends."""
    if not isinstance(value, str) or value not in _BACKENDS:
        raise ValueError(f"{name}={value!r}: expected one of {', '.join(map(repr, _BACKENDS))}")
    return value


def as_factories(given: Any, num_envs: int | None) -> list[Callable[[], Any]]:
    """One function for each environment, of a list of them, or of one and how often to call it."""
    if callable(given):
        return [given] * as_count("num_envs", 1 if num_envs is None else num_envs)
    if isinstance(given, str) or not isinstance(given, Sequence):
        raise TypeError(
            f"create_env_fn: expected functions that make environments, found {type(given).__name__}"
        )
    if not given:
        raise ValueError("create_env_fn is empty; give at least one function")
    if num_envs is not None and num_envs != len(given):
        raise ValueError(f"num_envs={num_envs} beside {len(given)} functions; leave it out")
    for index, factory in enumerate(given):
        if not callable(factory):
            raise TypeError(
                f"create_env_fn[{index}]: expected a function that makes an environment, found "
                f"{type(factory).__name__}"
            )
    return list(given)


def as_interaction(
    interaction: InteractionType | None, exploration: InteractionType | None
) -> InteractionType | None:
    """The one of the two that was given."""
    if interaction is not None and exploration is not None:
        raise ValueError(
            "interaction_type and exploration_type are two names of one thing; give one"
        )
    found = exploration if interaction is None else interaction
    if found is not None and not isinstance(found, InteractionType):
        raise TypeError(
            f"interaction_type: expected an InteractionType, found {type(found).__name__}"
        )
    return found


def as_devices(
    config: InferenceDeviceConfig | None,
) -> tuple[InferenceDeviceConfig, torch.device | None]:
    """What the server is told, and where batches go."""
    if config is None:
        return InferenceDeviceConfig(), None
    if not isinstance(config, InferenceDeviceConfig):
        raise TypeError(
            f"device_config: expected InferenceDeviceConfig, found {type(config).__name__}"
        )
    for name in ("env_device", "output_device"):
        device = getattr(config, name)
        if device is not None and device.type != "cpu":
            raise ValueError(
                f"device_config: {name}={str(device)!r}: environments step on the CPU; leave it out, and give "
                "storing_device for the batches"
            )
    return InferenceDeviceConfig(policy_device=config.policy_device), config.storing_device  # type: ignore[return-value]
