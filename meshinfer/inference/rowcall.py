"""One request after another through rows that stay where they are: what is left of a client without its TensorDicts."""

from __future__ import annotations

from typing import Final, Protocol, runtime_checkable

from meshinfer.layout import PayloadLayout, RowViews

__all__ = ["NO_VERSION", "RowCall", "RowCalling"]

NO_VERSION: Final = -1
"""Where the server stamps no version."""


class RowCall(Protocol):
    """For one thread, which has one request in flight.

    Attributes:
        request: the row that the thread fills before :meth:`send`.
        reply: the row that it reads after :meth:`receive`, valid until the next ``send``.
    """

    request: RowViews
    reply: RowViews

    def send(self) -> None:
        """Ask for what is in the request's row. Errors as of a client's ``submit``."""

    def receive(self) -> int:
        """Wait for the reply, while the server is alive; the policy version, :data:`NO_VERSION` without one.

        Raises:
            Exception: as ``result()`` of a future.
        """


@runtime_checkable
class RowCalling(Protocol):
    """A client that has such a way."""

    def row_call(self, request: PayloadLayout, response: PayloadLayout) -> RowCall | None:
        """The way, for requests and replies of these layouts; ``None`` where the transport's are others.

        It is this client's only request from now on, and ends with it.
        """
