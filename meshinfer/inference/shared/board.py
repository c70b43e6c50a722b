"""The shared memory of one slot transport: who writes which word, and when.

Every word has one writer, so that a process that dies between two of them leaves nothing half done that another would
wait for:

========================= ============================================================ ==========================
word                      written by                                                   meaning
========================= ============================================================ ==========================
``closed``                who made the memory                                          nobody will serve any more
``served``, ``left``      the server                                                   one has begun; has gone
``posted[slot]``          who holds the slot                                           counts its requests
``requests[slot]``        who holds the slot                                           id, interaction, time; row
``responses[slot]``       the server                                                   id, kind, version; row
``busy[slot]``            who holds the slot                                           a hint where one is free
``attached``, ``came``    who holds the slot                                           its state; how many have had it
========================= ============================================================ ==========================

A request is complete when its id is set, and is answered when the response has the same id. Ids are never used twice,
by nobody: who holds a slot after another begins at a random number. A slot is held by a lock on one byte of the file,
which the kernel gives back when its process dies; the server holds one such byte, and so does who made the memory.
"""

from __future__ import annotations

import json
import secrets
import threading
import weakref
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from meshinfer.errors import PeerLostError, ServerClosedError, TransportError
from meshinfer.layout import PayloadLayout
from meshinfer.memory import BlockHandle, Cutter, SharedBlock, lined
from meshinfer.semaphore import SEMAPHORE_BYTES
from meshinfer.slots import SlotBank

__all__ = ["NO_VERSION", "Board", "BoardHandle", "Kind", "Request", "Response", "new_identifier"]

NO_VERSION = -1
LOOK_SECONDS = 0.25
"""How often a waiter looks whether the other side lives. Nobody is woken by a death."""

_LINE = 64
_CLOSED, _SERVED, _LEFT = 0, 1, 2
_KEY_BYTES = 448
_ROOM_FOR_ERRORS = 2048
_FIRST_SLOT_LOCK = 16


_opened: weakref.WeakValueDictionary[bytes, Board] = weakref.WeakValueDictionary()
"""One for each block, so that all clients of a process know which slots it holds."""
_opening = threading.Lock()


class Lock(IntEnum):
    """Bytes of the file that one process at a time locks, besides one for each slot."""

    OWNER = 0
    SERVER = 1


class Request(IntEnum):
    """Positions in a request's header, as int64."""

    ID = 0
    """0 while the row is being written, and after its client gave it up."""
    INTERACTION = 1
    SUBMITTED = 2
    """As float64, seconds of ``time.perf_counter()``."""


class Response(IntEnum):
    """Positions in a response's header, as int64."""

    ID = 0
    KIND = 1
    VERSION = 2
    LENGTH = 3
    """Errors only: bytes of the encoded exception."""
    PID = 4
    DESCRIPTOR = 5
    """Large errors only: where the server keeps them."""
    SUMMARY = 6
    """Large errors only: bytes of what fits into the row."""


class Kind(IntEnum):
    """What a response is."""

    RESULT = 1
    ERROR = 2
    """An encoded exception, in the row's place."""
    LARGE_ERROR = 3
    """An encoded exception, in a file that the server keeps open until the slot's next request."""


def new_identifier() -> int:
    """Where a client begins to count its requests: at a place of its own."""
    return secrets.randbits(62) | 1


@dataclass(frozen=True)
class BoardHandle:
    """A board, for another process. Picklable."""

    block: BlockHandle
    request_layout: PayloadLayout
    response_layout: PayloadLayout
    num_slots: int

    def open(self) -> Board:
        """The board; errors as in :meth:`~meshinfer.memory.BlockHandle.open`."""
        with _opening:
            found = _opened.get(self.block.token)
            if found is None:
                block = self.block.open()
                found = Board(block, self.request_layout, self.response_layout, self.num_slots)
                _opened[self.block.token] = found
            return found


class Board:
    """Words, doorbells and rows of one transport, as one process sees them.

    Args:
        block: the memory.
        request_layout, response_layout: of the rows.
        num_slots: requests that can be in flight.
        create: it is new.
    """

    def __init__(
        self,
        block: SharedBlock,
        request_layout: PayloadLayout,
        response_layout: PayloadLayout,
        num_slots: int,
        *,
        create: bool = False,
    ) -> None:
        self.block = block
        self.num_slots = num_slots
        self.handle = BoardHandle(block.handle, request_layout, response_layout, num_slots)
        take = Cutter(block.memory)
        self._words = take(_LINE).cast("q")
        self._key = take(_KEY_BYTES)
        self.busy = take(num_slots)
        self.attached = take(num_slots)
        self.came = take(4 * num_slots).cast("I")
        posted = take(4 * num_slots)
        self.posted = posted.cast("I")
        self.posted_octets = posted
        self.posted_counts = np.frombuffer(posted, dtype=np.uint32)
        bell = take.semaphores(3 + num_slots, create)
        self.work, self.vacancy, self.left, *self.replied = bell
        nbytes = SlotBank.nbytes(request_layout, num_slots)
        self.requests = SlotBank(request_layout, num_slots, take.tensor(nbytes))
        nbytes = SlotBank.nbytes(response_layout, num_slots, min_row_bytes=_ROOM_FOR_ERRORS)
        memory = take.tensor(nbytes)
        self.responses = SlotBank(
            response_layout, num_slots, memory, min_row_bytes=_ROOM_FOR_ERRORS
        )

    @classmethod
    def create(
        cls, request_layout: PayloadLayout, response_layout: PayloadLayout, num_slots: int
    ) -> Board:
        """A new board, owned by this process; errors as in :meth:`~meshinfer.memory.SharedBlock.create`."""
        nbytes = _LINE + _KEY_BYTES + 2 * lined(num_slots) + 2 * lined(4 * num_slots)
        nbytes += (3 + num_slots) * SEMAPHORE_BYTES
        nbytes += SlotBank.nbytes(request_layout, num_slots)
        nbytes += SlotBank.nbytes(response_layout, num_slots, min_row_bytes=_ROOM_FOR_ERRORS)
        block = SharedBlock.create(nbytes, f"a slot transport with num_slots={num_slots}")
        board = cls(block, request_layout, response_layout, num_slots, create=True)
        block.hold(Lock.OWNER)
        with _opening:
            _opened[block.handle.token] = board
        return board

    @property
    def closed(self) -> bool:
        """Whether nobody serves any more, and said so."""
        words = self._words
        return bool(words[_CLOSED] or words[_LEFT])

    @property
    def ended(self) -> bool:
        """Whether nobody will serve ever again."""
        return bool(self._words[_CLOSED])

    @property
    def served(self) -> bool:
        """Whether a server has begun to serve."""
        return bool(self._words[_SERVED])

    def close(self) -> None:
        """By who made it: nobody will be answered any more; wakes all who wait."""
        self._words[_CLOSED] = 1
        self._wake_all()

    def leave(self) -> None:
        """By a server in another process: as :meth:`close`, until another one begins to serve."""
        self._words[_LEFT] = 1
        self._wake_all()

    def _wake_all(self) -> None:
        for semaphore in (self.work, self.vacancy, self.left, *self.replied):
            semaphore.post()

    def begin_serving(self) -> None:
        """Make this process the server.

        Raises:
            ServerClosedError: the board is closed for good.
            TransportError: another process serves it.
        """
        if self._words[_CLOSED]:
            raise ServerClosedError("this transport was closed by the process that made it")
        if not self.block.hold(Lock.SERVER):
            pid = self.block.holder(Lock.SERVER)
            raise TransportError(f"process {pid} serves this transport already")
        self._words[_SERVED] += 1
        self._words[_LEFT] = 0

    def end_serving(self) -> None:
        """This process does not serve any more."""
        self.block.release(Lock.SERVER)

    def error(self) -> TransportError | None:
        """Why no reply will come, ``None`` while one may."""
        if self.closed:
            return ServerClosedError("the server has shut down")
        if self.served and self.block.holder(Lock.SERVER) is None:
            return None if self.closed else PeerLostError("the server's process has died")
        if self.block.holder(Lock.OWNER) is None:
            return PeerLostError(
                f"process {self.block.handle.pid}, which made this transport, has ended"
            )
        return None

    def hold_slot(self, slot: int) -> bool:
        """Take a slot for this process: ``False`` if somebody has it."""
        return self.block.hold(_FIRST_SLOT_LOCK + slot)

    def release_slot(self, slot: int) -> None:
        """Give a slot back."""
        self.block.release(_FIRST_SLOT_LOCK + slot)

    def slot_holder(self, slot: int) -> int | None:
        """Process id of who has the slot."""
        return self.block.holder(_FIRST_SLOT_LOCK + slot)

    def void(self, slot: int) -> None:
        """For who holds the slot: its request needs no answer."""
        self.requests[slot].header[Request.ID] = 0

    @property
    def version_key(self) -> tuple[str, ...] | None:
        """Where clients put the policy version; the server writes it before it serves."""
        text = bytes(self._key).rstrip(b"\0")
        return tuple(json.loads(text) or ()) or None if text else ("policy_version",)

    @version_key.setter
    def version_key(self, key: tuple[str, ...] | None) -> None:
        text = json.dumps(key).encode()
        if len(text) > _KEY_BYTES:
            raise ValueError(f"policy_version_key: expected a shorter key, found {len(text)} bytes")
        self._key[:] = text.ljust(_KEY_BYTES, b"\0")
