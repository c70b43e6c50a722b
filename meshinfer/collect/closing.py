"""The end of a collector: of its environments first, then of its policy's server."""

from __future__ import annotations

import threading

from meshinfer.collect.crew import Crew
from meshinfer.server.server import InferenceServer

__all__ = ["Closing"]


class Closing:
    """Ends everything, once; also when the collector is collected as garbage, or the interpreter exits.

    Args:
        crew: the workers.
    """

    def __init__(self, crew: Crew) -> None:
        self.crew = crew
        self.server: InferenceServer | None = None
        self.closed = False
        self._once = threading.Lock()

    def __call__(self, timeout: float) -> None:
        """End; ``timeout`` seconds for the steps that are being made, and as many for the policy's batch.

        Raises:
            TimeoutError: a thread is still in a step, or the policy in a batch.
        """
        if not self._once.acquire(blocking=False):
            return
        self.closed = True
        self.crew.stop(timeout)
        try:
            if self.server is not None:
                self.server.shutdown(timeout)
        finally:
            stuck = self.crew.kill()
        if stuck:
            raise TimeoutError(
                f"environments {stuck} were still in a step {timeout:g} s after shutdown() was called; their threads "
                "end with it"
            )
