"""The public face of the queue over monarch's messages."""

from __future__ import annotations

import time
from typing import Any, cast

from meshinfer.inference.monarch.client import MonarchClient
from meshinfer.inference.monarch.hub import MonarchHub
from meshinfer.inference.monarch.locate import FixedServer, MonarchAddress, MonarchWhereabouts
from meshinfer.inference.monarch.ports import actor_here
from meshinfer.inference.queues.served import QueueTransport
from meshinfer.rendezvous import given_secret

__all__ = ["MonarchTransport"]


class MonarchTransport(QueueTransport):
    """Requests as messages of monarch, between actors and controllers on one host or several.

    Make it in the process that serves: in ``__init__`` or an endpoint of an actor, or in the controller. Hand its
    clients to actors in messages. They work in ``def`` and ``async def`` endpoints (futures can be awaited), in plain
    threads of an actor's process, and in the serving process itself.

    A payload may be whatever can be pickled. If its leaves are plain tensors nothing is: they travel as one row of
    bytes, whose layout is described once for each connection, in one message each way. Nothing that this class
    interprets is interpreted before both sides have proved to hold the secret, which travels inside pickled clients.
    monarch itself unpickles whatever reaches a port, from anybody who can reach it: that is not in our hands, and is
    a reason to keep its ports inside a trusted network. No reply waits for its client, and no client has more than
    64 MiB of requests without an answer lying at the server.

    The end of a server's process raises :class:`~meshinfer.errors.PeerLostError` at its clients, at once on the same
    host and within 15 s from others; a server that computes for minutes is not lost, as long as it lets other threads
    of Python run. Where only its actor is stopped, :class:`~meshinfer.errors.ServerClosedError` comes a few seconds
    later, or at once if the actor's ``__cleanup__`` calls :meth:`close`. Implements
    :class:`~meshinfer.inference.protocol.ServedTransport`.

    Args:
        timeout: seconds for a client to join, and for the server to take a request. Idling has no limit.
        secret: proves that both sides belong to one job. ``MESHINFER_SECRET`` by default; else a server makes one.
        whereabouts: of a server elsewhere, for a transport that only makes clients.
        actor: of this process, in whose name to listen: the one whose endpoint this runs in, by default, as in
            ``monarch.actor.context().actor_instance``. Where there is none, it is the process's own monarch client.

    Raises:
        ValueError, TypeError: an argument cannot work; says which and what to give instead.
        ImportError: torchmonarch is missing, or is another version than 0.7.
        PeerLostError: the actor of this process was stopped.
    """

    transport_kind = "monarch"

    def __init__(
        self,
        *,
        timeout: float = 60.0,
        secret: str | bytes | None = None,
        whereabouts: MonarchWhereabouts | None = None,
        actor: Any = None,
    ) -> None:
        super().__init__(None, timeout)
        given = given_secret(secret)
        self._actor = actor_here() if actor is None else actor
        self._home: MonarchHub | None = None
        if whereabouts is None:
            hub = MonarchHub(given, self._actor)
            self._serve_with(cast(Any, hub))
            whereabouts = FixedServer(hub.address)
        self._whereabouts = whereabouts

    @property
    def address(self) -> MonarchAddress:
        """Where clients find this server, or who tells them where it is. Picklable; it holds the secret.

        Raises:
            ValueError: this transport was made with ``whereabouts``, which alone know it.
        """
        if not isinstance(self._whereabouts, FixedServer):
            raise ValueError(f"only {self._whereabouts} knows where the server is")
        return self._whereabouts.address

    def client(self) -> MonarchClient:
        """A new client: picklable, connects on first use."""
        self._check_open()
        return MonarchClient(self._whereabouts, self.timeout, self._actor)

    def serve_elsewhere(self) -> MonarchOpener:
        """Let another process serve; this object makes clients from now on, and tells them where the server is.

        May be called again when that process has died. Clients made before and after find the new server through this
        process, whose transport has to stay open; those that were connected lose what they had in flight.

        Returns:
            A picklable function that opens the server's side in the process that calls it. See its ``prepare``.
        """
        self._check_open()
        if self._hub is not None:
            self.role, self._home = "client", cast(Any, self._hub)
            self._hub = None
        if self._home is None:
            raise ValueError(
                f"the server of this transport is where {self._whereabouts} says; it cannot send it elsewhere"
            )
        self._home.guide()
        return MonarchOpener(self._home.address, self.timeout)

    def _place(self) -> object:
        return self._whereabouts


class MonarchOpener:
    """Opens the server's side of a transport in the process that calls it. Picklable.

    Args:
        home: of the transport that it is for.
        timeout: see :class:`MonarchTransport`.
    """

    def __init__(self, home: MonarchAddress, timeout: float) -> None:
        self._home = home
        self._timeout = timeout
        self._actor = actor_here()

    def prepare(self) -> None:
        """In an endpoint: serve in the name of its actor, wherever the call comes from later.

        Not needed where the function is called, or was unpickled, in the endpoint.
        """
        self._actor = actor_here()

    def __call__(self) -> MonarchTransport:
        """The server's side; errors as in :class:`MonarchTransport`, and when the transport's process is gone."""
        deadline = time.monotonic() + self._timeout
        made = MonarchTransport(
            timeout=self._timeout, secret=self._home.secret, actor=actor_here() or self._actor
        )
        try:
            cast(MonarchHub, made._hub).register(self._home, deadline)
        except BaseException:
            made.close()
            raise
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._home, self._timeout)
