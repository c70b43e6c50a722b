"""A collector under test: what each library's own module builds, started and iterated the same way."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

FRAMES_PER_BATCH = 1024


class Collecting:
    """A collector of some library: it iterates batches and has a `shutdown`."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._collector: Any = None
        self._batches: Iterator[Any] = iter(())

    def start(self) -> int:
        self._collector = self._make()
        self._batches = iter(self._collector)
        return os.getpid()

    def frames(self) -> int:
        """Wait for the next batch; the number of its transitions."""
        batch = next(self._batches)
        if batch.numel() != FRAMES_PER_BATCH or batch["next", "reward"].numel() != FRAMES_PER_BATCH:
            raise RuntimeError(f"expected {FRAMES_PER_BATCH} transitions, found {batch}")
        return int(batch.numel())

    def stop(self) -> None:
        self._collector.shutdown()
