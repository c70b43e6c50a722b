"""Weights on their way to another process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from meshinfer.weights.names import named_weights

__all__ = ["PackedTensor", "pack_weights", "unpack_weights"]


@dataclass(frozen=True)
class PackedTensor:
    """The bytes of a tensor: pickled, they share no memory with it, whatever torch makes of tensors in pickles."""

    data: np.ndarray[Any, Any]
    dtype: torch.dtype
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> PackedTensor:
        """From any device; a tensor of the CPU is copied only when this is pickled."""
        whole = tensor.detach().cpu().contiguous()
        return cls(whole.reshape(-1).view(torch.uint8).numpy(), whole.dtype, tuple(whole.shape))

    def tensor(self) -> Tensor:
        """On the CPU."""
        return torch.from_numpy(self.data).view(self.dtype).reshape(self.shape)


def pack_weights(weights: object) -> dict[str, PackedTensor]:
    """Parameters and buffers by name; ``weights`` and errors as in :func:`~meshinfer.server.weights.copy_weights`."""
    return {name: PackedTensor.of(tensor) for name, tensor in named_weights(weights).items()}


def unpack_weights(packed: Mapping[str, PackedTensor]) -> dict[str, Tensor]:
    """The tensors, on the CPU."""
    return {name: one.tensor() for name, one in packed.items()}
