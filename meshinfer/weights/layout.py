"""The bytes of a set of weights: names, shapes, dtypes, and which names share one tensor."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from meshinfer.layout import Leaf, PayloadLayout
from meshinfer.weights.names import check_names, named_weights

__all__ = ["WeightLayout"]


@dataclass(frozen=True, eq=False, repr=False)
class WeightLayout:
    """Where each weight lies in one row of bytes: immutable, picklable, equal where the rows are equal.

    Use :meth:`from_spec`. Weights that share one tensor (tied weights) are laid out once, under the first of their
    names.

    Attributes:
        payload: the row; its keys are the names, in alphabetic order.
        ties: each further name of a tensor, with the name under which it is laid out.
        fingerprint: SHA-256 in hex of all that both ends must agree on.
    """

    name: ClassVar[str] = "weights"
    payload: PayloadLayout
    ties: Mapping[str, str]
    fingerprint: str = field(init=False)
    _leaves: dict[str, Leaf] = field(init=False)

    def __post_init__(self) -> None:
        leaves = {leaf.key[0]: leaf for leaf in self.payload.leaves}
        object.__setattr__(self, "_leaves", leaves)
        wire = json.dumps([self.payload.fingerprint, sorted(self.ties.items())])
        object.__setattr__(self, "fingerprint", hashlib.sha256(wire.encode()).hexdigest())

    @classmethod
    def from_spec(cls, spec: object) -> WeightLayout:
        """Lay out the parameters and buffers of a model.

        Args:
            spec: an ``nn.Module``, compiled or not; a state dict; a TensorDict or ``TensorDictParams``; or a ready
                layout, which is returned as it is. Names, shapes and dtypes count, values and devices do not. The
                buffers that no state dict has belong to a module's.

        Raises:
            TypeError: ``spec`` is none of these, or an entry is no dense tensor.
            ValueError: there is no weight, or one is on the meta device or has no shape yet.
        """
        if isinstance(spec, WeightLayout):
            return spec
        found = dict(sorted(named_weights(spec).items()))
        for name, tensor in found.items():
            _check_real(name, tensor)
        ties = _ties_of(found)
        kept = {name: tensor for name, tensor in found.items() if name not in ties}
        return cls(PayloadLayout.from_spec(kept, name="weights"), ties)

    @property
    def names(self) -> tuple[str, ...]:
        """Of all weights, tied ones included."""
        return (*self._leaves, *self.ties)

    @property
    def row_bytes(self) -> int:
        """Bytes of one version."""
        return self.payload.row_bytes

    def expected(self, name: str) -> Leaf:
        """Shape and dtype of one weight; :class:`KeyError` for an unknown name."""
        return self._leaves[self.ties.get(name, name)]

    def describe(self) -> dict[str, Any]:
        """The layout in JSON values."""
        return {**self.payload.describe(), "ties": dict(self.ties)}

    def difference(self, other_description: Mapping[str, Any]) -> str:
        """One line on the first differences from another's :meth:`describe`; empty without any."""
        other = dict(other_description)
        theirs = other.pop("ties", {})
        found = [self.payload.difference(other)]
        for name in sorted({*self.ties, *theirs}):
            if self.ties.get(name) != theirs.get(name):
                here, there = (_tied_to(ties.get(name)) for ties in (self.ties, theirs))
                found.append(f"{name!r} is {here} here, {there} there")
        return "; ".join(filter(None, found[:2]))

    def select(self, weights: object, *, cast: bool = False) -> dict[str, Tensor]:
        """The weights by the names under which they are laid out; any subset, checked, and not copied.

        Args:
            weights: a module, a state dict or a TensorDict.
            cast: allow other dtypes.

        Raises:
            ValueError: a name is unknown, a shape differs, a tensor has no values, or tied names have different values.
            TypeError: ``weights`` is something else, an entry is no dense tensor, or its dtype differs.
        """
        found = named_weights(weights)
        check_names("has unknown", found.keys() - {*self.names})
        chosen: dict[str, Tensor] = {}
        for name, tensor in found.items():
            self._check(name, tensor, cast)
            home = self.ties.get(name, name)
            if home in chosen and not _same(chosen[home], tensor):
                raise ValueError(
                    f"weights {name!r}: tied to {home!r}, but has other values; give one of them, or the same tensor"
                )
            chosen.setdefault(home, tensor.detach())
        return chosen

    def missing(self, given: Iterable[str]) -> set[str]:
        """Names that are laid out and not among ``given``."""
        return self._leaves.keys() - {*given}

    def new_row(self, device: torch.device | None = None) -> Tensor:
        """Memory for one version: uint8 ``[row_bytes]``, zeroed."""
        row = self.payload.new_rows()
        return row if device is None or device.type == "cpu" else row.to(device)

    def views(self, row: Tensor) -> dict[str, Tensor]:
        """Each weight in ``row``, uint8 ``[row_bytes]``, by each of its names; they share its memory."""
        tensors = self.payload.views(row).tensors
        homes = dict(zip(self._leaves, tensors, strict=True))
        return {**homes, **{name: homes[home] for name, home in self.ties.items()}}

    def write(
        self,
        views: Mapping[str, Tensor],
        given: Mapping[str, Tensor],
        base: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Copy ``given``, as :meth:`select` returns it, into a row's ``views``; what is not given comes from ``base``.

        Returns when the values are there, also from a GPU.
        """
        sources = (
            given if base is None else {**{name: base[name] for name in self._leaves}, **given}
        )
        with torch.no_grad():
            torch._foreach_copy_([views[name] for name in sources], [*sources.values()])
        synchronize({tensor.device for tensor in (*views.values(), *sources.values())})

    def _check(self, name: str, tensor: Tensor, cast: bool) -> None:
        _check_real(name, tensor)
        leaf = self.expected(name)
        expected = f"expected {_word(leaf.dtype)}{list(leaf.shape)}"
        label = f"weights {name!r}: {expected}, found {_word(tensor.dtype)}{list(tensor.shape)}"
        if tensor.shape != leaf.shape:
            raise ValueError(label)
        if tensor.dtype != leaf.dtype and not cast:
            raise TypeError(f"{label}; nothing is cast unless the publisher is made with cast=True")

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, WeightLayout):
            return NotImplemented
        return self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.payload, dict(self.ties))

    def __repr__(self) -> str:
        return f"WeightLayout({len(self.names)} weights, {self.row_bytes} bytes)"


def synchronize(devices: Iterable[torch.device]) -> None:
    """Wait for what this thread has asked of those of ``devices`` that are GPUs."""
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()


def _check_real(name: str, tensor: Tensor) -> None:
    label = f"weights {name!r}: expected a dense tensor with values, found"
    if is_lazy(tensor):
        raise ValueError(f"{label} one without a shape; call the module once first")
    if tensor.is_meta:
        raise ValueError(f"{label} one on the meta device; call the module's to_empty() first")
    if hasattr(tensor, "full_tensor"):
        raise TypeError(f"{label} a DTensor; give a state dict of what its full_tensor() returns")
    if tensor.is_nested or tensor.layout is not torch.strided:
        raise TypeError(f"{label} {'a nested one' if tensor.is_nested else tensor.layout}")


def _ties_of(found: Mapping[str, Tensor]) -> dict[str, str]:
    homes: dict[Any, str] = {}
    ties = {}
    for name, tensor in found.items():
        home = homes.setdefault(_identity(tensor), name)
        if home != name:
            ties[name] = home
    return ties


def _identity(tensor: Tensor) -> Any:
    """Equal for tensors of the same elements in memory, never for empty ones."""
    if not tensor.numel():
        return object()
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _same(one: Tensor, other: Tensor) -> bool:
    return _identity(one) == _identity(other) or torch.equal(one, other)


def _tied_to(home: str | None) -> str:
    return "not tied" if home is None else f"tied to {home!r}"


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
