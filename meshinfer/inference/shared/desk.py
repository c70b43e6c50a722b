"""The server's side of a board: which requests have come, and their answers."""

from __future__ import annotations

import os
import struct
import threading
import time
from array import array

import numpy as np

from meshinfer.inference.remote_errors import encode_summary
from meshinfer.inference.shared.board import NO_VERSION, Board, Kind, Request, Response
from meshinfer.semaphore import memory_fence
from meshinfer.slots import Slot

__all__ = ["Desk", "SlotRequest"]

_RESULT = int(Kind.RESULT)
_IDENTIFIER = struct.Struct("<q")
_FEW_SLOTS = 64
"""Fewer are looked through in plain Python, whose code is in the caches when this process wakes up."""
_MAX_KEPT = 16
"""Large exceptions that wait to be read, each with a descriptor."""
_ID, _INTERACTION, _SUBMITTED = (int(field) for field in Request)
_ANSWERED, _KIND, _VERSION = int(Response.ID), int(Response.KIND), int(Response.VERSION)


class SlotRequest:
    """One request at the server, in its slot; a :class:`~meshinfer.inference.rowwise.RowRequest`."""

    __slots__ = ("arrived", "desk", "frame", "identifier", "interaction", "slot")

    def __init__(self, desk: Desk, slot: int, frame: Slot) -> None:
        self.desk = desk
        self.slot = slot
        self.frame = frame
        header = frame.header
        self.identifier: int = header[_ID]
        self.interaction: int = header[_INTERACTION]
        self.arrived: float = frame.floats[_SUBMITTED]

    @property
    def given_up(self) -> bool:
        """Whether its client has given it up, or another one has the slot now."""
        memory_fence()  # whoever has copied the row looks now whether it was still ours
        return bool(self.frame.header[_ID] != self.identifier)

    def release(self) -> None:
        """Nothing: its client uses the row again when it has the reply."""

    def reply_frame(self) -> Slot:
        """The slot's response, which nobody reads before :meth:`reply` says whose it is."""
        return self.desk.board.responses[self.slot]

    def reply(self, frame: Slot, policy_version: int | None) -> None:
        """Say whose the response is, and wake that client. Never waits."""
        if self.frame.header[_ID] == self.identifier:
            header = frame.header
            header[_KIND] = _RESULT
            header[_VERSION] = NO_VERSION if policy_version is None else policy_version
            memory_fence()
            header[_ANSWERED] = self.identifier
            self.desk.replied[self.slot].post()

    def reply_error(self, data: bytes) -> None:
        """Answer with an encoded exception, of any size."""
        if not self.given_up:
            self.desk.answer_error(self, data)


class Desk:
    """Finds requests on a board, in the process that serves it.

    Args:
        board: not served by anybody else.

    Raises:
        TransportError: another process serves it.
    """

    def __init__(self, board: Board) -> None:
        board.begin_serving()
        self.board = board
        self.replied = board.replied
        self._woken = False
        self._kept: dict[int, int] = {}
        self._keeping = threading.Lock()
        self._taken = [0] * board.num_slots
        # What was asked before, and never answered, is still waiting.
        self._seen = array("I", board.posted)
        for slot, count in enumerate(self._seen):
            asked = board.requests[slot].header[_ID] if count else 0
            if asked not in (0, board.responses[slot].header[_ANSWERED] if count else 0):
                self._seen[slot] = (count - 1) & 0xFFFFFFFF
        self._seen_counts = np.frombuffer(self._seen, dtype=np.uint32)

    @property
    def has_work(self) -> bool:
        """Whether a request is ready."""
        return self.board.posted_octets.tobytes() != self._seen.tobytes()

    @property
    def num_waiting(self) -> int:
        """Requests that are ready."""
        return len(self._fresh())

    def wait(self, timeout: float | None) -> bool:
        """Wait until a request is ready: whether one is. Returns early when closed or woken."""
        deadline = None if timeout is None else time.monotonic() + timeout
        board = self.board
        while not self.has_work:
            if self._woken or board.closed:
                self._woken = False
                return self.has_work
            left = 3600.0 if deadline is None else deadline - time.monotonic()
            if not board.work.wait(left) and left <= 0:
                return self.has_work
        return True

    def wake(self) -> None:
        """Make :meth:`wait` return."""
        self._woken = True
        self.board.work.post()

    def take(self, max_items: int) -> list[SlotRequest]:
        """At most ``max_items`` requests, those first that were asked first: nobody starves."""
        if not self.has_work:
            return []
        board, seen, taken = self.board, self._seen, self._taken
        asked, posted, ring = board.requests, board.posted, board.work.try_wait
        fresh, requests = self._fresh(), []
        if len(fresh) > 1:
            fresh.sort(key=lambda slot: asked[slot].floats[_SUBMITTED])
        for slot in fresh[:max_items]:
            seen[slot] = posted[slot]
            memory_fence()
            request = SlotRequest(self, slot, asked[slot])
            memory_fence()
            ring()  # its own, or an earlier one: an unneeded wake-up less
            identifier = request.identifier
            if identifier not in (0, taken[slot], board.responses[slot].header[_ANSWERED]):
                taken[slot] = identifier
                if self._kept:
                    self._forget_error(slot)
                requests.append(request)
        return requests

    def _fresh(self) -> list[int]:
        """Slots whose requests have not been taken."""
        if len(self._seen) > _FEW_SLOTS:
            fresh: list[int] = np.flatnonzero(
                self.board.posted_counts != self._seen_counts
            ).tolist()
            return fresh
        pairs = enumerate(zip(self.board.posted, self._seen, strict=True))
        return [slot for slot, (posted, seen) in pairs if posted != seen]

    def answer_error(self, request: SlotRequest, data: bytes) -> None:
        """Put an encoded exception where its client finds it."""
        slot = request.slot
        header, place = self.board.responses[slot].header, self.board.responses.octets(slot)
        header[Response.LENGTH], header[_KIND] = len(data), Kind.ERROR
        if len(data) > len(place):
            reason = self._keep_error(slot, request.identifier, data)
            data = encode_summary(data, len(place), reason)
            header[Response.SUMMARY], header[_KIND] = len(data), Kind.LARGE_ERROR
        place[: len(data)] = data
        memory_fence()
        header[_ANSWERED] = request.identifier
        self.replied[slot].post()

    def close(self) -> None:
        """Serve no more."""
        with self._keeping:
            kept, self._kept = self._kept, {}
        for descriptor in kept.values():
            os.close(descriptor)
        self.board.end_serving()

    def _keep_error(self, slot: int, identifier: int, data: bytes) -> str:
        """Keep a large exception in a file of its own, until the slot's next request or until there are too many.

        Returns:
            What to say to who does not find it any more.
        """
        header = self.board.responses[slot].header
        header[Response.PID], header[Response.DESCRIPTOR] = os.getpid(), -1
        try:
            descriptor = os.memfd_create("meshinfer-error", os.MFD_CLOEXEC)
        except OSError as error:
            return f"(the rest does not fit into the slot: {error})"
        with open(descriptor, "wb", closefd=False) as file:
            file.write(_IDENTIFIER.pack(identifier) + data)
        self._forget_error(slot)
        with self._keeping:
            self._kept[slot] = descriptor
            oldest = next(iter(self._kept)) if len(self._kept) > _MAX_KEPT else slot
        if oldest != slot:
            self._forget_error(oldest)
        header[Response.DESCRIPTOR] = descriptor
        return "(the rest was not kept long enough)"

    def _forget_error(self, slot: int) -> None:
        with self._keeping:
            descriptor = self._kept.pop(slot, None)
        if descriptor is not None:
            os.close(descriptor)
