"""The arguments that servers have in common, for type checkers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

import torch
from tensordict import TensorDictBase

from meshinfer.inference.version import Key
from meshinfer.server.config import InferenceDeviceConfig, InferenceServerConfig
from meshinfer.transport import TransportConfig
from meshinfer.weights.protocol import WeightTransport

__all__ = ["ServerArguments", "ThreadArguments"]


class ServerArguments(TypedDict, total=False):
    """Of every backend."""

    num_slots: int | None
    request_spec: TensorDictBase | None
    response_spec: TensorDictBase | None
    transport_options: Mapping[str, Any] | None
    max_batch_size: int | None
    min_batch_size: int | None
    timeout: float | None
    static_batch_size: int | None
    in_keys: Sequence[Key] | None
    out_keys: Sequence[Key] | None
    collate_fn: Callable[[list[TensorDictBase]], TensorDictBase] | None
    policy_device: torch.device | str | int | None
    output_device: torch.device | str | int | None
    policy_version: int
    policy_version_key: Key | None
    server_config: InferenceServerConfig | None
    device_config: InferenceDeviceConfig | None
    weight_transport: WeightTransport | TransportConfig | str | None


class ThreadArguments(ServerArguments, total=False):
    """Of a server in a thread."""

    share_weights: bool
