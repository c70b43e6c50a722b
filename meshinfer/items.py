"""Payloads of any structure: copied, told apart, stacked into a batch and split again.

Written against plain TensorDicts of plain tensors, whose leaves cost one torch call each; whatever else a payload may
hold (data that are no tensors, tensorclasses, lazy stacks) goes through TensorDict's own functions.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    TensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
)
from torch import Tensor

__all__ = ["check_collection", "copy_item", "split_items", "stack_items", "structure_of"]

_NON_TENSOR = "non-tensor"


def check_collection(payload: object) -> None:
    """:class:`TypeError` unless ``payload`` is a TensorDict or a tensorclass."""
    if type(payload) is TensorDict:
        return
    if isinstance(payload, type) or not is_tensor_collection(payload) or is_non_tensor(payload):
        found = payload.__qualname__ if isinstance(payload, type) else type(payload).__qualname__
        raise TypeError(f"request: expected a TensorDict or a tensorclass, found {found}")


def structure_of(payload: Any) -> Hashable:
    """What payloads must have in common to be stacked: keys, shapes, dtypes, devices and batch sizes.

    The order of the keys does not matter, nor do the values of what is no tensor.
    """
    if type(payload) is TensorDict:
        found = [(key, structure_of(value)) for key, value in payload.items()]
        found.sort(key=_first)
        return payload.batch_size, *found
    if isinstance(payload, Tensor):
        # Whether sparse and nested tensors can be stacked depends on more than we see: each on its own.
        dense = payload.layout is torch.strided and not payload.is_nested
        return (payload.shape, payload.dtype, payload.device) if dense else id(payload)
    if is_non_tensor(payload):
        return _NON_TENSOR, payload.batch_size
    if isinstance(payload, LazyStackedTensorDict):
        parts = map(structure_of, payload.tensordicts)
        return LazyStackedTensorDict, payload.stack_dim, *parts
    found = sorted(((key, structure_of(value)) for key, value in payload.items()), key=_first)
    return type(payload), payload.batch_size, *found


def _first(item: tuple[str, Hashable]) -> str:
    return item[0]


def copy_item(payload: Any) -> Any:
    """An independent copy, without gradients: plain, unlocked, and of no one device."""
    if type(payload) is TensorDict:
        source = {key: copy_item(value) for key, value in payload.items()}
        return _plain(source, payload.batch_size)
    if isinstance(payload, Tensor):
        return (payload.detach() if payload.requires_grad else payload).clone()
    if isinstance(payload, LazyStackedTensorDict):
        parts = payload.tensordicts
        if len({structure_of(part) for part in parts}) == 1:
            return payload.detach().contiguous()
    return payload.detach().clone()


def stack_items(payloads: Sequence[TensorDictBase]) -> TensorDictBase:
    """Payloads of one structure as one batch ``[n * prod(batch_size)]``; shares no memory with them."""
    dims = len(payloads[0].batch_size)
    batch: TensorDictBase = _stacked(payloads, dims)
    return batch


def _stacked(nodes: Sequence[Any], dims: int) -> Any:
    """The nodes in a new first dimension, which is merged with the ``dims`` batch dimensions of the payloads."""
    first = nodes[0]
    if type(first) is not TensorDict or any(type(node) is not TensorDict for node in nodes):
        stacked = torch.stack(list(nodes))
        return stacked.flatten(0, dims) if dims else stacked
    source = {key: _stacked([node.get(key) for node in nodes], dims) for key in first.keys()}  # noqa: SIM118
    lead = len(nodes) * first.batch_size[:dims].numel()
    return _plain(source, torch.Size((lead, *first.batch_size[dims:])))


def split_items(
    results: TensorDictBase, count: int, batch_size: torch.Size
) -> list[TensorDictBase]:
    """The inverse of :func:`stack_items`: ``count`` payloads of ``batch_size``, independent of ``results`` and alike.

    Raises:
        ValueError: the first dimension of ``results`` is not ``count * prod(batch_size)``.
    """
    rows, found = count * batch_size.numel(), list(results.batch_size[:1])
    if found != [rows]:
        raise ValueError(
            f"the policy returned {found[0] if found else 0} rows for {count} requests, expected {rows}; "
            "the first dimension of its result's batch_size is the requests"
        )
    return _split(results, count, batch_size)


def _split(node: Any, count: int, batch_size: torch.Size) -> list[Any]:
    if isinstance(node, Tensor):
        node = node.detach() if node.requires_grad else node
        # One call for all, and each has memory of its own: of views, gradients given to one would reach the others.
        rows: Any = torch.unbind_copy(_unflatten(node, count, batch_size))  # type: ignore[func-returns-value]
        return rows  # type: ignore[no-any-return]
    if type(node) is not TensorDict:
        return [copy_item(part) for part in _unflatten(node, count, batch_size).unbind(0)]
    keys = list(node.keys())
    columns = [_split(node.get(key), count, batch_size) for key in keys]
    size = batch_size + node.batch_size[1:]
    if not columns:
        return [_plain({}, size) for _ in range(count)]
    return [_plain(dict(zip(keys, row, strict=True)), size) for row in zip(*columns, strict=True)]


def _unflatten(node: Any, count: int, batch_size: torch.Size) -> Any:
    return node.reshape(count, *batch_size, *node.shape[1:]) if batch_size else node


def _plain(source: dict[Any, Any], batch_size: torch.Size) -> Any:
    # The constructor without its checks, half its time: our leaves have these batch dimensions.
    return TensorDict._new_unsafe(source, batch_size, nested=False)
