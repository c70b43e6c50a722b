"""Faults of monarch meshes that meshinfer made: told to it, instead of ending the program.

monarch calls one function, ``monarch.actor.unhandled_fault_hook``, for every fault that nobody else handles; its
default ends the program. While a :func:`watch_faults` lasts, a hook of ours stands in front of whatever was there: it
takes the faults of our meshes, which are told by a token in their names, and passes all others on.
"""

from __future__ import annotations

import _thread
import logging
import queue
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Fault", "watch_faults"]

logger = logging.getLogger("meshinfer.monarch")

_SETTLING_SECONDS = 30.0
"""A dead process is reported once for each mesh on it: within a moment, or ten seconds apart on a busy machine."""

_INFRASTRUCTURE = ("logger-", "setup-")
"""monarch's own actors in every process: their names do not tell whose process it is."""

_PROCESS_DIED = ("the process this actor was running on failed", "no status received from process")
_COORDINATES = re.compile(r"\{((?:'\w+': \d+/\d+(?:, )?)+)\}")
_COORDINATE = re.compile(r"'(\w+)': (\d+)/(\d+)")


@dataclass(frozen=True)
class Fault:
    """What monarch said of one actor, or of its process.

    Args:
        mesh: the name with which the actor mesh was spawned, and monarch's suffix.
        rank: of the actor in its mesh, dimensions in order; 0 in a mesh without dimensions.
        process_died: whether the actor's whole process has gone.
        cause: what happened, in monarch's words.
    """

    mesh: str
    rank: int
    process_died: bool
    cause: str


def watch_faults(token: str, told: Callable[[Fault], None]) -> Callable[[], None]:
    """Call ``told``, in a thread of its own, with every fault of a mesh whose name contains ``token``.

    Args:
        token: part of the names of all proc meshes and actor meshes that the caller spawns, and of no others.
        told: must not raise.

    Returns:
        A function that ends it. Faults with this token that come later, from messages that were still under way, are
        only logged: the hook stays, and passes all others to the one that was there before.
    """
    return _watchers.add(token, told)


class _Watchers:
    """One hook and one thread for all who watch."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told: dict[str, Callable[[Fault], None]] = {}
        self._former: set[str] = set()
        self._settled = 0.0
        self._previous: Callable[[Any], object] = lambda failure: None
        self._events: queue.SimpleQueue[tuple[Any, str] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def add(self, token: str, told: Callable[[Fault], None]) -> Callable[[], None]:
        with self._lock:
            self._told[token] = told
            self._install()
            if self._thread is None:
                self._events = queue.SimpleQueue()
                self._thread = threading.Thread(
                    target=self._run, args=(self._events,), name="meshinfer-faults", daemon=True
                )
                self._thread.start()
        return lambda: self._remove(token)

    def _install(self) -> None:
        import monarch.actor

        if monarch.actor.unhandled_fault_hook != self._take:
            self._previous = monarch.actor.unhandled_fault_hook
            monarch.actor.unhandled_fault_hook = self._take

    def _remove(self, token: str) -> None:
        with self._lock:
            if self._told.pop(token, None) is None:
                return
            self._former.add(token)
            if self._told or self._thread is None:
                return
            self._settled = time.monotonic() + _SETTLING_SECONDS
            thread, self._thread = self._thread, None
            self._events.put(None)
        if thread is not threading.current_thread():
            thread.join()

    def _take(self, failure: Any) -> None:
        """The hook: runs in monarch's thread and must be quick. What is raised here ends the program."""
        report = failure.report()
        infrastructure = _is_infrastructure(failure, report)
        with self._lock:
            named = failure.mesh_name + report  # some reports only name the root
            ours = any(token in named for token in (*self._told, *self._former))
            if self._thread is not None and (ours or infrastructure):
                self._events.put((failure, report))
                return
            ours = ours or (infrastructure and time.monotonic() < self._settled)
        if ours:
            logger.debug("a fault after the end of its mesh: %s", report)
        else:
            self._previous(failure)

    def _run(self, events: Any) -> None:
        unexplained = _Unexplained()
        while True:
            try:
                event = events.get(timeout=unexplained.seconds_left())
            except queue.Empty:
                event = _NOTHING
            for failure in unexplained.take_overdue():
                self._pass_on(failure)
            if event is None:
                return
            if event is not _NOTHING:
                self._sort(event[0], event[1], unexplained)

    def _sort(self, failure: Any, report: str, unexplained: _Unexplained) -> None:
        with self._lock:
            named = failure.mesh_name + report
            told = next((call for token, call in self._told.items() if token in named), None)
        if told is None and _is_infrastructure(failure, report):
            unexplained.expect(failure, _spot(report))
            return
        if "undeliverable message" in report:  # whoever sent it is told as well
            logger.debug("%s", report)
            return
        fault = _as_fault(failure, report)
        if fault.process_died:
            unexplained.explain(_spot(report))
        if told is not None:
            told(fault)

    def _pass_on(self, failure: Any) -> None:
        """Outside of monarch's thread, so it is for us to end the program, as monarch would, if the hook says so."""
        try:
            self._previous(failure)
        except BaseException as error:  # whatever it is: monarch takes it as "not handled"
            logger.error("%s; the fault hook raised %r", failure.report(), str(error))
            _thread.interrupt_main()


class _Unexplained:
    """Deaths of processes that only an actor of monarch's own has reported, until one of ours there does too."""

    def __init__(self) -> None:
        self._waiting: list[tuple[float, Any, str]] = []
        self._explained: list[tuple[float, str]] = []

    def seconds_left(self) -> float | None:
        """Until the first is overdue; ``None`` when nothing waits."""
        return max(self._waiting[0][0] - time.monotonic(), 0.0) if self._waiting else None

    def expect(self, failure: Any, spot: str) -> None:
        """A report of an actor of monarch's own."""
        deadline = time.monotonic() + _SETTLING_SECONDS
        for known in self._explained:
            if known[1] == spot and known[0] > time.monotonic():
                return
        self._waiting.append((deadline, failure, spot))

    def explain(self, spot: str) -> None:
        """A process of ours has died: so much for monarch's actors there."""
        self._explained = [known for known in self._explained if known[0] > time.monotonic()]
        self._explained.append((time.monotonic() + _SETTLING_SECONDS, spot))
        self._waiting = [one for one in self._waiting if one[2] != spot]

    def take_overdue(self) -> list[Any]:
        """Those that nothing explains."""
        now = time.monotonic()
        overdue = [failure for deadline, failure, _ in self._waiting if deadline <= now]
        self._waiting = [one for one in self._waiting if one[0] > now]
        return overdue


def _is_infrastructure(failure: Any, report: str) -> bool:
    return failure.mesh_name.startswith(_INFRASTRUCTURE) and _says_process_died(report)


def _says_process_died(report: str) -> bool:
    return any(words in report for words in _PROCESS_DIED)


def _spot(report: str) -> str:
    found = _COORDINATES.search(report)
    return found.group(1) if found else ""


def _as_fault(failure: Any, report: str) -> Fault:
    rank = 0
    for _, index, size in _COORDINATE.findall(_spot(report)):
        rank = rank * int(size) + int(index)
    cause = report.strip().splitlines()
    return Fault(
        mesh=failure.mesh_name,
        rank=rank,
        process_died=_says_process_died(report),
        cause="\n".join(line.strip() for line in cause[1:]) or report,
    )


_NOTHING: tuple[Any, str] = (None, "")
_watchers = _Watchers()
