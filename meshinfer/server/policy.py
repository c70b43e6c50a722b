"""The served model: any callable on TensorDicts, its version, and the lock that keeps both together."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import set_interaction_type

from meshinfer.inference.interaction import decode_interaction
from meshinfer.inference.version import Key

__all__ = ["ServedPolicy"]


class ServedPolicy:
    """A model and the version of its weights, which change together or not at all.

    Args:
        model: a ``TensorDict -> TensorDict`` callable, or with ``in_keys`` and ``out_keys`` a plain ``nn.Module``.
        in_keys, out_keys: the module's inputs and outputs.
        share_weights: serve ``model`` itself; otherwise a module is copied, so that an optimizer step in the caller's
            process changes no action.
        device: where the model computes.
        version: of the weights that it has now.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        in_keys: Sequence[Key] | None,
        out_keys: Sequence[Key] | None,
        share_weights: bool,
        device: torch.device | None,
        version: int,
    ) -> None:
        self.turn = threading.Lock()
        """Held by whoever serves a batch or changes the weights."""
        self.version = version
        self.device = device
        if isinstance(model, torch.nn.Module):
            model = model if share_weights else copy.deepcopy(model)
            model = model if device is None else model.to(device)
        self._model = model
        self._call = _as_tensordict_callable(model, in_keys, out_keys)

    def __call__(self, batch: TensorDictBase, interaction: int) -> TensorDictBase:
        """One forward pass without gradients, under the interaction type that the clients asked for.

        Only for threads of the server: it leaves gradients disabled in the calling one.
        """
        if self.device is not None:
            batch = batch.to(self.device)
        kind = decode_interaction(interaction)
        if torch.is_grad_enabled():
            torch.set_grad_enabled(
                False
            )  # for good: threads that serve are ours and do nothing else
        if kind is None:
            result = self._call(batch)
        else:
            with set_interaction_type(kind):
                result = self._call(batch)
        if not isinstance(result, TensorDictBase):
            raise TypeError(
                f"the policy returned {type(result).__name__}, expected a TensorDict; "
                "give in_keys= and out_keys= to serve a plain nn.Module"
            )
        return result

    def update(self, change: Callable[[Any], object], version: int | None) -> int:
        """With :attr:`turn` held: let ``change`` alter the model; the new version."""
        with torch.no_grad():
            change(self._model)
        self.version = self.version + 1 if version is None else version
        return self.version


def _as_tensordict_callable(
    model: Callable[..., Any], in_keys: Sequence[Key] | None, out_keys: Sequence[Key] | None
) -> Callable[[TensorDictBase], Any]:
    if not callable(model):
        raise TypeError(
            f"model: expected an nn.Module or a callable on TensorDicts, found {type(model).__name__}"
        )
    if (in_keys is None) != (out_keys is None):
        raise ValueError(
            "in_keys and out_keys go together: give both for a plain nn.Module, neither otherwise"
        )
    if in_keys is None or out_keys is None:
        return model
    return _PlainModule(model, in_keys, out_keys)


class _PlainModule:
    """What ``TensorDictModule`` does for a plain module that is only called, in a third of its overhead."""

    def __init__(
        self, module: Callable[..., Any], in_keys: Sequence[Key], out_keys: Sequence[Key]
    ) -> None:
        self._module = module
        self._in_keys = list(in_keys)
        self._out_keys = list(out_keys)

    def __call__(self, batch: TensorDictBase) -> TensorDict:
        outputs = self._module(*[batch.get(key) for key in self._in_keys])
        if not isinstance(outputs, tuple):
            outputs = (outputs,)
        if len(outputs) != len(self._out_keys):
            raise ValueError(
                f"the module returned {len(outputs)} outputs for the out_keys {self._out_keys}"
            )
        result = TensorDict({}, batch.batch_size)
        for key, output in zip(self._out_keys, outputs, strict=True):
            result.set(key, output)
        return result
