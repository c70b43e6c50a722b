"""Payloads of any content, pickled whole; their tensors as plain bytes."""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from typing import Any, Final

import torch
from tensordict import (
    LazyStackedTensorDict,
    MemoryMappedTensor,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
)
from torch import Tensor

from meshinfer.specs import short_key

__all__ = ["PLAIN", "check_devices", "dump", "load", "on_another_device"]

PLAIN: Final = frozenset({Tensor, torch.nn.Parameter, MemoryMappedTensor})
"""Classes whose tensors are their values, and arrive as plain tensors."""

_Key = tuple[str, ...]
_PROTOCOL: Final = 5  # large buffers are written without a copy of their own


def dump(payload: TensorDictBase, name: str) -> memoryview:
    """``payload`` as bytes, detached from autograd.

    Raises:
        TypeError: something in it cannot be pickled; says what pickle said.
    """
    stream = io.BytesIO()
    try:
        _Pickler(stream, _PROTOCOL).dump(payload)
    except Exception as error:  # any class may raise anything while it is pickled
        raise TypeError(
            f"{name}: expected what can be pickled to go to another process, found {error}"
        ) from error
    return stream.getbuffer()


def load(data: bytearray | memoryview) -> Any:
    """What was dumped; raises whatever its classes raise. Only for bytes from a peer that has proved the secret."""
    return pickle.loads(data)


def check_devices(payload: Any, name: str, prefix: _Key = ()) -> None:
    """:class:`TypeError`, naming the key, if a tensor is not in the memory of the CPU."""
    for key, leaf in _leaves(payload, prefix):
        if isinstance(leaf, Tensor) and leaf.device.type != "cpu":
            raise on_another_device(name, key, leaf)


def on_another_device(name: str, key: _Key, leaf: Tensor) -> TypeError:
    """The error for a tensor that cannot travel."""
    return TypeError(
        f"{name} {short_key(key)!r}: expected a tensor on the CPU, found it on {leaf.device}; call .cpu() first"
    )


def _leaves(node: Any, prefix: _Key) -> Iterator[tuple[_Key, Any]]:
    if isinstance(node, LazyStackedTensorDict):
        for each in node.tensordicts:
            yield from _leaves(each, prefix)
    elif is_tensor_collection(node) and not is_non_tensor(node):
        for key, value in node.items():
            yield from _leaves(value, (*prefix, key))
    else:
        yield prefix, node


class _Pickler(pickle.Pickler):
    """Writes dense tensors as their bytes; torch's own way would write the whole storage behind a small view."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) not in PLAIN:
            return NotImplemented
        if obj.layout is not torch.strided or obj.is_nested or obj.is_quantized:
            return NotImplemented
        plain = obj.detach().as_subclass(Tensor).resolve_conj().resolve_neg().contiguous()
        octets = plain.reshape(-1).view(torch.uint8).numpy()
        return _tensor, (pickle.PickleBuffer(octets), obj.dtype, tuple(obj.shape))


def _tensor(octets: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not octets:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(octets, dtype=dtype).view(shape)
