"""One promise, and whom it binds."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

from meshinfer.testing.harness import TransportHarness

__all__ = ["ConformanceCheck", "conformance_check"]


@dataclass(frozen=True)
class ConformanceCheck:
    """A function that raises when a transport breaks one promise.

    Args:
        function: takes a harness; the first sentence of its docstring is the promise.
        needs: capabilities of a harness (names of its bool attributes) without which the promise says nothing.
    """

    function: Callable[[TransportHarness], None]
    needs: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The function's name."""
        return self.function.__name__

    @property
    def promise(self) -> str:
        """What is promised, in one sentence."""
        return (inspect.getdoc(self.function) or "").split("\n\n")[0]

    def applies_to(self, harness: TransportHarness) -> bool:
        """Whether the harness has all that this check needs."""
        return all(getattr(harness, need) for need in self.needs)

    def __call__(self, harness: TransportHarness) -> None:
        """Run it; raises whatever shows that the promise is broken."""
        self.function(harness)

    def __repr__(self) -> str:
        return self.name


def conformance_check(
    *needs: str,
) -> Callable[[Callable[[TransportHarness], None]], ConformanceCheck]:
    """Make a function a check that needs these capabilities."""
    return lambda function: ConformanceCheck(function, needs)
