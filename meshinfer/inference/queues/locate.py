"""How a client finds its server: where that always is, or whom to ask."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from meshinfer.inference.queues.address import Address

__all__ = ["FixedPlace", "NotThereError", "Whereabouts"]


class NotThereError(Exception):
    """There is no server now, or none that can be reached; another try may find one.

    Args:
        message: what is known.
        coming: whether somebody who must know says that there will be one.
    """

    def __init__(self, message: str, *, coming: bool = False) -> None:
        super().__init__(message)
        self.coming = coming


class Whereabouts(Protocol):
    """Picklable; ``str`` of it names the server."""

    @property
    def attempt_seconds(self) -> float:
        """How long one attempt to connect may take, before :meth:`find` is asked again."""

    def find(self, deadline: float, stale: Address | None) -> Address:
        """Where the server is.

        Args:
            deadline: ``time.monotonic()`` at which to give up.
            stale: where it was a moment ago, and was not found or not recognised.

        Raises:
            NotThereError: it is not known now.
            PeerLostError: there will be none.
            TimeoutError: nobody told it in time.
        """

    def account(self) -> str:
        """What is known of a server that has gone without a goodbye, for an error; in a few seconds."""


@dataclass(frozen=True)
class FixedPlace:
    """The server is where it is said to be."""

    address: Address

    def __str__(self) -> str:
        return str(self.address)

    @property
    def attempt_seconds(self) -> float:
        """As long as there is time: there is no other place."""
        return math.inf

    def find(self, deadline: float, stale: Address | None) -> Address:
        """The address."""
        return self.address

    def account(self) -> str:
        """Nothing is known."""
        return ""
