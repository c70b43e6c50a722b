"""The served model: any callable on TensorDicts, its version, and the lock that keeps both together."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from meshinfer.inference.interaction import computing_under, decode_interaction
from meshinfer.inference.version import Key
from meshinfer.server.devices import DevicePass, check_available, device_of
from meshinfer.server.graphs import allow_graphs_here
from meshinfer.server.swap import ServedWeights, WeightSwap, checked_module
from meshinfer.server.weights import copy_weights
from meshinfer.transport import TransportConfig
from meshinfer.weights.protocol import WeightTransport
from meshinfer.weights.resolver import make_weight_transport

__all__ = ["ServedPolicy"]

_WARM_UP_PASSES = 3
"""Some compilers measure in the first pass and capture in the second."""


class ServedPolicy:
    """A model and the version of its weights, which change together or not at all.

    Args:
        model: a ``TensorDict -> TensorDict`` callable, or with ``in_keys`` and ``out_keys`` a plain ``nn.Module``.
        in_keys, out_keys: the module's inputs and outputs.
        share_weights: serve ``model`` itself; otherwise a module is copied, so that an optimizer step in the caller's
            process changes no action.
        device: where the model computes; ``None`` for where it is.
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
        self.updates = 0
        """How often the weights have changed."""
        self.offer: WeightSwap | None = None
        """Weights that wait for their turn: :meth:`take_offer`."""
        check_available("policy_device", device)
        if isinstance(model, torch.nn.Module):
            model = model if share_weights else _copied(model)
            model = model if device is None else model.to(device)
            device = device or device_of(model)
        self.device = device
        self._on_gpu = device is not None and device.type == "cuda"
        self._model = model
        self._weights: ServedWeights | None = None
        self.owns_model = not share_weights
        """Whether nobody outside of the server has the model."""
        self._call = _as_tensordict_callable(model, in_keys, out_keys)
        self._prepared: list[tuple[TensorDictBase, int]] = []
        self.device_pass: DevicePass | None = None
        """Where batches may lie elsewhere than the model, or replies have to."""

    def __call__(self, batch: TensorDictBase, interaction: int) -> TensorDictBase:
        """One forward pass without gradients, under the interaction type that the clients asked for.

        Only for threads of the server: it leaves gradients disabled in the calling one.
        """
        # For good: threads that serve are ours and do nothing else.
        if torch.is_grad_enabled():
            torch.set_grad_enabled(False)
        if self._on_gpu:
            allow_graphs_here()
        if self.device_pass is None:
            return self._forward(batch, interaction)
        return self.device_pass(batch, lambda moved: self._forward(moved, interaction))

    def warm_up(self, batch: TensorDictBase, interaction: int) -> None:
        """With :attr:`turn` held, in any thread: compute ``batch`` for nobody."""
        with torch.inference_mode(False), torch.no_grad():
            for _ in range(_WARM_UP_PASSES):
                # TensorDict.clone() adds 0 where a device is set, which torch cannot do for every dtype of a GPU.
                copied: TensorDictBase = batch.apply(torch.clone)  # type: ignore[assignment]
                self(copied, interaction)
        if self.device is not None and self.device.type != "cpu":
            self._prepared.append((batch, interaction))

    def warm_up_here(self) -> None:
        """With :attr:`turn` held, in the serving thread: repeat what was prepared, since graphs are captured for each
        thread anew."""
        for batch, interaction in list(self._prepared):
            self.warm_up(batch, interaction)
        self._prepared.clear()

    def _forward(self, batch: TensorDictBase, interaction: int) -> TensorDictBase:
        kind = decode_interaction(interaction)
        if kind is None:
            result = self._call(batch)
        else:
            with computing_under(kind):
                result = self._call(batch)
        if not isinstance(result, TensorDictBase):
            raise TypeError(
                f"the policy returned {type(result).__name__}, expected a TensorDict; "
                "give in_keys= and out_keys= to serve a plain nn.Module"
            )
        return result

    def weight_transport(
        self, asked: WeightTransport | TransportConfig | str | None
    ) -> WeightTransport | None:
        """The weight transport that a user asked for, by default for the model's weights; checked.

        Raises:
            TypeError: the model has no named weights, or ``asked`` is something else.
            ValueError: it has other weights, or there is no such transport.
        """
        if asked is None:
            return None
        spec = None
        if isinstance(asked, str) or "spec" not in getattr(asked, "options", {"spec": None}):
            spec = checked_module(self._model)
        transport = make_weight_transport(asked, spec=spec)
        self.weights_from(transport)
        return transport

    def weights_from(self, transport: WeightTransport) -> ServedWeights:
        """What takes the versions of ``transport`` into the model; errors as for :class:`ServedWeights`."""
        alias = bool(getattr(transport, "alias", False))
        self._weights = ServedWeights(
            self._model, transport.layout, own=self.owns_model, alias=alias
        )
        return self._weights

    def take_offer(self) -> None:
        """With :attr:`turn` held: the weights that are offered serve from now on."""
        swap, self.offer = self.offer, None
        if swap is None or self._weights is None:
            return
        try:
            self._weights.apply(swap)
            if swap.applied:
                self.version = swap.update.version
                self.updates += 1
        finally:
            swap.settled.set()

    def own_weights(self) -> None:
        """With :attr:`turn` held: the model has its weights for itself, and nothing of a weight transport's."""
        if self._weights is not None:
            self._weights.own()

    def load(self, weights: object, version: int | None) -> int:
        """With :attr:`turn` held: copy ``weights`` into the model; the new version."""
        return self.update(lambda model: copy_weights(model, weights), version)

    def update(self, change: Callable[[Any], object], version: int | None) -> int:
        """With :attr:`turn` held: let ``change`` alter the model; the new version."""
        self.own_weights()
        try:
            with torch.no_grad():
                change(self._model)
        finally:
            if self._weights is not None:
                self._weights.note_change()
        self.version = self.version + 1 if version is None else version
        self.updates += 1
        return self.version


def _copied(model: torch.nn.Module) -> torch.nn.Module:
    lost = [
        name for name, part in model.named_modules() if getattr(part, "_compiled_call_impl", None)
    ]
    if lost:
        which = f"its part {lost[0]!r}" if lost[0] else "it"
        raise ValueError(
            f"model: {which} was compiled in place, by compile(), which a copy of a module loses; "
            "give torch.compile(module) instead, or share_weights=True"
        )
    return copy.deepcopy(model)


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
        self._is_flat = all(isinstance(key, str) for key in out_keys)

    def __call__(self, batch: TensorDictBase) -> TensorDict:
        outputs = self._module(*[batch.get(key) for key in self._in_keys])
        if not isinstance(outputs, tuple):
            outputs = (outputs,)
        if len(outputs) != len(self._out_keys):
            raise ValueError(
                f"the module returned {len(outputs)} outputs for the out_keys {self._out_keys}"
            )
        size = batch.batch_size
        if self._is_flat and all(
            type(output) is Tensor and output.shape[:1] == size for output in outputs
        ):
            # The constructor without its checks, which these were.
            made = dict(zip(self._out_keys, outputs, strict=True))
            return TensorDict._new_unsafe(made, batch_size=size)  # type: ignore[arg-type]
        result = TensorDict({}, size)
        for key, output in zip(self._out_keys, outputs, strict=True):
            result.set(key, output)
        return result
