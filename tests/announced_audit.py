"""Announced rows over gloo whose every act is recorded and checked at once.

:func:`auditing` watches all pairs and planes of a process. Of each pair it keeps the headers that have left and have
come, with where that happened; a channel of :class:`AuditedRows` looks there before it sends or posts anything. The
number of a header is written into its row, at the front, so that a row that follows another header than its own shows.
A breach is raised where it happens, and written to a file, which outlives a process that is killed.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

from announced_mischief import Mischief, forget_acts, released
from torch import Tensor
from torch.distributed import Store

from meshinfer.inference.distributed.announced import AnnouncedRows
from meshinfer.inference.distributed.frames import HEADER_BYTES, TAG_FRAME, Field, Frame, Kind
from meshinfer.inference.distributed.pair import Pair
from meshinfer.inference.distributed.plane import Channel
from meshinfer.streams import Mark
from meshinfer.testing import GlooRows

FRAMES_OF_A_STACK = 14
ANNOUNCING = (Kind.REQUEST, Kind.RESULT)


class Breach(AssertionError):
    """The protocol was broken; with the stacks of both that did it."""


@dataclass
class Header:
    """One that announces a row."""

    number: int
    stack: traceback.StackSummary


class Ledger:
    """The rows of one pair at one of its sides, as its headers tell."""

    def __init__(self) -> None:
        self.left: deque[Header] = deque()
        self.come: deque[Header] = deque()
        self.last_left: Header | None = None
        self.last_come: Header | None = None
        self.announced = self.posted = self.arrived = 0

    def note_left(self, number: int) -> None:
        self.last_left = Header(number, stack())
        self.left.append(self.last_left)

    def note_come(self, number: int) -> None:
        self.last_come = Header(number, stack())
        self.announced += 1
        self.come.append(self.last_come)

    def row_leaves(self, row: Tensor) -> Header:
        """The next header that left must be this row's."""
        if not self.left:
            raise breach("a row is sent before its header has left", self.last_left)
        header = self.left.popleft()
        expect_number(row, header, "is sent after")
        return header

    def row_awaited(self) -> Header:
        """A receive is posted: for which header."""
        self.posted += 1
        if self.posted > self.announced:
            text = f"receive {self.posted} is posted after {self.announced} headers"
            raise breach(text, self.last_come)
        return self.come.popleft()

    def row_arrived(self, row: Tensor, header: Header) -> None:
        self.arrived += 1
        expect_number(row, header, "arrives after")


def expect_number(row: Tensor, header: Header, verb: str) -> None:
    number = int.from_bytes(row[:8].numpy().tobytes(), "little")
    if number != header.number:
        raise breach(f"row {number} {verb} header {header.number}", header)


@dataclass(frozen=True)
class AuditedRows(GlooRows):
    """Rows over gloo that are audited; the other side may have plain ones.

    Args:
        mischief: of the channels of this side.
        ledger: of the pair, for one plane.
    """

    mischief: Mischief = field(default_factory=Mischief)
    ledger: Ledger | None = field(default=None, compare=False, repr=False)

    def channel(self, store: Store, rank: int, *, sends: bool, timeout: float) -> Channel:
        assert self.ledger is not None, "no audit: this process lacks begin_audit()"
        random = Random(f"{self.mischief.seed}/{rank}/{sends}/{id(self.ledger)}")
        self.mischief.happen("building", random)
        inner = super().channel(store, rank, sends=sends, timeout=timeout)
        return AuditedChannel(inner, self.ledger, self.mischief, random)


class AuditedChannel:
    """A channel that checks who uses it, and when."""

    def __init__(self, inner: Channel, ledger: Ledger, mischief: Mischief, random: Random) -> None:
        self.inner = inner
        self.ledger = ledger
        self.mischief = mischief
        self.random = random
        self.aborted = threading.Event()
        self._owner = threading.current_thread()
        self._stack = stack()

    def send(self, row: Tensor, after: Mark) -> Mark:
        self._check_thread()
        header = self.ledger.row_leaves(row)
        self.mischief.happen("sending", self.random)
        expect_number(row, header, "is sent late after")
        return AuditedMark(self, self.inner.send(row, after), lambda: None)

    def receive(self, row: Tensor, after: Mark) -> Mark:
        self._check_thread()
        header = self.ledger.row_awaited()
        self.mischief.happen("posting", self.random)
        mark = self.inner.receive(row, after)
        return AuditedMark(self, mark, lambda: self.ledger.row_arrived(row, header))

    def abort(self) -> None:
        """Anybody may, at any time."""
        self.mischief.happen("aborting", self.random)
        self.inner.abort()
        self.aborted.set()

    def _check_thread(self) -> None:
        if threading.current_thread() is not self._owner:
            raise breach("a channel is used by two threads", self._stack)
        self._stack = stack()


class AuditedMark:
    """The mark of an audited channel."""

    def __init__(self, channel: AuditedChannel, inner: Mark, here: Callable[[], None]) -> None:
        self._channel, self._inner, self._here = channel, inner, here

    def wait(self) -> None:
        channel = self._channel
        channel.mischief.happen("waiting", channel.random)
        try:
            self._inner.wait()
        except RuntimeError:
            if channel.mischief.deaf:
                channel.aborted.wait()
            raise
        self._here()

    def passed(self) -> bool:
        return self._inner.passed()

    def hold_up(self, stream: Any) -> None:
        self._inner.hold_up(stream)


# The audit of a process.

_ledgers: WeakKeyDictionary[Pair, Ledger] = WeakKeyDictionary()
_lock = threading.Lock()
_report: list[Path] = []


def ledger_of(pair: Pair) -> Ledger:
    with _lock:
        return _ledgers.setdefault(pair, Ledger())


def ledgers() -> list[Ledger]:
    """Of the pairs that are alive in this process."""
    with _lock:
        return list(_ledgers.values())


def stack() -> traceback.StackSummary:
    """Where the caller is. Lines of code are looked up when they are wanted."""
    frames = traceback.walk_stack(None)
    return traceback.StackSummary.extract(frames, limit=FRAMES_OF_A_STACK, lookup_lines=False)


def breach(what: str, other: traceback.StackSummary | Header | None) -> Breach:
    """The error for a breach, which is written down too."""
    there = other.stack if isinstance(other, Header) else other
    stacks = [stack(), there] if there is not None else [stack()]
    titles = ("here, innermost first", "the other, innermost first")
    parts = [f"{title}:\n{''.join(each.format())}" for title, each in zip(titles, stacks)]  # noqa: B905
    thread = threading.current_thread().name
    error = Breach(f"{what} (pid {os.getpid()}, thread {thread})\n" + "\n".join(parts))
    for path in _report:
        with path.open("a") as file:
            file.write(f"{error}\n\n")
    return error


def begin_audit(report: str) -> ExitStack:
    """Audit the pairs of this process from now on; breaches are appended to ``report``. Close the result to end it."""
    forget_acts()
    _report[:] = [Path(report)]
    patches = ExitStack()
    for owner, name, patched in (
        (Pair, "send", _sending(Pair.send)),
        (Pair, "receive", _receiving(Pair.receive)),
        (AnnouncedRows, "__init__", _bound(AnnouncedRows.__init__)),
        (AnnouncedRows, "send", _numbering(AnnouncedRows.send)),
    ):
        patches.enter_context(mock.patch.object(owner, name, patched))
    patches.callback(_report.clear)
    return patches


@contextmanager
def auditing(directory: Path) -> Iterator[Path]:
    """Audit this process inside, and fail for a breach here or in another process that reports to the same file."""
    report = directory / "breaches"
    report.touch()
    with begin_audit(str(report)):
        try:
            yield report
        finally:
            released.set()
    found = report.read_text()
    assert not found, f"the protocol was broken:\n{found}"


def _sending(send: Callable[..., Any]) -> Callable[..., Any]:
    def audited(pair: Pair, message: list[Tensor], tag: int = TAG_FRAME) -> Any:
        held = send(pair, message, tag)
        if (number := _announced(message, tag)) is not None:
            ledger_of(pair).note_left(number)
        return held

    return audited


def _receiving(receive: Callable[..., Any]) -> Callable[..., Any]:
    def audited(pair: Pair, message: list[Tensor], tag: int = TAG_FRAME) -> Any:
        work = receive(pair, message, tag)
        is_header = tag == TAG_FRAME and message[0].numel() == HEADER_BYTES
        return _Awaited(work, ledger_of(pair), message) if is_header else work

    return audited


class _Awaited:
    """A header that may come."""

    def __init__(self, work: Any, ledger: Ledger, message: list[Tensor]) -> None:
        self._work, self._ledger, self._message = work, ledger, message

    def wait(self, timeout: Any) -> Any:
        result = self._work.wait(timeout)
        if (number := _announced(self._message, TAG_FRAME)) is not None:
            self._ledger.note_come(number)
        return result


def _announced(message: list[Tensor], tag: int) -> int | None:
    """The number of the header in ``message`` if it announces a row."""
    if tag != TAG_FRAME or message[0].numel() != HEADER_BYTES:
        return None
    words = memoryview(message[0].numpy().data).cast("B").cast("q")
    return words[Field.ID] if words[Field.KIND] in ANNOUNCING else None


def _bound(init: Callable[..., None]) -> Callable[..., None]:
    def audited(plane: AnnouncedRows, backend: Any, pair: Pair, *more: Any) -> None:
        if isinstance(backend, AuditedRows):
            backend = replace(backend, ledger=ledger_of(pair))
        init(plane, backend, pair, *more)

    return audited


def _numbering(send: Callable[..., None]) -> Callable[..., None]:
    def audited(plane: AnnouncedRows, frame: Frame) -> None:
        frame.row.octets[:8] = int(frame.header[Field.ID]).to_bytes(8, "little")
        send(plane, frame)

    return audited
