"""Ranks that were lost, for whoever wants to know."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass

from meshinfer.arguments import as_seconds

__all__ = ["FailureLog", "RankFailure"]

logger = logging.getLogger("meshinfer.mesh")


@dataclass(frozen=True)
class RankFailure:
    """A process of the mesh, or one actor in it, that has died.

    Args:
        group, rank: whose it was.
        host: name of its host.
        pid: of the process.
        actor: the name with which the actor was spawned; ``None`` where the whole process has died.
        cause: what happened, in monarch's words.
    """

    group: str
    rank: int
    host: str
    pid: int
    actor: str | None
    cause: str

    def __str__(self) -> str:
        what = "the process" if self.actor is None else f"actor {self.actor!r}"
        return (
            f"{what} of rank {self.rank} of group {self.group!r} (pid {self.pid} on {self.host}) has died: "
            f"{self.cause}"
        )


class FailureLog:
    """All failures in order, and those that nobody has taken yet.

    Args:
        on_failure: called with each, in a thread of meshinfer; what it raises is logged.
    """

    def __init__(self, on_failure: Callable[[RankFailure], object] | None) -> None:
        self._on_failure = on_failure
        self._all: list[RankFailure] = []
        self._untaken: queue.SimpleQueue[RankFailure] = queue.SimpleQueue()
        self._lock = threading.Lock()

    def add(self, failure: RankFailure) -> None:
        """There is one more."""
        logger.warning("%s", str(failure))
        with self._lock:
            self._all.append(failure)
        self._untaken.put(failure)
        if self._on_failure is None:
            return
        try:
            self._on_failure(failure)
        except Exception as error:
            logger.error("on_failure raised %s: %s", type(error).__name__, str(error))

    def all(self) -> list[RankFailure]:
        """Since the mesh was made."""
        with self._lock:
            return list(self._all)

    def take(self, timeout: float | None) -> RankFailure:
        """The next that was not taken; see :meth:`MonarchMesh.next_failure`."""
        if timeout is not None:
            as_seconds("timeout", timeout, zero=True)
        try:
            return self._untaken.get(timeout=timeout)
        except queue.Empty as error:
            raise TimeoutError(f"no rank was lost within {timeout:g} s") from error
