"""Between threads of one process: payloads of one structure, in rows."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase

from meshinfer.arguments import as_count
from meshinfer.device_rows import DeviceReplies, DeviceRequests
from meshinfer.inference.exchange import LocalRequest, Member
from meshinfer.inference.interaction import current_interaction
from meshinfer.inference.local import LocalClient, LocalTransport
from meshinfer.inference.rowcall import NO_VERSION, RowCall
from meshinfer.inference.rowwise import row_layouts, unpacked, version_of
from meshinfer.inference.slot_rows import SlotRows, SlotStaging
from meshinfer.inference.version import declared_stamp, stamped
from meshinfer.items import split_items
from meshinfer.layout import PayloadLayout
from meshinfer.rows import Row, RowBlock, copy_row, read_rows
from meshinfer.slots import SlotBank

__all__ = ["SlotClient", "SlotTransport"]


class _RowRequest(LocalRequest):
    """One request after another of one thread, in the same row, whose replies are copied into another one.

    A :class:`~meshinfer.inference.rowcall.RowCall`, and its own future.
    """

    __slots__ = ("_error", "_gate", "frame", "reply", "reply_row", "request", "version")

    def __init__(self, member: Member, request: PayloadLayout, response: PayloadLayout) -> None:
        super().__init__(member, current_interaction())
        self.frame, answer = SlotBank(request, 1)[0], SlotBank(response, 1)[0]
        self.request, self.reply = self.frame.views, answer.views
        self.reply_row = answer.row
        self.version = NO_VERSION
        self._error: BaseException | None = None
        self._gate = threading.Lock()  # held, except between an answer and its receipt
        self._gate.acquire()

    def send(self) -> None:
        """As :meth:`~meshinfer.inference.rowcall.RowCall.send`."""
        member = self.member
        member.check_open()
        member.in_flight[self] = self
        self.arrived = time.perf_counter()
        member.exchange.put(self)
        member.look_again()

    def receive(self) -> int:
        """As :meth:`~meshinfer.inference.rowcall.RowCall.receive`: a serving thread that ends closes the exchange."""
        self._gate.acquire()
        error, self._error = self._error, None
        if error is not None:
            raise error
        return self.version

    def accept(self, row: Row, version: int | None) -> None:
        """By the server: ``row`` is the reply."""
        if self.member.in_flight.pop(self, None) is not None:
            copy_row(row, self.reply_row)
            self.version = NO_VERSION if version is None else version
            self._gate.release()

    def fail(self, error: BaseException) -> None:
        """Make the thread raise ``error``, unless it has its reply; of several that would, the first one does."""
        if self.member.in_flight.pop(self, None) is not None:
            self._error = error
            self._gate.release()

    def release(self) -> None:
        """Nothing: the row is written again when the thread has its reply."""


class SlotClient(LocalClient):
    """A client of a :class:`SlotTransport`. Threads may share it."""

    def row_call(self, request: PayloadLayout, response: PayloadLayout) -> RowCall | None:
        """As :meth:`~meshinfer.inference.rowcall.RowCalling.row_call`."""
        rows = self._pack
        assert isinstance(rows, SlotRows)
        if (rows.layout, rows.response_layout) != (request, response):
            return None
        return _RowRequest(self._member, request, response)


class SlotTransport(LocalTransport):
    """Requests of one structure between threads of one process, one slot for each environment.

    A request is packed into a row by the thread that sends it, and whole batches of rows are gathered; no lock is held
    on the way. A client may have more than one request in flight; those beyond the slots take rows that are made for
    them. Implements :class:`~meshinfer.inference.protocol.BatchedTransport`.

    Args:
        num_slots: clients at once, at most; one that is closed or dropped makes room for another.
        request_spec: example of one request; its keys travel, others are left out. Without it the first request fixes
            keys, shapes and dtypes, and one that differs is refused. CPU tensors. Goes with ``response_spec``.
        response_spec: example of one reply, with the same ``batch_size``. Without it a reply has all that the policy
            returns.

    Raises:
        ValueError, TypeError: an argument cannot work; says which and what to give instead.
    """

    transport_kind = "slot"
    client_class = SlotClient

    def __init__(
        self, num_slots: int, *, request_spec: Any = None, response_spec: Any = None
    ) -> None:
        as_count("num_slots", num_slots)
        if (request_spec is None) != (response_spec is None):
            raise ValueError("request_spec and response_spec go together: give both, or neither")
        layout = None
        self.response_layout: PayloadLayout | None = None
        if request_spec is not None:
            layout, self.response_layout = row_layouts(request_spec, response_spec)
        self.num_slots = num_slots
        self._rows = SlotRows(num_slots, layout, self.response_layout)
        leaves = self.response_layout.leaves if self.response_layout is not None else ()
        self._declared = frozenset(leaf.key for leaf in leaves)
        super().__init__(self._rows, num_slots=num_slots)

    @property
    def request_layout(self) -> PayloadLayout | None:
        """What requests look like; ``None`` until it is known."""
        return self._rows.layout

    def drain_with_timing(
        self, max_items: int
    ) -> tuple[list[TensorDictBase], list[Any], list[float]]:
        """See :meth:`~meshinfer.inference.draining.Draining.drain_with_timing`; arrived is when it was sent."""
        return unpacked(self.drain_slots(max_items), self.request_layout)

    def drain_slots(self, max_items: int) -> list[Any]:
        """At most ``max_items`` waiting requests, oldest first, still in their rows."""
        return self._exchange.take(max_items)

    @property
    def stages_devices(self) -> bool:
        """Whether replies have a layout, and can come back from a policy's device in rows."""
        return self.response_layout is not None

    def request_batch(self, capacity: int, device: torch.device | None = None) -> SlotStaging:
        """Staging for ``capacity`` requests; ``device`` is the policy's, ``None`` for the CPU."""
        return SlotStaging(capacity, self._rows.layout, device)

    def response_batch(
        self, capacity: int, device: torch.device | None = None
    ) -> RowBlock | DeviceReplies | None:
        """Staging for replies that go into rows, or come from ``device``; others need none between threads."""
        layout = self.response_layout
        if layout is None or device is None:
            return None if layout is None else RowBlock(layout, capacity)
        return DeviceReplies(layout, capacity, device)

    def gather_requests(self, slots: Sequence[Any], out: SlotStaging) -> TensorDictBase:
        """The policy's input: the requests' batch dimensions are flattened into one. Valid until the next gather."""
        layout = self._known()
        block = out.block(layout)
        if isinstance(block, DeviceRequests):
            batch = block.gather([request.frame.row for request in slots], tuple)
        elif len(slots) == 1:  # read in place: it is released when it has been answered
            frame = slots[0].frame
            return read_rows(layout, frame.block_views, frame.block)
        else:
            batch = block.gather([request.frame.row for request in slots])
        for request in slots:
            request.release()
        return batch

    def resolve_batch(
        self,
        slots: Sequence[Any],
        results: TensorDictBase,
        out: RowBlock | DeviceReplies | None = None,
        *,
        policy_version: int | None = None,
    ) -> None:
        """Give each request its rows of ``results``, in memory of their own.

        Args:
            slots: the requests, as gathered.
            results: leading dimension ``len(slots)`` times the ``batch_size`` of one request.
            out: staging from :meth:`response_batch`.
            policy_version: of the weights that computed ``results``.

        Raises:
            KeyError, ValueError, TypeError: ``results`` does not have what the response spec declares; nobody was
                answered.
        """
        rowwise = [type(request) is _RowRequest for request in slots]
        replies: Sequence[Any] = ()
        if isinstance(out, DeviceReplies):
            results = out.land(
                results,
                len(slots),
                declared_stamp(self.policy_version_key, policy_version, self._declared),
            )
            rows = out.rows
        elif True in rowwise:
            rows = self._pack_rows(results, len(slots), out, policy_version)
        if False in rowwise:
            replies = self._split(results, len(slots), policy_version)
        for index, request in enumerate(slots):
            if rowwise[index]:
                request.accept(rows[index], policy_version)
            else:
                request.release()
                request.answer(replies[index])

    def resolve(self, callback: Any, result: TensorDictBase) -> None:
        """Give ``result``, of the ``batch_size`` of a request, to the client behind ``callback``."""
        rows = result.reshape(-1) if result.batch_dims else result.unsqueeze(0)
        declared = self.response_layout is not None  # else the version comes along as any other key
        version = version_of(result, self.policy_version_key) if declared else None
        self.resolve_batch([callback], rows, policy_version=version)

    def resolve_exception(self, callback: Any, exc: BaseException) -> None:
        """Make the client behind ``callback`` raise a copy of ``exc``."""
        callback.release()
        super().resolve_exception(callback, exc)

    def _pack_rows(
        self, results: TensorDictBase, count: int, out: RowBlock | None, version: int | None
    ) -> list[Row]:
        assert self.response_layout is not None  # a row call needs the layout of replies
        block = out or RowBlock(self.response_layout, count)
        stamp = declared_stamp(self.policy_version_key, version, self._declared)
        if stamp is not None:
            results = stamped(results, *stamp)
        block.pack(results, count)
        return block.rows

    def _split(
        self, results: TensorDictBase, count: int, version: int | None
    ) -> list[TensorDictBase]:
        key, layout = self.policy_version_key, self.response_layout

        def stamp(rows: TensorDictBase) -> TensorDictBase:
            return rows if version is None or key is None else stamped(rows, key, version)

        if layout is None:
            results = stamp(results)
        elif key in self._declared:  # then the policy need not return it
            results = layout.select_rows(stamp(results), count)
        else:
            results = stamp(layout.select_rows(results, count))
        return split_items(results, count, self._known().batch_size)

    def _known(self) -> PayloadLayout:
        layout = self._rows.layout
        assert layout is not None  # there was a request
        return layout
