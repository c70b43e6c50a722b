"""The bytes of one request or reply: where each leaf of a TensorDict lies in a row of fixed size.

A :class:`PayloadLayout` is computed once from a spec. From then on a payload is a row of bytes, so
every wire carries every dtype, scalars and empty leaves alike, whatever it knows of tensors::

    layout = PayloadLayout.from_spec({"obs": torch.zeros(4)})
    views = layout.views(layout.new_rows())  # once per row: a typed view of each leaf's bytes
    layout.pack(TensorDict({"obs": obs}), views)
    td = layout.unpack(views)

A server does the same with blocks of rows: ``unpack_rows`` gives the policy's input and
``pack_rows`` takes its result.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, TypeAlias

import torch
from tensordict import TensorDict, TensorDictBase, is_tensor_collection
from torch import Tensor

from meshinfer.misfits import leaf_difference, misfit, text, word
from meshinfer.specs import check_keys, example_of, short_key, walk

__all__ = ["ALIGNMENT", "Leaf", "PayloadLayout", "RowViews"]

ALIGNMENT: Final = 16
"""Bytes. Leaves and rows start at multiples of it, which suits the widest dtype, complex128."""

_DTYPE_NAMES = (
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 "
    "complex32 complex64 complex128 "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu"
)
_DTYPES = frozenset(getattr(torch, word) for word in _DTYPE_NAMES.split() if hasattr(torch, word))
_SINGLY = _DTYPES & {
    *(torch.uint16, torch.uint32, torch.uint64, torch.complex32),
    getattr(torch, "float8_e8m0fnu", torch.uint16),
}
"""A GPU copies them, but not several tensors at once: ``torch._foreach_copy_`` has no kernel for them."""
# A lazy stack of different shapes, a path through a leaf, a nested tensor that has no one shape.
_UNREADABLE = (RuntimeError, LookupError, AttributeError, TypeError, ValueError)
_DIFFERENCES_SHOWN = 5

_Key = tuple[str, ...]
# One level of nesting: each key with the index of its leaf, or with the level below it.
_Tree = tuple[tuple[str, "int | _Tree"], ...]


@dataclass(frozen=True, slots=True)
class Leaf:
    """One tensor of the payload and its place in the row.

    Attributes:
        key: path of the leaf, of one element if it is not nested.
        shape: without the batch dimensions.
        dtype: of the elements.
        offset: first byte in the row, a multiple of ``ALIGNMENT``.
        nbytes: bytes of the leaf, batch dimensions included.
    """

    key: _Key
    shape: torch.Size
    dtype: torch.dtype
    offset: int
    nbytes: int


_Planned: TypeAlias = tuple[str | _Key, torch.Size, torch.dtype]


class RowViews:
    """Typed views of one row, or of a block of rows; keep them as long as the row.

    Attributes:
        tensors: one per leaf in the layout's order, ``[*batch_size, *shape]`` for one row and
            ``[n, *batch_size, *shape]`` for a block.
        num_rows: ``n`` for a block, ``None`` for one row.
        device: where the row lies.
        shapes: of ``tensors``, as they were made.
        flat_size: ``[n * prod(batch_size)]``, the batch that a block of rows makes.
        flat_plan: key, shape and dtype of each leaf in that batch.
    """

    __slots__ = ("device", "flat_plan", "flat_size", "num_rows", "shapes", "tensors")

    def __init__(
        self,
        tensors: list[Tensor],
        num_rows: int | None,
        device: torch.device,
        flat_size: torch.Size,
        flat_plan: list[_Planned],
    ) -> None:
        self.tensors = tensors
        self.num_rows = num_rows
        self.device = device
        self.shapes = [tensor.shape for tensor in tensors]
        self.flat_size = flat_size
        self.flat_plan = flat_plan


@dataclass(frozen=True, eq=False, repr=False)
class PayloadLayout:
    """The byte layout of one payload: immutable, picklable, equal where the wire layout is equal.

    Attributes:
        name: what errors call the payload (``"request"``); no part of the fingerprint.
        batch_size: batch dimensions of one payload, ``()`` for single observations.
        leaves: sorted by key.
        row_bytes: bytes of a row, a positive multiple of ``ALIGNMENT``.
        fingerprint: SHA-256 in hex of all that both sides of a wire must agree on.
    """

    name: str
    batch_size: torch.Size
    leaves: tuple[Leaf, ...]
    row_bytes: int = field(init=False)
    fingerprint: str = field(init=False)
    _plan: tuple[_Planned, ...] = field(init=False)
    _tree: _Tree = field(init=False)

    def __post_init__(self) -> None:
        derive = object.__setattr__
        end = max(leaf.offset + leaf.nbytes for leaf in self.leaves)
        derive(self, "row_bytes", max(_aligned(end), ALIGNMENT))
        derive(self, "_tree", _tree_of([(leaf.key, i) for i, leaf in enumerate(self.leaves)]))
        plan = [(short_key(x.key), self.batch_size + x.shape, x.dtype) for x in self.leaves]
        derive(self, "_plan", tuple(plan))
        wire = [self.describe(), [leaf.offset for leaf in self.leaves], self.row_bytes]
        derive(self, "fingerprint", hashlib.sha256(json.dumps(wire).encode()).hexdigest())

    @classmethod
    def from_spec(cls, spec: object, *, name: str = "request") -> PayloadLayout:
        """Lay out the leaves of an example payload.

        Args:
            spec: a TensorDict or tensorclass of example tensors (shapes and dtypes count, values
                and devices do not); a mapping, possibly nested, of keys to tensors (``batch_size``
                is then ``()``); an object whose ``zero()`` gives a TensorDict, such as TorchRL's
                ``Composite``; or a ready layout, which is returned as it is.
            name: what errors call the payload.

        Raises:
            TypeError: ``spec`` is none of these, a leaf is no dense tensor, or its dtype is
                quantized or smaller than a byte.
            ValueError: there is no leaf, a key is both a leaf and a level above one, or the
                shapes of a lazy stack differ.
        """
        if isinstance(spec, PayloadLayout):
            return spec
        example = example_of(spec, name)
        batch_size = example.batch_size if is_tensor_collection(example) else torch.Size()
        try:
            tensors = sorted(walk(example, (), name), key=lambda item: item[0])
        except RuntimeError as exc:
            raise ValueError(
                f"{name} spec: expected one shape per leaf, found none: {exc}"
            ) from exc
        check_keys([key for key, _ in tensors], name)
        return cls(name, batch_size, tuple(_place(tensors, len(batch_size), name)))

    def describe(self) -> dict[str, Any]:
        """The wire layout in JSON values; keys are ``repr`` texts: ``'a.b'`` or ``('a', 'b')``."""
        leaves = {repr(short_key(x.key)): [word(x.dtype), list(x.shape)] for x in self.leaves}
        return {
            "batch_size": list(self.batch_size),
            "leaves": leaves,
            "byte_order": sys.byteorder,
            "alignment": ALIGNMENT,
        }

    def difference(self, other_description: Mapping[str, Any]) -> str:
        """One line on the first differences from another's :meth:`describe`; empty without any."""
        mine, other = self.describe(), dict(other_description)
        here, there = mine.pop("leaves"), other.pop("leaves", {})
        found = [
            f"{what}: {value} here, {other.get(what)} there"
            for what, value in mine.items()
            if value != other.get(what)
        ]
        differing = [key for key in sorted({*here, *there}) if here.get(key) != there.get(key)]
        found += [leaf_difference(key, here, there) for key in differing]
        more = len(found) - _DIFFERENCES_SHOWN
        return "; ".join(found[:_DIFFERENCES_SHOWN] + [f"and {more} more"] * (more > 0))

    def new_rows(self, n: int | None = None, *, header_bytes: int = 0) -> Tensor:
        """Zeroed CPU memory for rows: uint8, ``[header_bytes + row_bytes]`` or ``[n, ...]`` of it.

        The row itself is ``rows[..., header_bytes:]``. The memory can be written in and outside
        inference mode, wherever it was made. ``ValueError`` if ``header_bytes`` is not a multiple
        of ``ALIGNMENT``.
        """
        if header_bytes < 0 or header_bytes % ALIGNMENT:
            raise ValueError(f"header_bytes: expected a multiple of 16, found {header_bytes}")
        shape = (*(() if n is None else (n,)), header_bytes + self.row_bytes)
        with torch.inference_mode(False):
            return torch.zeros(shape, dtype=torch.uint8, device="cpu")

    def views(self, row: Tensor) -> RowViews:
        """Typed views of ``row``: uint8 ``[row_bytes]`` or ``[n, row_bytes]``, sharing its memory.

        Raises:
            ValueError: another dtype or shape, a row that does not start at a multiple of
                ``ALIGNMENT``, or an inference tensor (which only inference mode may write).
        """
        self._check_row(row)
        lead = row.shape[:-1]
        with torch.inference_mode(False):
            tensors = [
                row[..., x.offset : x.offset + x.nbytes].view(dtype).view(lead + shape)
                for x, (_, shape, dtype) in zip(self.leaves, self._plan, strict=True)
            ]
        num_rows = row.shape[0] if row.dim() == 2 else None
        flat_size, flat_plan = self._flat(num_rows or 0)
        return RowViews(tensors, num_rows, row.device, flat_size, flat_plan)

    def _flat(self, rows: int) -> tuple[torch.Size, list[_Planned]]:
        """Batch size and leaves of ``rows`` payloads with their batch dimensions flattened."""
        size = torch.Size((rows * prod(self.batch_size),))
        pairs = zip(self._plan, self.leaves, strict=True)
        return size, [(key, size + leaf.shape, dtype) for (key, _, dtype), leaf in pairs]

    def _check_row(self, row: Tensor) -> None:
        label, size, starts = f"{self.name} rows", self.row_bytes, row.stride()[:-1]
        if row.dtype != torch.uint8 or row.dim() not in (1, 2) or row.shape[-1] != size:
            expected = f"uint8[{size}] or uint8[n, {size}]"
            raise ValueError(f"{label}: expected {expected}, found {text(row)}")
        if row.stride(-1) != 1 or any(x % ALIGNMENT for x in (row.storage_offset(), *starts)):
            found = f"offset {row.storage_offset()} and strides {row.stride()}"
            raise ValueError(
                f"{label}: expected dense rows at multiples of 16 bytes, found {found}"
            )
        if row.is_inference():
            raise ValueError(f"{label}: expected a normal tensor, found one of inference mode")

    def pack(self, payload: TensorDictBase, views: RowViews) -> None:
        """Check a TensorDict or tensorclass, then copy its leaves into one row.

        Keys that are not in the layout are dropped. Nothing is written unless every leaf passes.
        The row keeps no reference to the payload, and nothing is recorded for autograd.

        Raises:
            TypeError: ``payload`` is neither; a leaf is no dense tensor, has another dtype
                (nothing is cast) or lies on another device.
            ValueError: a missing key, another shape or batch size, or a lazy stack whose shapes
                differ.
        """
        if type(payload) is not TensorDict:
            self._check_collection(payload)
        if payload.batch_size != self.batch_size:
            expected, found = list(self.batch_size), list(payload.batch_size)
            raise ValueError(f"{self.name} batch_size: expected {expected}, found {found}")
        if views.num_rows is not None:
            raise ValueError(f"{self.name}: expected views of one row, found {views.num_rows} rows")
        device = views.device
        sources = [self._leaf(payload, *planned, device) for planned in self._plan]
        if device.type == "cuda" and not _SINGLY.isdisjoint([x.dtype for x in self.leaves]):
            for target, source in zip(views.tensors, sources, strict=True):
                target.copy_(source)
        else:
            torch._foreach_copy_(views.tensors, sources)

    def unpack(self, views: RowViews, *, copy: bool = True) -> TensorDict:
        """The payload in one row, of :attr:`batch_size`.

        With ``copy`` the tensors are the caller's own, and no inference tensors even in inference
        mode. Without it they share the row's memory and change with it.
        """
        if views.num_rows is not None:
            raise ValueError(f"{self.name}: expected views of one row, found {views.num_rows} rows")
        if not copy:
            # New tensors, because requires_grad_() on ours would forbid every later write.
            tensors = [t.detach() for t in views.tensors]
        elif torch.is_inference_mode_enabled():
            tensors = _normal_clones(views.tensors)
        else:
            tensors = [t.clone() for t in views.tensors]
        return self.assemble(tensors)

    def assemble(self, tensors: Sequence[Tensor]) -> TensorDict:
        """A payload of ``tensors``, one for each leaf in the layout's order; they are not checked."""
        return _nest(self._tree, tensors, self.batch_size)

    def reader(
        self, views: RowViews, extra: Mapping[_Key, Tensor] | None = None
    ) -> Callable[[], TensorDict]:
        """A function that unpacks one row again and again, each time into tensors of its own.

        Args:
            views: of one row.
            extra: more keys for every payload and where to copy them from, ``[*batch_size]``; a
                leaf of the layout with the same key wins.
        """
        keys = {leaf.key: tensor for leaf, tensor in zip(self.leaves, views.tensors, strict=True)}
        sources = {**(extra or {}), **keys}
        tree = _tree_of([(key, i) for i, key in enumerate(sorted(sources))])
        tensors, batch_size = [sources[key] for key in sorted(sources)], self.batch_size

        def read() -> TensorDict:
            if torch.is_inference_mode_enabled():
                return _nest(tree, _normal_clones(tensors), batch_size)
            return _nest(tree, [t.clone() for t in tensors], batch_size)

        return read

    def unpack_rows(self, views: RowViews, n: int | None = None) -> TensorDict:
        """The first ``n`` rows of a block (default all) as one batch, ``[n * prod(batch_size)]``.

        The tensors share the rows' memory if :attr:`batch_size` is ``()``, or where the strides
        allow it; otherwise they are copies. For a whole block of single observations they are the
        views themselves.
        """
        rows = self._rows(views, n)
        tensors, size, plan = views.tensors, views.flat_size, views.flat_plan
        if rows != views.num_rows:
            tensors = [t[:rows] for t in tensors]
            size, plan = self._flat(rows)
        if self.batch_size:
            pairs = zip(tensors, plan, strict=True)
            tensors = [tensor.reshape(shape) for tensor, (_, shape, _) in pairs]
        return _nest(self._tree, tensors, size)

    def pack_rows(self, results: TensorDictBase, views: RowViews, n: int) -> None:
        """Write one batch into the first ``n`` rows of a block: the inverse of ``unpack_rows``.

        Leaves are ``[n * prod(batch_size), *shape]``, on any device. Undeclared keys are dropped.
        Nothing is written unless every leaf passes.

        Raises:
            KeyError: a declared key is missing.
            TypeError: ``results`` is no TensorDict or tensorclass; a leaf is no dense tensor or
                has another dtype (nothing is cast).
            ValueError: another shape, or more rows than the block has.
        """
        if type(results) is not TensorDict:
            self._check_collection(results)
        rows = self._rows(views, n)
        targets, plan = views.tensors, views.flat_plan
        if rows != views.num_rows:
            targets = [t[:rows] for t in targets]
            plan = self._flat(rows)[1]
        sources = [self._leaf(results, *planned, None) for planned in plan]
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source.reshape(target.shape) if self.batch_size else source)

    def select_rows(self, results: TensorDictBase, n: int) -> TensorDict:
        """The declared leaves of one batch, checked as by :meth:`pack_rows`, ``[n * prod(batch_size)]``; no copy."""
        if type(results) is not TensorDict:
            self._check_collection(results)
        size, plan = self._flat(n)
        return _nest(self._tree, [self._leaf(results, *planned, None) for planned in plan], size)

    def _rows(self, views: RowViews, n: int | None) -> int:
        if views.num_rows is None:
            raise ValueError(f"{self.name}: expected views of a block of rows, found one row")
        rows = views.num_rows if n is None else n
        if not 0 <= rows <= views.num_rows:
            raise ValueError(f"{self.name}: expected 0 to {views.num_rows} rows, found n={n}")
        return rows

    def _check_collection(self, payload: object) -> None:
        if isinstance(payload, type) or not is_tensor_collection(payload):
            found = type(payload).__qualname__
            raise TypeError(f"{self.name}: expected a TensorDict or a tensorclass, found {found}")

    def _leaf(
        self,
        payload: TensorDictBase,
        key: str | _Key,
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device | None,
    ) -> Tensor:
        try:
            # For a plain key, the accessor behind get(): a sixth of its time.
            plain = type(payload) is TensorDict and type(key) is str
            leaf: Any = payload._get_str(key, None) if plain else payload.get(key)  # type: ignore[no-untyped-call]
            fits = (
                isinstance(leaf, Tensor)
                and leaf.dtype is dtype
                and leaf.shape == shape
                and leaf.layout is torch.strided
                and (device is None or leaf.device == device)
            )
        except _UNREADABLE as exc:
            found = f"a leaf that cannot be read: {exc}"
            raise ValueError(
                f"{self.name} {key!r}: expected a dense tensor, found {found}"
            ) from exc
        if not fits:
            label = f"{self.name} {key!r}: expected {word(dtype)}{list(shape)}, found"
            raise misfit(label, payload, leaf, shape, dtype, device)
        tensor: Tensor = leaf.detach() if leaf.requires_grad else leaf
        return tensor

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PayloadLayout):
            return NotImplemented
        return self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.name, self.batch_size, self.leaves)

    def __repr__(self) -> str:
        words = [f"{short_key(x.key)!r}: {word(x.dtype)}{list(x.shape)}" for x in self.leaves]
        size = f"batch_size={list(self.batch_size)}, row_bytes={self.row_bytes}"
        return f"PayloadLayout({self.name}: {{{', '.join(words)}}}, {size})"


def _normal_clones(tensors: Iterable[Tensor]) -> list[Tensor]:
    with torch.inference_mode(False):
        return [t.clone() for t in tensors]


def _nest(tree: _Tree, tensors: Sequence[Tensor], batch_size: torch.Size) -> TensorDict:
    source: dict[str, Any] = {
        key: tensors[below] if isinstance(below, int) else _nest(below, tensors, batch_size)
        for key, below in tree
    }
    # The constructor without its checks, half its time: our tensors have these batch dimensions.
    made: TensorDict = TensorDict._new_unsafe(source, batch_size=batch_size)  # type: ignore[arg-type]
    return made


def _tree_of(entries: Iterable[tuple[_Key, int]]) -> _Tree:
    levels: dict[str, list[tuple[_Key, int]]] = {}
    for key, index in entries:
        levels.setdefault(key[0], []).append((key[1:], index))
    return tuple(
        (part, _tree_of(below) if below[0][0] else below[0][1]) for part, below in levels.items()
    )


def _place(tensors: Iterable[tuple[_Key, Tensor]], batch_dims: int, name: str) -> Iterator[Leaf]:
    offset = 0
    for key, tensor in tensors:
        label, dtype = f"{name} {short_key(key)!r}", tensor.dtype
        if tensor.is_nested or tensor.layout is not torch.strided:
            found = "a nested tensor" if tensor.is_nested else f"one of {tensor.layout}"
            raise TypeError(f"{label}: expected a dense tensor, found {found}")
        if dtype not in _DTYPES:
            raise TypeError(f"{label}: expected a dtype of whole bytes, found {word(dtype)}")
        nbytes = tensor.numel() * dtype.itemsize
        yield Leaf(key, tensor.shape[batch_dims:], dtype, offset, nbytes)
        offset += _aligned(nbytes)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
