"""From where requests lie to where the policy computes, and back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
)
from torch import Tensor, nn

__all__ = ["DevicePass", "check_available", "device_of", "device_pass"]


class DevicePass:
    """One batch to the policy's device and its results back, with one event to wait for on a GPU.

    Copies between a GPU and CPU memory go through page-locked memory of torch's own, so that they run while Python
    goes on; what waits, waits for this pass only and not for all that the device does.

    Args:
        policy_device: where the policy computes; ``None`` for wherever a batch is.
        output_device: where results go; ``None`` for where the requests lay.
        reply_keys: results that are sent, where that is known; others stay where they are.
    """

    def __init__(
        self,
        policy_device: torch.device | None,
        output_device: torch.device | None,
        reply_keys: Collection[tuple[str, ...]] | None = None,
    ) -> None:
        self._device = policy_device
        self._output = output_device
        self._reply_keys = None if reply_keys is None else list(reply_keys)
        on_gpu = policy_device is not None and policy_device.type == "cuda"
        self._event = torch.cuda.Event() if on_gpu else None  # type: ignore[no-untyped-call]

    def __call__(
        self, batch: TensorDictBase, compute: Callable[[TensorDictBase], TensorDictBase]
    ) -> TensorDictBase:
        """``compute(batch)``. The results are no memory of the batch's, once they have moved."""
        home = self._output or _home_of(batch)
        try:
            results = compute(batch if self._device is None else _moved(batch, self._device))
            if home is None:
                return results
            if self._reply_keys is not None:
                results = results.select(*self._reply_keys, strict=False)
            return _moved(results, home)
        finally:  # after an error too: the batch's memory is used again
            if self._event is not None:
                self._event.record(torch.cuda.current_stream(self._device))
                self._event.synchronize()


def device_pass(
    transport: object, policy_device: torch.device | None, output_device: torch.device | None
) -> DevicePass | None:
    """What moves the batches of ``transport``; ``None`` where nothing has to move.

    Raises:
        ValueError: the transport cannot give replies on ``output_device``, or this process does not have it.
    """
    keeps = getattr(transport, "keeps_devices", False)
    if output_device is not None and output_device.type != "cpu" and not keeps:
        raise ValueError(
            f"output_device (or env_device)={str(output_device)!r}: replies over {type(transport).__name__} arrive in "
            "CPU memory; leave it out, and move them where they are used"
        )
    check_available("output_device", output_device)
    if not keeps and (policy_device is None or policy_device.type == "cpu"):
        return None
    layout = getattr(transport, "response_layout", None)
    return DevicePass(policy_device, output_device, layout and [leaf.key for leaf in layout.leaves])


def device_of(model: nn.Module) -> torch.device | None:
    """The one accelerator that all weights of ``model`` are on; ``None`` for the CPU, several or no weights."""
    found = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    device = found.pop() if len(found) == 1 else None
    return None if device is None or device.type in ("cpu", "meta") else device


def check_available(name: str, device: torch.device | None) -> None:
    """:class:`ValueError` for a CUDA device that this process does not have."""
    if device is None or device.type != "cuda":
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        raise ValueError(f"{name}={str(device)!r}: this process has {count} CUDA devices")


def _home_of(batch: TensorDictBase) -> torch.device | None:
    first = next(_tensors_of(batch), None)
    return None if first is None else first.device


def _tensors_of(node: Any) -> Iterator[Tensor]:
    """Each tensor, without stacking what is stacked lazily: its parts may have different shapes."""
    if isinstance(node, Tensor):
        yield node
    elif isinstance(node, LazyStackedTensorDict):
        for part in node.tensordicts:
            yield from _tensors_of(part)
    elif is_tensor_collection(node) and not is_non_tensor(node):
        for value in node.values():
            yield from _tensors_of(value)


def _moved(tensors: TensorDictBase, device: torch.device) -> TensorDictBase:
    if all(_is_at(tensor, device) for tensor in _tensors_of(tensors)):
        return tensors
    moved: TensorDictBase = tensors.apply(  # type: ignore[assignment]
        lambda leaf: _move(leaf, device), device=device
    )
    return moved


def _is_at(leaf: Tensor, device: torch.device) -> bool:
    """A device without an index is any of its type."""
    return leaf.device.type == device.type and device.index in (None, leaf.device.index)


def _move(leaf: Tensor, device: torch.device) -> Tensor:
    kinds = leaf.device.type, device.type
    if kinds == ("cpu", "cuda"):
        staged = leaf
        if not (leaf.is_contiguous() and leaf.is_pinned()):  # a view of rows would be copied twice
            staged = torch.empty(leaf.shape, dtype=leaf.dtype, pin_memory=True).copy_(leaf)
        return staged.to(device, non_blocking=True)
    if kinds == ("cuda", "cpu"):
        target = torch.empty(leaf.shape, dtype=leaf.dtype, pin_memory=True)
        return target.copy_(leaf, non_blocking=True)
    return leaf.to(device)
