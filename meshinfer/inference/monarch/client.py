"""The client of a :class:`~meshinfer.inference.monarch.transport.MonarchTransport`."""

from __future__ import annotations

import time
from typing import Any, cast

from meshinfer.errors import PeerLostError, ServerClosedError
from meshinfer.inference.monarch.connection import MonarchConnection
from meshinfer.inference.monarch.locate import MonarchAddress, MonarchWhereabouts
from meshinfer.inference.monarch.ports import actor_here
from meshinfer.inference.queues.client import QueueClient
from meshinfer.inference.queues.locate import NotThereError

__all__ = ["MonarchClient"]


class MonarchClient(QueueClient):
    """An actor's or a controller's way to the policy server, wherever that is.

    Picklable, by monarch too: it may be an argument or a result of an endpoint. It sends in the name of the actor
    whose endpoint uses it first, else of the one whose message brought it, else of the process's own monarch client.
    Connects on first use; may be shared by threads. After the server is lost the next call looks for it again. Of no
    use in a process that was forked from one that uses monarch, which cannot be forked.

    Args:
        whereabouts: of the server, and the secret.
        timeout: seconds for connecting, and for the server to take a request.
        actor: of this process, in whose name to send where the calling thread has none.
    """

    def __init__(self, whereabouts: MonarchWhereabouts, timeout: float, actor: Any = None) -> None:
        super().__init__(cast(Any, whereabouts), timeout)
        self._actor = actor_here() if actor is None else actor
        self._joining: MonarchConnection | None = None

    def close(self) -> None:
        """Leave the server; requests in flight raise :class:`~meshinfer.errors.ClosedError`. Idempotent."""
        super().close()
        joining = self._joining
        if joining is not None:
            joining.close()

    def _rejoin(self, ended: Any, deadline: float) -> Any:
        """Of a server that has said goodbye nobody else knows where it is now, unless somebody sent us to it."""
        if isinstance(ended.error, ServerClosedError) and not ended.redirected:
            ended.close()
            raise ended.error
        return super()._rejoin(ended, deadline)

    def _reach(self, address: Any, deadline: float) -> Any:
        attempt = time.monotonic() + self._whereabouts.attempt_seconds
        try:
            return self._enter(address, min(deadline, attempt))
        except PeerLostError as error:
            raise NotThereError(str(error)) from error
        except TimeoutError as error:
            if deadline <= attempt:
                raise
            raise NotThereError(str(error)) from error

    def _enter(self, address: MonarchAddress, deadline: float) -> MonarchConnection:
        """Join the server at ``address``, or the one to which we are sent from there."""
        redirected = False
        while True:
            self._joining = connection = MonarchConnection(
                address, self._timeout, self._whereabouts.account, self._actor
            )
            connection.redirected = redirected
            if self._closed:
                connection.close()
            try:
                leads_to = connection.join(deadline)
            except BaseException:
                connection.close()
                raise
            finally:
                self._joining = None
            if leads_to is None:
                return connection
            connection.close()
            address, redirected = leads_to, True
