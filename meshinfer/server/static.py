"""Batches of one size: filled up with copies of the last request, and cut again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from meshinfer.items import stack_items
from meshinfer.layout import PayloadLayout

__all__ = ["StaticBatch", "example_batch", "first_rows"]


class StaticBatch:
    """Memory for batches of ``size`` requests, which is used again and again.

    Its leaves are dense and stay where they are, so that a compiled policy finds the same strides and the same
    alignment in every pass, however many requests there are and wherever they lay.

    It lies where the batches do.

    Args:
        size: requests in each batch.
        pinned: page-locked, for copies from the CPU to a GPU.
    """

    def __init__(self, size: int, *, pinned: bool = False) -> None:
        self.size = size
        self._pinned = pinned
        self._whole: TensorDictBase | None = None
        self._each = 0
        self._cuts: dict[int, _Cut] = {}

    def fill(self, batch: TensorDictBase, count: int) -> TensorDictBase:
        """The ``count`` requests in ``batch`` and copies of the last one.

        Args:
            batch: tensors ``[count * rows of one request, ...]``, of the same keys, shapes and dtypes every time.
            count: at least 1 and at most ``size``.

        Returns:
            ``size`` requests; valid until the next call.
        """
        whole = self._whole
        if whole is None:
            whole = self._make(batch, count)
        cut = self._cuts.get(count)
        if cut is None:
            cut = self._cuts[count] = _Cut(whole, count, self.size, self._each)
        cut.write([batch.get(key) for key in cut.keys])
        # New tensors, because what a policy does to ours in place would last.
        filled: TensorDictBase = whole.apply(Tensor.detach)  # type: ignore[assignment]
        return filled

    def first(self, results: TensorDictBase, count: int) -> TensorDictBase:
        """What was computed for the ``count`` requests of the last :meth:`fill`."""
        return first_rows(results, count * self._each, self.size * self._each)

    def _make(self, batch: TensorDictBase, count: int) -> TensorDictBase:
        self._each = batch.batch_size[0] // count
        rows = self.size * self._each
        with torch.inference_mode(False):
            whole: TensorDictBase = batch.apply(  # type: ignore[assignment]
                lambda leaf: torch.empty(
                    (rows, *leaf.shape[1:]),
                    dtype=leaf.dtype,
                    device=leaf.device,
                    pin_memory=self._pinned and leaf.device.type == "cpu",
                ),
                batch_size=[rows],
            )
        self._whole = whole
        return whole


class _Cut:
    """Where ``count`` requests go and where the copies of the last one: views, made once for each ``count``."""

    def __init__(self, whole: TensorDictBase, count: int, size: int, each: int) -> None:
        self.keys = list(whole.keys(True, True))
        leaves = [whole.get(key) for key in self.keys]
        self._heads = [leaf[: count * each] for leaf in leaves]
        self._tails = [
            leaf[count * each :].unflatten(0, (size - count, each))
            for leaf in leaves
            if count < size
        ]
        self._last = (count - 1) * each

    def write(self, leaves: Sequence[Tensor]) -> None:
        """Copy the requests, then the last one again and again."""
        for head, leaf in zip(self._heads, leaves, strict=True):
            head.copy_(leaf)
        for tail, head in zip(self._tails, self._heads, strict=False):
            tail.copy_(head[self._last :])


def first_rows(results: TensorDictBase, rows: int, total: int) -> TensorDictBase:
    """The first ``rows`` of what a policy returned for a static batch of ``total`` rows.

    Raises:
        ValueError: it returned another number of rows.
    """
    if not results.batch_dims:  # then only the leaves can tell
        cut: TensorDictBase = results.apply(  # type: ignore[assignment]
            lambda leaf: leaf[:rows] if leaf.shape[:1] == (total,) else leaf
        )
        return cut
    if results.batch_size[0] != total:
        raise ValueError(
            f"the policy returned {results.batch_size[0]} rows for a static batch of {total}; "
            "the first dimension of its result is the requests"
        )
    return results if rows == total else results[:rows]


def example_batch(
    specs: Sequence[Any],
    size: int,
    collate: Callable[[list[TensorDictBase]], TensorDictBase] | None,
) -> TensorDictBase:
    """A batch of ``size`` equal requests, of the first spec that is not ``None``: itself if a TensorDict, else zeros.

    Raises:
        ValueError: there is none.
        TypeError: as in :meth:`~meshinfer.layout.PayloadLayout.from_spec`.
    """
    spec = next((one for one in specs if one is not None), None)
    if spec is None:
        raise ValueError(
            "prepare() needs request_spec=: neither the server nor its transport has one"
        )
    if not isinstance(spec, TensorDictBase):
        layout = PayloadLayout.from_spec(spec)
        spec = layout.unpack(layout.views(layout.new_rows()))
    return (collate or stack_items)([spec] * size)
