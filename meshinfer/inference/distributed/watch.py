"""What looks after the data planes of this process: the watch, and the threads that abort channels."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Protocol

from meshinfer.inference.distributed.plane import Channel

__all__ = ["abort_all", "await_aborts", "end_watch", "keep_watch", "note_ending"]

logger = logging.getLogger("meshinfer.distributed")

_TICK_SECONDS = 0.25
_ABORT_SECONDS = 2.0


class Watched(Protocol):
    """What the watch looks at."""

    @property
    def closed(self) -> bool:
        """Whether it needs to be looked at no more."""

    def look(self, now: float) -> None:
        """Act if something takes too long; ``now`` is ``time.monotonic()``."""


class _Watch:
    """A thread that looks at everything four times a second, for as long as there is anything.

    Ticks, since they cost a message nothing, while a deadline for each one would have to be set and taken back.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._fewer = threading.Event()

    def keep(self, watched: Watched) -> None:
        with self._lock:
            self._watched.add(watched)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="meshinfer-watch", daemon=True
                )
                self._thread.start()

    def look_around(self) -> None:
        """Something needs to be looked at no more: the thread ends at once if it was the last."""
        self._fewer.set()

    def await_end(self, deadline: float) -> None:
        """Until the thread has ended, if nothing is left to look at."""
        with self._lock:
            thread = None if any(not each.closed for each in self._watched) else self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(max(deadline - time.monotonic(), 0.0))

    def _run(self) -> None:
        while True:
            self._fewer.wait(_TICK_SECONDS)
            with self._lock:
                self._fewer.clear()
                found = [each for each in self._watched if not each.closed]
                if not found:
                    self._watched.clear()
                    self._thread = None
                    return
            for each in found:
                self._look(each)
            del found

    def _look(self, watched: Watched) -> None:
        try:
            watched.look(time.monotonic())
        except Exception:
            logger.exception("a data plane could not be looked at")


_watches: dict[int, _Watch] = {}
_ending: set[threading.Thread] = set()
_noting = threading.Lock()


def keep_watch(watched: Watched) -> None:
    """Look at it from now on, until it is closed or collected."""
    pid = os.getpid()  # a forked child has the object, but not its thread
    _watches.setdefault(pid, _Watch()).keep(watched)


def end_watch() -> None:
    """Something that is watched has been closed."""
    watch = _watches.get(os.getpid())
    if watch is not None:
        watch.look_around()


def abort_all(channels: Sequence[Channel]) -> None:
    """Abort them, each in a thread of its own. Never waits, unless no thread can be started.

    At once, because aborting one may wait for all that its GPU does, which a stuck row of another may be.
    """
    for channel in channels:
        thread = threading.Thread(
            target=_abort, args=(channel,), name="meshinfer-abort", daemon=True
        )
        with _noting:
            started = _start(thread)
            ending = thread if started else threading.current_thread()
            if ending.daemon:  # the interpreter does not wait for it
                _note(ending)
        if not started:
            _abort(channel)


def note_ending(thread: threading.Thread) -> None:
    """``thread`` will end soon, and :func:`await_aborts` waits for it too."""
    with _noting:
        if thread.ident is not None:
            _note(thread)


def await_aborts() -> None:
    """Until what :func:`abort_all` has begun is done, and noted threads have ended, for some seconds at most.

    A thread that is in C++ when the interpreter ends would abort the process.
    """
    deadline = time.monotonic() + _ABORT_SECONDS
    with _noting:
        threads = list(_ending)
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(deadline - time.monotonic(), 0.0))
    watch = _watches.get(os.getpid())
    if watch is not None:
        watch.await_end(deadline)


def _note(thread: threading.Thread) -> None:
    """With the lock held."""
    _ending.difference_update([each for each in _ending if not each.is_alive()])
    _ending.add(thread)


def _start(thread: threading.Thread) -> bool:
    """``False`` where no thread can be started: Python 3.12 has none while the interpreter ends."""
    try:
        thread.start()
    except RuntimeError as error:
        logger.debug("no thread to abort a channel in: %s", error)
        return False
    return True


def _abort(channel: Channel) -> None:
    try:
        channel.abort()
    except Exception:
        logger.exception("a channel could not be aborted")
