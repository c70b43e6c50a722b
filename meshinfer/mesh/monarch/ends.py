"""The ends of processes: noticed at once on this machine, and brought about when a mesh is closed."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import selectors
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from meshinfer.mesh.monarch.seats import Seat

__all__ = ["EndWatch", "Rounds", "await_ends", "stop_all"]

logger = logging.getLogger("meshinfer.mesh")

_REPORT_SECONDS = 1.0
"""For monarch to say why a process has ended, before it is only said that it has."""
_KILLED_SECONDS = 2.0
_ROUND_SECONDS = 5.0
_ANSWER_SECONDS = 60.0
"""Longer than monarch takes to give a host up."""


class EndWatch:
    """A thread that waits for processes of this machine to end.

    monarch notices most deaths at once, but a process that dies while it is being asked for its state only after the
    time that an answer may take.
    """

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = os.pipe()
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._due: list[tuple[float, Callable[[], None]]] = []
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="meshinfer-ends", daemon=True)
        self._thread.start()

    def watch(self, end: int, tell: Callable[[], None]) -> None:
        """Call ``tell`` soon after the descriptor ``end``, of a process, has become readable."""
        own = os.dup(end)  # whoever has the other may close it
        self._selector.register(own, selectors.EVENT_READ, tell)
        os.write(self._wake, b"\0")

    def close(self) -> None:
        """Watch nobody any more."""
        self._closed = True
        os.write(self._wake, b"\0")
        if threading.current_thread() is not self._thread:
            self._thread.join()
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        os.close(self._wake)
        self._selector.close()

    def _run(self) -> None:
        while not self._closed:
            left = self._due[0][0] - time.monotonic() if self._due else None
            for key, _ in self._selector.select(None if left is None else max(left, 0.0)):
                self._note(key)
            while self._due and self._due[0][0] <= time.monotonic():
                self._due.pop(0)[1]()

    def _note(self, key: selectors.SelectorKey) -> None:
        if key.fd == self._woken:
            os.read(self._woken, 4096)
            return
        self._selector.unregister(key.fd)
        os.close(key.fd)
        self._due.append((time.monotonic() + _REPORT_SECONDS, key.data))


class Rounds:
    """A thread that asks the processes of other machines, again and again, whether they are there.

    monarch tells nobody when a whole host has gone, but those who ask.

    Args:
        tell: called with the seat, and monarch's words, when one is not.
    """

    def __init__(self, tell: Callable[[Seat, str], None]) -> None:
        self._tell = tell
        self._seats: list[Seat] = []
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def include(self, seat: Seat) -> None:
        """Ask this one too."""
        self._seats = [*(each for each in self._seats if each.alive), seat]
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="meshinfer-rounds", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Ask nobody any more; processes that are asked now must have been stopped."""
        self._closed.set()
        if self._thread not in (None, threading.current_thread()):
            self._thread.join(_ROUND_SECONDS)

    def _run(self) -> None:
        while not self._closed.wait(_ROUND_SECONDS):
            asked = [(seat, seat.agent.introduce.call_one()) for seat in self._seats if seat.alive]
            for seat, answer in asked:
                self._hear(seat, answer)

    def _hear(self, seat: Seat, answer: Any) -> None:
        try:
            answer.get(timeout=_ANSWER_SECONDS)
        except TimeoutError:
            logger.debug("rank %d of group %r does not answer", seat.rank, seat.group)
        except RuntimeError as error:  # monarch's SupervisionError
            self._tell(seat, str(error).strip().splitlines()[-1].strip())


def stop_all(meshes: Sequence[Any], deadline: float) -> None:
    """Stop monarch's proc meshes and actor meshes, all at once, by ``deadline`` on the monotonic clock."""
    for future in [mesh.stop() for mesh in meshes]:
        try:
            future.get(timeout=max(deadline - time.monotonic(), 0.1))
        except (RuntimeError, TimeoutError) as error:  # the processes themselves are looked at next
            logger.debug("a mesh did not stop in good order: %s", str(error))


def await_ends(seats: Sequence[Seat], deadline: float) -> None:
    """Wait until the processes of this machine, whose meshes were stopped, have ended; kill those that do not."""
    for seat in seats:
        if seat.end is None or _has_ended(seat.end, deadline):
            continue
        logger.warning(
            "rank %d of group %r (pid %d) did not stop and is killed",
            seat.rank,
            seat.group,
            seat.who.pid,
        )
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(seat.end, signal.SIGKILL)
        _has_ended(seat.end, time.monotonic() + _KILLED_SECONDS)


def _has_ended(end: int, deadline: float) -> bool:
    return bool(select.select([end], [], [], max(deadline - time.monotonic(), 0.0))[0])
