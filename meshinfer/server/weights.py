"""New values for the parameters and buffers of a served module."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from meshinfer.weights.names import check_names, named_weights, plain_name

__all__ = ["copy_weights"]


def copy_weights(model: object, weights: object) -> None:
    """Copy ``weights`` into the parameters and buffers of ``model``, in place; nothing is copied unless all fit.

    Args:
        model: an ``nn.Module``, compiled or not.
        weights: another module, a state dict, or a TensorDict of parameters (nested as ``TensorDict.from_module``
            makes it). Values are cast; buffers that no state dict has may be left out.

    Raises:
        TypeError: ``model`` has no weights, or ``weights`` is none of these.
        ValueError: a name is missing or unknown, or a shape differs.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"the served model is a {type(model).__name__}, not an nn.Module, so it has no named weights; "
            "use update_model()"
        )
    targets, sources = named_weights(model), named_weights(weights)
    kept = {
        plain_name(name) for name, value in model.state_dict().items() if isinstance(value, Tensor)
    }
    check_names("has no value for", kept - sources.keys())
    check_names("has unknown", sources.keys() - targets.keys())
    for name, source in sources.items():
        if source.shape != targets[name].shape:
            expected, found = list(targets[name].shape), list(source.shape)
            raise ValueError(f"weights {name!r}: expected shape {expected}, found {found}")
    with torch.inference_mode():  # which may write to tensors of both modes
        for name, source in sources.items():
            targets[name].copy_(source)
