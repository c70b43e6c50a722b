"""One life of a server that lives elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["ServerLife"]


class ServerLife(Protocol):
    """One life of a server, from its start to its end, as its owner sees it. The methods are for any thread."""

    @property
    def policy_version(self) -> int:
        """The last that is known."""

    @property
    def pid(self) -> int | None:
        """Of its process, where that is; ``None`` while it is not known."""

    @property
    def exitcode(self) -> int | None:
        """Of its process, where that is told."""

    @property
    def ended(self) -> bool:
        """Whether it is over."""

    @property
    def is_ready(self) -> bool:
        """Whether the server serves, as far as is known. Never waits."""

    def wait_until_ready(self, timeout: float) -> None:
        """Wait until it serves.

        Raises:
            TimeoutError: it does not yet after ``timeout`` seconds.
            PeerLostError: it has ended.
            Exception: what the policy factory, or the server's construction, raised.
        """

    def call(self, function: Callable[..., Any], *arguments: Any, timeout: float) -> Any:
        """What ``function(server, *arguments)``, one of :mod:`~meshinfer.server.requests`, returns or raises there.

        Raises:
            TimeoutError: no answer after ``timeout`` seconds; what was asked may still happen.
            PeerLostError: the server's process has ended.
        """

    def stop(self, timeout: float) -> None:
        """End it: in good order if it can, by force otherwise; ``timeout`` seconds for the batch in hand.

        Returns when it has gone.
        """
