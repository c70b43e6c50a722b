"""How ranks tell rank 0 what they found, and wait for each other, through the job's store.

A rank that failed must not end before the others have written their reports: launchers end a job whose first rank
fails. So each rank leaves its verdict in the store when it has written, and stays until rank 0 says that all is over.

Keys are looked for again and again, at most ten times a second: torch prints a page for each wait in a store that runs
out, and that is just what a missing rank causes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed import DistError, TCPStore

from meshinfer.rendezvous import bounded

__all__ = ["RollCall"]

_SERVING, _OVER = "serving", "over"
_ANSWER_SECONDS = 5.0
_PAUSE_SECONDS = 0.1

T = TypeVar("T")


class RollCall:
    """One rank's connection to the job's store, for this purpose alone.

    Args:
        store: that connection.
        prefix: of the keys.
    """

    def __init__(self, store: TCPStore, prefix: str) -> None:
        store.set_timeout(timedelta(seconds=_ANSWER_SECONDS))
        self._store = store
        self._prefix = f"{prefix}/doctor"

    def open(self, ranks: Iterable[int]) -> None:
        """Rank 0: drop what an earlier attempt of the same job may have left of ``ranks``."""
        for name in (_SERVING, _OVER, *map(str, ranks)):
            self._store.delete_key(self._key(name))

    def announce(self, failed: list[str]) -> None:
        """Rank 0: its server can be joined now, or will never be, because these checks failed."""
        self._store.set(self._key(_SERVING), json.dumps(failed))

    def wait_for_server(self, timeout: float) -> list[str] | None:
        """Wait for :meth:`announce`: what it said, or ``None`` when it did not come."""
        if not self._wait_for(_SERVING, timeout):
            return None
        return list(json.loads(self._store.get(self._key(_SERVING))))

    def report(self, rank: int, verdict: dict[str, Any]) -> bool:
        """Leave this rank's verdict: whether the store took it."""
        text = json.dumps(verdict)
        return self._quietly(
            lambda: self._store.set(self._key(str(rank)), text), _ANSWER_SECONDS, False
        )

    def verdict(self, rank: int, timeout: float) -> dict[str, Any] | None:
        """Rank 0: what ``rank`` has reported, waiting for it; ``None`` when it has not."""
        if not self._wait_for(str(rank), timeout):
            return None
        return dict(json.loads(self._store.get(self._key(str(rank)))))

    def finish(self) -> None:
        """Rank 0: let the others go."""

        def let_go() -> None:
            self._store.set(self._key(_OVER), "1")
            self._store.check([self._key(_OVER)])  # answered once those who wait have been

        self._quietly(let_go, _ANSWER_SECONDS, False)

    def wait_until_finished(self, timeout: float) -> bool:
        """Wait for rank 0 to let this one go, or for the store to end: whether either came.

        Waits in the store: rank 0 may end, and its store with it, as soon as it has said so.
        """
        limit = timedelta(seconds=timeout)
        return self._quietly(lambda: self._store.wait([self._key(_OVER)], limit), timeout, True)

    def _wait_for(self, name: str, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        while not self._store.check([self._key(name)]):
            if time.monotonic() >= deadline:
                return False
            time.sleep(_PAUSE_SECONDS)
        return True

    def _quietly(self, call: Callable[[], object], timeout: float, ended: bool) -> bool:
        """Whether ``call`` went well: not where the store is silent, ``ended`` where it has ended."""
        try:
            bounded(call, timeout)
        except TimeoutError:
            return False
        except (DistError, RuntimeError) as error:
            return ended and "timeout" not in str(error)
        return True

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}"
