"""Rows of requests between threads: their layout, which the first request may fix, and staging for a batch of them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase, is_non_tensor, is_tensor_collection

from meshinfer.arguments import as_count
from meshinfer.device_rows import DeviceRequests
from meshinfer.inference.exchange import LocalRequest, Member
from meshinfer.inference.interaction import current_interaction
from meshinfer.items import check_collection
from meshinfer.layout import PayloadLayout
from meshinfer.rows import RowBlock
from meshinfer.slots import Slot, SlotBank
from meshinfer.specs import short_key

__all__ = ["SlotRequest", "SlotRows", "SlotStaging"]

_EXTRA_ROWS = 64
"""Rows that are kept beyond one for each slot: for clients with more than one request in flight."""


class SlotRequest(LocalRequest):
    """One request and the row that it is packed in, until that is released."""

    __slots__ = ("_rows", "frame")

    def __init__(self, member: Member, interaction: int, rows: SlotRows, frame: Slot) -> None:
        super().__init__(member, interaction)
        self._rows = rows
        self.frame: Slot | None = frame

    def release(self) -> None:
        """The row has been read, or never will be."""
        frame, self.frame = self.frame, None
        if frame is not None:
            self._rows.give_back(frame)

    withdrawn = release


class SlotRows:
    """The layout of requests, and rows to pack them into."""

    def __init__(
        self, num_slots: int, layout: PayloadLayout | None, response_layout: PayloadLayout | None
    ) -> None:
        self.num_slots = num_slots
        self.layout: PayloadLayout | None = None
        self.response_layout = response_layout
        self._derived = layout is None
        self._fixing = threading.Lock()
        self._free: list[Slot] = []
        self._made = itertools.count()
        self._bank: SlotBank
        if layout is not None:
            self._lay_out(layout)

    def __call__(self, member: Member, payload: TensorDictBase) -> SlotRequest:
        """A request with a copy of ``payload``; the first one fixes the layout where none was declared."""
        layout = self.layout or self._fix(payload)
        frame = self._take(layout)
        try:
            layout.pack(payload, frame.views)
            if self._derived:
                _refuse_more(layout, payload)
        except (TypeError, ValueError) as error:
            self.give_back(frame)
            if self._derived:
                raise _explained(error) from error
            raise
        return SlotRequest(member, current_interaction(), self, frame)

    def give_back(self, frame: Slot) -> None:
        """The row may take another request."""
        if len(self._free) < self.num_slots + _EXTRA_ROWS:
            self._free.append(frame)

    def _take(self, layout: PayloadLayout) -> Slot:
        try:
            return self._free.pop()  # the one that was used last is the one that is cached
        except IndexError:
            index = next(self._made)
        return self._bank[index] if index < self.num_slots else SlotBank(layout, 1)[0]

    def _fix(self, payload: TensorDictBase) -> PayloadLayout:
        check_collection(payload)
        with self._fixing:
            if self.layout is not None:
                return self.layout  # another thread was first
            try:
                layout = PayloadLayout.from_spec(payload)
                trial = SlotBank(layout, 1)[0]
                layout.pack(payload, trial.views)  # what cannot be packed fixes nothing
            except (TypeError, ValueError) as error:
                raise _explained(error) from error
            self._lay_out(layout)
            return layout

    def _lay_out(self, layout: PayloadLayout) -> None:
        try:
            self._bank = SlotBank(layout, self.num_slots)
        except (RuntimeError, MemoryError) as error:
            raise ValueError(
                f"num_slots={self.num_slots}: rows of {layout.row_bytes} bytes for so many do not fit into memory"
            ) from error
        self.layout = layout


def _explained(error: Exception) -> Exception:
    kind = TypeError if isinstance(error, TypeError) else ValueError
    return kind(
        f"{error}. The first request fixes what transport='slot' takes; declare request_spec to have "
        "other keys left out, or use transport='queue', which takes any payload"
    )


def _refuse_more(layout: PayloadLayout, payload: TensorDictBase) -> None:
    """Nothing is left out silently where nobody said what belongs to a request."""
    if type(payload) is TensorDict and _count(payload) == len(layout.leaves):
        return
    declared = {leaf.key for leaf in layout.leaves}
    for key in _keys(payload, ()):
        if key not in declared:
            raise ValueError(
                f"request {short_key(key)!r}: expected no such key, as in the first request"
            )


def _count(node: TensorDict) -> int:
    return sum(_count(value) if type(value) is TensorDict else 1 for value in node.values())


def _keys(node: Any, prefix: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    for key, value in node.items():
        if is_tensor_collection(value) and not is_non_tensor(value):
            yield from _keys(value, (*prefix, key))
        else:
            yield (*prefix, key)


class SlotStaging:
    """Room for a batch of requests, whose layout may not be known yet."""

    def __init__(
        self, capacity: int, layout: PayloadLayout | None, device: torch.device | None
    ) -> None:
        self._capacity = as_count("capacity", capacity)
        self._device = device
        self._block: RowBlock | DeviceRequests | None = None
        if layout is not None:
            self.block(layout)

    def block(self, layout: PayloadLayout) -> RowBlock | DeviceRequests:
        """The rows."""
        if self._block is None:
            capacity, device = self._capacity, self._device
            self._block = (
                RowBlock(layout, capacity)
                if device is None
                else DeviceRequests(layout, capacity, device)
            )
        return self._block
