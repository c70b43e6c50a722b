"""The shared memory of one weight transport: who writes which word, and when.

Every word has one writer, no lock is held, and whoever dies leaves nothing half done that another would wait for:

============================== ======================= ==============================================================
word                           written by              meaning
============================== ======================= ==============================================================
``closed``                     who made the memory     nobody will publish any more
``session``, ``ended``         the publisher           its session; the last session that ended in good order
``newest``                     the publisher           number and block of the newest complete version
record of a block              the publisher           where the block is, and which version it has
leases of a slot               the subscriber          blocks that it reads, and that nobody may write
``attached``, ``applied``      the subscriber          whether it is there; the version that it serves
============================== ======================= ==============================================================

A publication is complete when ``newest`` names its block. Whoever reads a block writes a lease and looks whether that
block is still the newest; whoever writes one makes another the newest and then looks for leases. Of the two, one
sees the other. Slots are held by a lock on one byte of the file, which the kernel gives back when the process dies, and
so are the places of the publisher and of who made the memory.
"""

from __future__ import annotations

import os
import secrets
import struct
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from meshinfer.errors import PeerLostError
from meshinfer.memory import BlockHandle, Cutter, SharedBlock
from meshinfer.semaphore import SEMAPHORE_BYTES, Semaphore, full_fence, memory_fence

__all__ = ["LEASES", "LOOK_SECONDS", "MOST_SUBSCRIBERS", "Record", "WeightBoard"]

LEASES: Final = 8
"""Blocks that one subscriber may read at a time."""
LOOK_SECONDS: Final = 1.0
"""How often a waiter looks whether the other side lives. Nobody is woken by a death."""
MOST_SUBSCRIBERS: Final = 4096

_LINE = 64
_CLOSED, _SESSION, _ENDED, _NEWEST = range(4)
_RECORD = struct.Struct("=qq16sqq")
_SLOT_WORDS = 16
_ATTACHED, _APPLIED_SESSION, _APPLIED = range(LEASES, LEASES + 3)
_BLOCK_BITS = 16
_BLOCK_MASK = (1 << _BLOCK_BITS) - 1
_FIRST_SLOT_LOCK = 16
_NOTHING = -1


class Lock(IntEnum):
    """Bytes of the file that one process at a time locks, besides one for each slot."""

    OWNER = 0
    PUBLISHER = 1


@dataclass(frozen=True)
class Record:
    """Where a block is, and which version of which session it has."""

    pid: int
    descriptor: int
    token: bytes
    session: int
    version: int

    def handle(self, nbytes: int) -> BlockHandle:
        """For the process that wants to read the block."""
        return BlockHandle(self.pid, self.descriptor, self.token, nbytes)


class WeightBoard:
    """Words and doorbells of one transport, as one process sees them.

    Args:
        block: the memory.
        max_subscribers: slots.
        create: it is new.
    """

    def __init__(self, block: SharedBlock, max_subscribers: int, *, create: bool = False) -> None:
        self.block = block
        self.max_subscribers = max_subscribers
        self.num_records = _num_records(max_subscribers)
        take = Cutter(block.memory)
        self._words = take(_LINE).cast("q")
        self._records = take(self.num_records * _LINE)
        self._slots = take(max_subscribers * 8 * _SLOT_WORDS).cast("q")
        self.acknowledged, *self.bells = take.semaphores(1 + max_subscribers, create)
        self._closer: Any = weakref.finalize(self, _nothing)

    @classmethod
    def create(cls, max_subscribers: int) -> WeightBoard:
        """A new board, owned by this process; errors as in :meth:`~meshinfer.memory.SharedBlock.create`."""
        nbytes = _LINE * (1 + _num_records(max_subscribers))
        nbytes += max_subscribers * 8 * _SLOT_WORDS + (1 + max_subscribers) * SEMAPHORE_BYTES
        purpose = f"a weight transport with max_subscribers={max_subscribers}"
        block = SharedBlock.create(nbytes, purpose, "allow fewer subscribers")
        block.hold(Lock.OWNER)
        board = cls(block, max_subscribers, create=True)
        bells = [board.acknowledged, *board.bells]
        board._closer = weakref.finalize(board, _close, board._words, bells, os.getpid())
        return board

    @property
    def closed(self) -> bool:
        """Whether nobody will publish any more, and said so."""
        return bool(self._words[_CLOSED])

    def close(self) -> None:
        """Nobody will publish any more, if this process made it; so it is too when nothing here uses the board."""
        self._closer()

    # For the publisher.

    def begin_session(self) -> int:
        """Make this process the publisher; the number of its session.

        Raises:
            RuntimeError: somebody else is.
        """
        if not self.block.hold(Lock.PUBLISHER):
            pid = self.block.holder(Lock.PUBLISHER)
            raise RuntimeError(
                f"these weights have a publisher already, in process {pid}; close() it first"
            )
        session = secrets.randbits(62) | 1
        self._words[_SESSION] = session
        return session

    def end_session(self) -> None:
        """This process does not publish any more."""
        self._words[_ENDED] = self._words[_SESSION]
        memory_fence()
        self.block.release(Lock.PUBLISHER)
        self.acknowledged.post()
        self.ring()

    def publish(self, index: int, record: Record) -> None:
        """Make what is in block ``index`` the newest version, and wake the subscribers. Never waits."""
        self._write(index, record)
        memory_fence()
        self._words[_NEWEST] = ((self.newest >> _BLOCK_BITS) + 1) << _BLOCK_BITS | index
        full_fence()
        self.ring()

    def forget(self, index: int) -> None:
        """Block ``index`` is given back: who has it mapped will let go of it."""
        self._write(index, Record(0, 0, b"", 0, 0))

    def ring(self) -> None:
        """Wake the subscribers."""
        for slot in self._attached():
            self.bells[slot].post()

    def used(self) -> set[int]:
        """Blocks that may not be written: the newest, and those that living subscribers read."""
        full_fence()
        newest = self.newest_index
        found = set() if newest is None else {newest}
        for slot in range(self.max_subscribers):
            begin = slot * _SLOT_WORDS
            leases = self._slots[begin : begin + LEASES].tolist()
            if any(leases) and self.holder(slot) is not None:
                found.update(lease & _BLOCK_MASK for lease in leases if lease)
        memory_fence()
        return found

    def subscribers(self) -> Iterator[int]:
        """Slots of the living ones."""
        return (slot for slot in self._attached() if self.holder(slot) is not None)

    def applied(self, slot: int, session: int) -> int | None:
        """The version of that session that a subscriber serves, if it serves one."""
        begin = slot * _SLOT_WORDS
        if self._slots[begin + _APPLIED_SESSION] != session:
            return None
        memory_fence()
        version = self._slots[begin + _APPLIED]
        return None if version == _NOTHING else version

    # For subscribers.

    @property
    def newest(self) -> int:
        """A word that is another one for each publication; 0 before the first."""
        return self._words[_NEWEST]

    @property
    def newest_index(self) -> int | None:
        """The newest version's block."""
        return self.newest & _BLOCK_MASK if self.newest else None

    def attach(self) -> int | None:
        """Take a slot for this process; ``None`` if all are taken."""
        for slot in range(self.max_subscribers):
            if self.block.hold(_FIRST_SLOT_LOCK + slot):
                begin = slot * _SLOT_WORDS
                for word in range(begin, begin + _SLOT_WORDS):
                    self._slots[word] = 0  # what a dead one has left
                self._slots[begin + _ATTACHED] = 1
                full_fence()
                return slot
        return None

    def leave(self, slot: int) -> None:
        """The subscriber will not receive any more; it keeps its slot for its leases."""
        self._slots[slot * _SLOT_WORDS + _ATTACHED] = 0
        self.acknowledged.post()

    def vacate(self, slot: int) -> None:
        """Give a slot back, when it has no leases any more."""
        self.block.release(_FIRST_SLOT_LOCK + slot)

    def lease(self, slot: int, number: int) -> int:
        """Keep the newest version's block from being written, until :meth:`unlease`; the word that named it."""
        place = slot * _SLOT_WORDS + number
        word = self.newest
        while True:
            self._slots[place] = word
            full_fence()
            now = self.newest
            if now == word:
                return word
            word = now

    def unlease(self, slot: int, number: int) -> None:
        """The block may be written; nothing is read from it any more."""
        memory_fence()
        self._slots[slot * _SLOT_WORDS + number] = 0

    def read(self, word: int) -> tuple[int, Record]:
        """The block that ``word``, for which there is a lease, names, and its record."""
        index = word & _BLOCK_MASK
        return index, self.record(index)

    def record(self, index: int) -> Record:
        """Of a block; it may change at any time without a lease."""
        return Record(*_RECORD.unpack_from(self._records, index * _LINE))

    def apply(self, slot: int, session: int, version: int) -> None:
        """Say which version this subscriber serves."""
        begin = slot * _SLOT_WORDS
        if self._slots[begin + _APPLIED_SESSION] != session:
            self._slots[begin + _APPLIED] = _NOTHING
            memory_fence()
            self._slots[begin + _APPLIED_SESSION] = session
            memory_fence()
        self._slots[begin + _APPLIED] = version
        self.acknowledged.post()

    def publishing(self, session: int) -> bool:
        """Whether the publisher of that session is there."""
        mine = self._words[_SESSION] == session != self._words[_ENDED]
        return mine and self.block.holder(Lock.PUBLISHER) is not None

    def lost_session(self) -> int | None:
        """The session whose publisher has died; 0 if there was none, and never will be; ``None`` otherwise."""
        session = self._words[_SESSION]
        place = Lock.PUBLISHER if session else Lock.OWNER
        if self.block.holder(place) is not None:
            return None
        memory_fence()
        return session if self._words[_ENDED] != session or not session else None

    def lost_error(self, session: int) -> PeerLostError:
        """What to say of a session that is lost."""
        if session:
            return PeerLostError("the publisher's process has died; its last version stays valid")
        return PeerLostError(
            f"process {self.block.handle.pid}, which made this transport, has ended"
        )

    def holder(self, slot: int) -> int | None:
        """Process id of the subscriber that has a slot."""
        return self.block.holder(_FIRST_SLOT_LOCK + slot)

    def _attached(self) -> Iterator[int]:
        flags = self._slots[_ATTACHED::_SLOT_WORDS].tolist()
        return (slot for slot, flag in enumerate(flags) if flag)

    def _write(self, index: int, record: Record) -> None:
        fields = (record.pid, record.descriptor, record.token, record.session, record.version)
        _RECORD.pack_into(self._records, index * _LINE, *fields)


def _close(words: memoryview[int], bells: list[Semaphore], pid: int) -> None:
    if pid == os.getpid():  # not a copy that a fork made
        words[_CLOSED] = 1
        for bell in bells:
            bell.post()


def _nothing() -> None:
    """What a board ends that another process made."""


def _num_records(max_subscribers: int) -> int:
    """Each lease may be of another block, besides the newest one and the one that is being written."""
    return max_subscribers * LEASES + 2
