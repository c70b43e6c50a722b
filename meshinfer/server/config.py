"""How a server batches and where it computes, checked at construction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch

from meshinfer.arguments import as_count, as_device, as_seconds

__all__ = ["InferenceDeviceConfig", "InferenceServerConfig", "merged_config", "merged_devices"]

_MAX_BATCH_SIZE = 64
_Config = TypeVar("_Config")


@dataclass(frozen=True)
class InferenceServerConfig:
    """When a batch is made and what is recorded.

    Args:
        max_batch_size: requests in one forward pass, at most; by default ``static_batch_size``, and 64 without one.
        min_batch_size: requests to wait for, as long as ``timeout`` allows.
        timeout: seconds that the oldest waiting request may wait for ``min_batch_size`` to be reached.
        stats_window: how many of the latest requests and batches percentiles are computed over.
        inline: whether the thread that received a request may serve it, when nobody is serving: saves a hand-over
            between threads. ``None`` decides at start: only with ``min_batch_size=1``, a CPU policy and
            ``torch.get_num_threads() == 1`` (each thread that computes with several would start its own pool).
            Only ``distributed`` over gloo has such threads; to other transports it makes no difference.
        static_batch_size: requests that the policy sees in every forward pass: the last one is repeated up to it, and
            what was computed for the copies is dropped. For compiled and captured policies, and for replies that do
            not depend on how many others were served in the same pass. ``None`` for as many as have come.

    Raises:
        ValueError: a value is out of range, ``min_batch_size > max_batch_size`` or
            ``max_batch_size > static_batch_size``.
        TypeError: a count is not an int, or ``timeout`` not a number.
    """

    max_batch_size: int = None  # type: ignore[assignment]  # an int from __post_init__ on
    min_batch_size: int = 1
    timeout: float = 0.01
    stats_window: int = 1024
    inline: bool | None = None
    static_batch_size: int | None = None

    def __post_init__(self) -> None:
        if self.static_batch_size is not None:
            as_count("static_batch_size", self.static_batch_size)
        if cast("int | None", self.max_batch_size) is None:
            object.__setattr__(self, "max_batch_size", self.static_batch_size or _MAX_BATCH_SIZE)
        for name in ("max_batch_size", "min_batch_size", "stats_window"):
            as_count(name, getattr(self, name))
        self._check_order()
        as_seconds("timeout", self.timeout, zero=True)
        if self.inline and self.min_batch_size > 1:
            raise ValueError(
                "inline=True needs min_batch_size=1: a receiving thread cannot wait for others"
            )

    def _check_order(self) -> None:
        if self.min_batch_size > self.max_batch_size:
            raise ValueError(
                f"min_batch_size={self.min_batch_size} is larger than "
                f"max_batch_size={self.max_batch_size}; a batch could never be made"
            )
        if self.static_batch_size is not None and self.max_batch_size > self.static_batch_size:
            raise ValueError(
                f"static_batch_size={self.static_batch_size} is smaller than "
                f"max_batch_size={self.max_batch_size}; raise it, or lower or leave out max_batch_size"
            )


@dataclass(frozen=True)
class InferenceDeviceConfig:
    """Where a policy computes and where its replies go. Strings and ordinals become ``torch.device``.

    Args:
        policy_device: where the model computes; ``None`` for wherever it is.
        output_device: where replies go. Only a transport that keeps tensors where they are (between threads) can give
            other than CPU tensors, which on a GPU are ready in the order of its default stream.
        env_device: where environments step; ``output_device`` where that is not given.
        storing_device: where a collector keeps its batches. No server has it.

    Raises:
        TypeError, ValueError: a value names no device.
    """

    policy_device: torch.device | str | int | None = None
    output_device: torch.device | str | int | None = None
    env_device: torch.device | str | int | None = None
    storing_device: torch.device | str | int | None = None

    def __post_init__(self) -> None:
        for name in ("policy_device", "output_device", "env_device", "storing_device"):
            object.__setattr__(self, name, as_device(name, getattr(self, name)))

    def server_policy_device(self) -> torch.device | None:
        """:attr:`policy_device`."""
        return as_device("policy_device", self.policy_device)

    def server_output_device(self) -> torch.device | None:
        """:attr:`output_device`, else :attr:`env_device`."""
        found = self.env_device if self.output_device is None else self.output_device
        return as_device("output_device", found)


def merged_config(config: InferenceServerConfig | None, **loose: Any) -> InferenceServerConfig:
    """``config``, or one of the ``loose`` arguments that are not ``None``; ``ValueError`` for both."""
    return _merged("server_config", InferenceServerConfig, config, loose)


def merged_devices(config: InferenceDeviceConfig | None, **loose: Any) -> InferenceDeviceConfig:
    """As :func:`merged_config`, for a server; ``ValueError`` for what only a collector has."""
    found = _merged("device_config", InferenceDeviceConfig, config, loose)
    if found.storing_device is not None:
        raise ValueError(
            f"device_config: storing_device={str(found.storing_device)!r} belongs to a collector; "
            "a server stores nothing, leave it out"
        )
    return found


def _merged(
    name: str, kind: type[_Config], config: _Config | None, loose: Mapping[str, Any]
) -> _Config:
    given = {word: value for word, value in loose.items() if value is not None}
    if config is None:
        return kind(**given)
    if not isinstance(config, kind):
        raise TypeError(f"{name}: expected {kind.__name__}, found {type(config).__name__}")
    if given:
        raise ValueError(f"{', '.join(given)}: give it in {name}, or leave {name} out")
    return config
