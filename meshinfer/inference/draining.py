"""Taking requests off a transport one payload each, as every one of them can."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from tensordict import TensorDictBase

__all__ = ["Draining"]


class Draining(ABC):
    """The server's side of a transport that can say when each request arrived."""

    def drain(self, max_items: int) -> tuple[list[TensorDictBase], list[Any]]:
        """At most ``max_items`` waiting requests, which are the server's own, and a handle for each."""
        payloads, requests, _ = self.drain_with_timing(max_items)
        return payloads, requests

    @abstractmethod
    def drain_with_timing(
        self, max_items: int
    ) -> tuple[list[TensorDictBase], list[Any], list[float]]:
        """As :meth:`drain`, with the ``time.perf_counter()`` at which each request arrived."""
