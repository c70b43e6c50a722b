"""Versions of weights that get into a served model: prepared beside it, and swapped in between two batches."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from meshinfer.weights.layout import WeightLayout, synchronize
from meshinfer.weights.names import check_names, named_weights, plain_name
from meshinfer.weights.protocol import WeightUpdate

__all__ = ["ServedWeights", "WeightSwap", "checked_module"]

_Pairs = list[tuple[Tensor, Tensor]]


@dataclass
class WeightSwap:
    """One version, ready for the model.

    Args:
        update: where its values lie.
        borrowed: weights of the model, and the memory of ``update`` that they shall have.
        owned: weights of the model, and memory that nobody else has.
        copied: weights of the model, and what to copy into them.
        generation: of the model for which this was prepared.
    """

    update: WeightUpdate
    borrowed: _Pairs
    owned: _Pairs
    copied: _Pairs
    generation: int
    settled: threading.Event = field(default_factory=threading.Event)
    """Set when it was applied, or could not be."""
    applied: bool = False
    failure: Exception | None = None
    """Why it could not."""
    done_with: list[WeightUpdate] = field(default_factory=list)
    """Once it was applied: what the model does not need any more, for whoever prepared it to release."""


class ServedWeights:
    """The parameters and buffers of one model, and whose memory they have.

    A parameter on the CPU gets the new version's own memory, a buffer (which a policy may write to) a copy of it, both
    made beside; so a swap sets pointers, and takes no time that a batch would notice. Values are copied in place where
    others rely on the memory: on a GPU, in compiled models, where weights or other attributes of a module share memory,
    and in a model that is not the server's own.

    Args:
        model: the module that computes; its weights are looked up anew for each version.
        layout: of the versions to come.
        own: nobody outside of the server relies on the model's memory.
        alias: versions are the trainer's tensors, and must not be copied.

    Raises:
        TypeError: ``model`` is no module.
        ValueError: its weights differ from ``layout``, as the message says; or it has to be copied to, with ``alias``.
    """

    def __init__(self, model: object, layout: WeightLayout, *, own: bool, alias: bool) -> None:
        module = checked_module(model)
        _check_fits(module, layout)
        fixed = _why_fixed(module, alias)
        if alias and fixed:
            raise ValueError(
                f"weight_transport: alias=True cannot work with a model {fixed}; leave alias out"
            )
        self._model = module
        self._layout = layout
        self._sets_pointers = alias or (own and not fixed)
        self._generation = 0
        self._lease: WeightUpdate | None = None
        self._borrowed: list[Tensor] = []

    def prepare(self, update: WeightUpdate) -> WeightSwap:
        """Make ready to apply; reads the model, and changes nothing.

        Raises:
            ValueError: the model was changed, and does not fit any more.
        """
        if self._generation:
            _check_fits(self._model, self._layout, dtypes=False)
        swap = WeightSwap(update, [], [], [], self._generation)
        for target, source in _pairs(self._model, update.weights):
            if not self._sets_pointers:
                swap.copied.append((target, source))
            elif update.alias or _may_borrow(target, source):
                swap.borrowed.append((target, source))
            else:
                with torch.no_grad():
                    swap.owned.append((target, torch.empty_like(target).copy_(source)))
        return swap

    def apply(self, swap: WeightSwap) -> None:
        """Let the model have it. Nobody may compute meanwhile."""
        if swap.generation != self._generation:  # the model may have other parts now
            try:
                anew = self.prepare(swap.update)
            except Exception as error:  # the one who offered tells
                swap.failure, swap.done_with = error, [swap.update]
                return
            swap.borrowed, swap.owned, swap.copied = anew.borrowed, anew.owned, anew.copied
        for target, source in (*swap.borrowed, *swap.owned):
            target.data = source
        if swap.copied:
            with torch.inference_mode():  # which may write to tensors of both modes
                for target, source in swap.copied:
                    target.copy_(source)
            synchronize({target.device for target, _ in swap.copied})
        before, self._lease = self._lease, swap.update if swap.borrowed else None
        self._borrowed = [target for target, _ in swap.borrowed]
        swap.done_with = [each for each in (before, swap.update) if each not in (None, self._lease)]
        swap.applied = True

    def own(self) -> None:
        """Before the model is changed otherwise, or outlives its server: copy what it borrows. Nobody may compute."""
        lease, self._lease = self._lease, None
        if lease is None:
            return
        with torch.no_grad():
            for target in self._borrowed:
                target.data = target.data.clone()
        self._borrowed = []
        lease.release()

    def note_change(self) -> None:
        """The model was changed otherwise, so that what was prepared may not fit."""
        self._generation += 1


def checked_module(model: object) -> nn.Module:
    """``model``, or :class:`TypeError` for what has no named weights."""
    if isinstance(model, nn.Module):
        return model
    raise TypeError(
        f"weight_transport: the served model is a {type(model).__name__}, not an nn.Module, so it has no named"
        " weights; leave weight_transport out, and use update_model()"
    )


def _check_fits(model: nn.Module, layout: WeightLayout, *, dtypes: bool = True) -> None:
    named = named_weights(model)
    kept = {
        plain_name(name) for name, value in model.state_dict().items() if isinstance(value, Tensor)
    }
    wanted = {*layout.names}
    check_names("the weight_transport has no value for", kept - wanted)
    check_names("the served model has no", wanted - named.keys())
    homes: dict[int, str] = {}
    for name in layout.names:
        tensor, leaf = named[name], layout.expected(name)
        if tensor.shape != leaf.shape or (dtypes and tensor.dtype != leaf.dtype):
            raise ValueError(
                f"weights {name!r}: the weight_transport has {leaf.dtype} {list(leaf.shape)}, the served model"
                f" {tensor.dtype} {list(tensor.shape)}; make it with the served model as its spec"
            )
        home = layout.ties.get(name, name)
        if homes.setdefault(id(tensor), home) != home and tensor.numel():
            raise ValueError(
                f"weights {name!r}: tied to {homes[id(tensor)]!r} in the served model, not in the weight_transport;"
                " make it with the served model as its spec"
            )


def _pairs(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Each tensor of the model once, with its new values."""
    seen = set()
    for name, target in named_weights(model).items():
        if name in weights and id(target) not in seen:
            seen.add(id(target))
            yield target, weights[name]


def _may_borrow(target: Tensor, source: Tensor) -> bool:
    """Whether ``source`` can stand in: as ``target`` lies in memory, and nobody writes to it."""
    return (
        isinstance(target, nn.Parameter)
        and target.dtype == source.dtype
        and target.device == source.device
        and target.stride() == source.stride()
    )


def _why_fixed(model: nn.Module, alias: bool) -> str | None:
    """Why the memory of the model's weights must stay what it is; ``None`` if it need not."""
    if any(
        hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None)
        for part in model.modules()
    ):
        return "that is compiled"
    weights = {id(tensor): tensor for tensor in named_weights(model).values()}
    if not alias and any(tensor.device.type != "cpu" for tensor in weights.values()):
        return "on a GPU"
    attributes = {id(tensor): tensor for tensor in _attributes(model)}
    places = Counter(map(_storage, {**attributes, **weights}.values()))
    if any(places[_storage(tensor)] > 1 and tensor.numel() for tensor in weights.values()):
        return "whose weights are views of others"
    return None


def _attributes(model: nn.Module) -> Iterator[Tensor]:
    """Tensors that modules have beside their weights, also in lists and dicts."""
    for part in model.modules():
        for value in vars(part).values():
            yield from _tensors_in(value)


def _tensors_in(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Mapping):
        value = [*value.values()]
    found = value if isinstance(value, (list, tuple)) else [value]
    return [each for each in found if isinstance(each, Tensor) and each.layout is torch.strided]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
