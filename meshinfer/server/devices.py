"""From where requests lie to where the policy computes, and back."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
from tensordict import (
    LazyStackedTensorDict,
    TensorDictBase,
    is_non_tensor,
    is_tensor_collection,
)
from torch import Tensor, nn

from meshinfer.inference.protocol import BatchedTransport, InferenceTransport
from meshinfer.streams import mark

__all__ = [
    "DevicePass",
    "check_available",
    "device_of",
    "device_pass",
    "staging_device",
    "with_index",
]


class DevicePass:
    """One batch to the policy's device and its results back, leaf by leaf, with one event to wait for on a GPU.

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

    def __call__(
        self, batch: TensorDictBase, compute: Callable[[TensorDictBase], TensorDictBase]
    ) -> TensorDictBase:
        """``compute(batch)``. The results are no memory of the batch's, once they have moved."""
        home = self._output or _home_of(batch)
        pending = set() if self._device is None else {self._device}
        try:
            if self._device is not None:
                batch, sources = _moved(batch, self._device)
                _wait_for(sources)
            results = compute(batch)
            if home is None:
                return results
            if self._reply_keys is not None:
                results = results.select(*self._reply_keys, strict=False)
            results, sources = _moved(results, home)
            pending |= sources
            return results
        finally:  # after an error too: the batch's memory is used again
            _wait_for(pending)


def device_pass(
    transport: InferenceTransport,
    policy_device: torch.device | None,
    output_device: torch.device | None,
    collate: object = None,
) -> DevicePass | None:
    """What moves the batches of ``transport``; ``None`` where nothing has to move, or the transport does it itself.

    Args:
        transport: of any kind.
        policy_device: where the policy computes; ``None`` for the CPU, or not known.
        output_device: where replies go, if that was asked for.
        collate: what makes batches instead of a transport with rows.

    Raises:
        ValueError: the transport cannot give replies on ``output_device``, or this process does not have it.
    """
    keeps = getattr(transport, "keeps_devices", False)
    row_device = getattr(transport, "row_device", None)
    if output_device is not None and output_device.type != "cpu" and not keeps:
        where = "in CPU memory" if row_device is None else "where each client has its rows"
        raise ValueError(
            f"output_device (or env_device)={str(output_device)!r}: replies over {type(transport).__name__} arrive "
            f"{where}; leave it out, and move them where they are used"
        )
    check_available("output_device", output_device)
    if staging_device(transport, collate, policy_device) is not None:
        return None
    if not keeps and (policy_device is None or policy_device.type == "cpu"):
        if row_device is None or collate is None:
            return None
        policy_device = torch.device("cpu")  # payloads may lie elsewhere
    layout = getattr(transport, "response_layout", None)
    return DevicePass(policy_device, output_device, layout and [leaf.key for leaf in layout.leaves])


def staging_device(
    transport: InferenceTransport, collate: object, device: torch.device | None
) -> torch.device | None:
    """``device``, the policy's, where the transport brings its rows there by itself; else ``None``."""
    if device is None or device.type != "cuda" or collate is not None:
        return None
    stages = getattr(transport, "stages_devices", False) and isinstance(transport, BatchedTransport)
    return device if stages else None


def device_of(model: nn.Module) -> torch.device | None:
    """The one accelerator that all weights of ``model`` are on; ``None`` for the CPU, several or no weights."""
    found = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    device = found.pop() if len(found) == 1 else None
    return None if device is None or device.type in ("cpu", "meta") else device


def with_index(device: torch.device | None) -> torch.device | None:
    """``device``; of ``"cuda"``, which means another one in another thread, the one that is current here."""
    if device is None or str(device) != "cuda":
        return device
    if not torch.cuda.is_available():
        return device  # which is refused where it is used
    return torch.device("cuda", torch.cuda.current_device())


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


def _moved(
    tensors: TensorDictBase, device: torch.device
) -> tuple[TensorDictBase, set[torch.device]]:
    """``tensors`` on ``device``, and the devices from which they are still on their way to the CPU."""
    sources = {tensor.device for tensor in _tensors_of(tensors)}
    if all(_is_at(source, device) for source in sources):
        return tensors, set()
    moved: TensorDictBase = tensors.apply(  # type: ignore[assignment]
        lambda leaf: _move(leaf, device), device=device
    )
    return moved, sources if device.type == "cpu" else set()


def _wait_for(devices: Iterable[torch.device]) -> None:
    """Until each has done what this thread's current stream of it has got."""
    for device in devices:
        mark(device).wait()


def _is_at(found: torch.device, device: torch.device) -> bool:
    """A device without an index is any of its type."""
    return found.type == device.type and device.index in (None, found.index)


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
