"""Requests between threads as requests of rows, for a server of several transports."""

from __future__ import annotations

from typing import Any

from meshinfer.inference.slot import SlotTransport
from meshinfer.inference.version import stamp_version
from meshinfer.slots import Slot, SlotBank

__all__ = ["SeatRequest", "Seats"]


class Seats:
    """The requests of a :class:`~meshinfer.inference.slot.SlotTransport`.

    Args:
        transport: with both specs.
    """

    def __init__(self, transport: SlotTransport) -> None:
        layout = transport.response_layout
        assert layout is not None
        self.transport = transport
        self.layout = layout
        self.frame = SlotBank(layout, 1)[0]

    def drain_slots(self, max_items: int) -> list[SeatRequest]:
        """At most ``max_items`` waiting requests, oldest first."""
        return [SeatRequest(self, request) for request in self.transport.drain_slots(max_items)]


class SeatRequest:
    """A :class:`~meshinfer.inference.rowwise.RowRequest`, but for errors: see :meth:`fail`.

    Args:
        seats: whose it is.
        request: as the transport gave it.
    """

    __slots__ = ("_request", "_seats", "arrived", "interaction")
    given_up = False
    """Nobody writes over a row before it is released."""

    def __init__(self, seats: Seats, request: Any) -> None:
        self._seats = seats
        self._request = request
        self.arrived: float = request.arrived
        self.interaction: int = request.interaction

    @property
    def frame(self) -> Any:
        """With the packed request, until :meth:`release`."""
        return self._request.frame

    def release(self) -> None:
        """The row may take another request."""
        self._request.release()

    def reply_frame(self) -> Slot:
        """The one row for replies: each is copied on before the next one is written."""
        return self._seats.frame

    def reply(self, frame: Slot, policy_version: int | None) -> None:
        """Give the client its reply, in memory of its own."""
        accept = getattr(self._request, "accept", None)
        if accept is not None:  # it wants the row itself
            return accept(frame.row, policy_version)  # type: ignore[no-any-return]
        key = self._seats.transport.policy_version_key
        reply = self._seats.layout.unpack(frame.views)
        if policy_version is not None and key is not None and reply.get(key, None) is None:
            stamp_version(reply, key, policy_version)
        self._request.answer(reply)

    def fail(self, exc: BaseException) -> None:
        """Make the client raise a copy of ``exc``, which need not be encoded between threads."""
        self._seats.transport.resolve_exception(self._request, exc)
