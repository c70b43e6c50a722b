"""What a server has done, and how long it took."""

from __future__ import annotations

import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["ServerStats", "StatsRecorder"]


@dataclass(frozen=True)
class ServerStats:
    """A snapshot since the start, or since the last ``stats(reset=True)``. Times are in milliseconds.

    Percentiles are over the latest ``stats_window`` requests (queue) or batches (forward); 0.0 without any.
    """

    requests: int
    batches: int
    errors: int
    """Requests that were answered with an exception."""
    seconds: float
    requests_per_s: float
    mean_batch_size: float
    batch_sizes: dict[int, int]
    """How many batches had each number of requests."""
    queue_ms_p50: float
    queue_ms_p95: float
    queue_ms_p99: float
    """From the arrival of a request to the start of its batch."""
    forward_ms_p50: float
    forward_ms_p95: float
    forward_ms_p99: float
    """The policy alone."""
    idle_fraction: float
    """Share of the time in which no batch was being made or computed."""
    clients: int
    """Connected now."""
    policy_version: int
    weight_updates: int = 0
    """How often the weights have changed, in whatever way."""


class StatsRecorder:
    """Written by whoever serves, a few operations per batch; read by any thread."""

    def __init__(self, window: int) -> None:
        self._window = window
        self._updates_before = 0
        self._lock = threading.Lock()
        self._clear()

    def _clear(self) -> None:
        self._since = time.perf_counter()
        self._requests = self._batches = self._errors = 0
        self._busy = 0.0
        self._sizes: Counter[int] = Counter()
        self._queue: deque[float] = deque(maxlen=self._window)
        self._forward: deque[float] = deque(maxlen=self._window)

    def batch(self, arrivals: Sequence[float], began: float, forward: float) -> None:
        """A batch is about to be answered: who has a reply finds it counted.

        Times in seconds of ``time.perf_counter()``, ``forward`` a duration.
        """
        with self._lock:
            self._requests += len(arrivals)
            self._batches += 1
            self._sizes[len(arrivals)] += 1
            self._queue.extend([began - arrived for arrived in arrivals])
            self._forward.append(forward)

    def unanswered(self, requests: int) -> None:
        """That batch of so many could not be answered; :meth:`error` counts it then."""
        with self._lock:
            if self._sizes[requests]:  # else a snapshot has begun anew since
                self._requests -= requests
                self._batches -= 1
                self._sizes[requests] -= 1

    def busy(self, began: float, ended: float) -> None:
        """A batch was made, computed and answered between these times."""
        with self._lock:
            if began >= self._since:  # else it belongs to what was counted before the last reset
                self._busy += ended - began

    def error(self, requests: int) -> None:
        """So many requests were answered with an exception."""
        with self._lock:
            self._requests += requests
            self._errors += requests

    def snapshot(
        self, *, clients: int, policy_version: int, weight_updates: int, reset: bool
    ) -> ServerStats:
        """Everything so far; ``reset`` begins anew. ``weight_updates`` are those since the server was made."""
        with self._lock:
            seconds = max(time.perf_counter() - self._since, 1e-9)
            queue, forward = _percentiles(self._queue), _percentiles(self._forward)
            answered = self._requests - self._errors
            found = ServerStats(
                requests=self._requests,
                batches=self._batches,
                errors=self._errors,
                seconds=seconds,
                requests_per_s=self._requests / seconds,
                mean_batch_size=answered / self._batches if self._batches else 0.0,
                batch_sizes=dict(sorted((+self._sizes).items())),
                queue_ms_p50=queue[0],
                queue_ms_p95=queue[1],
                queue_ms_p99=queue[2],
                forward_ms_p50=forward[0],
                forward_ms_p95=forward[1],
                forward_ms_p99=forward[2],
                idle_fraction=max(0.0, 1.0 - self._busy / seconds),
                clients=clients,
                policy_version=policy_version,
                weight_updates=weight_updates - self._updates_before,
            )
            if reset:
                self._updates_before = weight_updates
                self._clear()
        return found


def _percentiles(seconds: Iterable[float]) -> tuple[float, float, float]:
    ordered = sorted(seconds)
    if not ordered:
        return 0.0, 0.0, 0.0
    last = len(ordered) - 1
    p50, p95, p99 = (1e3 * ordered[round(last * share)] for share in (0.5, 0.95, 0.99))
    return p50, p95, p99
