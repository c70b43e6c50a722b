"""A collector in place of a server and its clients, behind the commands that a conductor obeys."""

from __future__ import annotations

import time
from array import array
from typing import Any

from .peers.collecting import Collecting

_LEAD_IN_SECONDS = 0.25


class CollectorConductor:
    """The commands that the harness may send, one method each; the environments are the clients."""

    def __init__(self, service: Collecting, versions: dict[str, str]) -> None:
        self._service, self._versions = service, versions

    def launch(self) -> dict[str, Any]:
        """Make the collector and its environments."""
        return {"server_pid": self._service.start(), "versions": self._versions}

    def connect(self, clients: int) -> dict[str, Any]:
        """Warm up all of them."""
        self._collect(0.0)
        return {}

    def measure(self, seconds: float) -> dict[str, Any]:
        """Iterate for `seconds` and to the end of the batch; rate in frames/s, percentiles of the time per batch."""
        # What was collected while others had their turn is no part of the rate.
        self._collect(_LEAD_IN_SECONDS)
        frames, times = self._collect(seconds)
        ordered = sorted(times)
        quantiles = {
            f"p{percent}_us": 1e6 * ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]
            for percent in (50, 95, 99)
        }
        return {"requests": frames, "rate": frames / sum(times), **quantiles}

    def stop(self) -> dict[str, Any]:
        """End it in the way its users would."""
        self._service.stop()
        return {}

    def _collect(self, seconds: float) -> tuple[int, array[float]]:
        """At least one batch: how many frames, and what each batch took in seconds."""
        frames, times = 0, array("d")
        began = last = time.monotonic()
        while not times or last < began + seconds:
            frames += self._service.frames()
            now = time.monotonic()
            times.append(now - last)
            last = now
        return frames, times
