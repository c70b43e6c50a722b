"""The public face of the queue between Ray processes."""

from __future__ import annotations

import secrets
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import ray

from meshinfer.inference.queues.address import TcpAddress
from meshinfer.inference.queues.client import QueueClient
from meshinfer.inference.queues.locate import FixedPlace, Whereabouts
from meshinfer.inference.queues.served import QueueTransport, check_role
from meshinfer.inference.ray.actors import ActorPlace, HeldActor, NamedActor
from meshinfer.inference.ray.serving import publish, this_actor, withdraw
from meshinfer.optional import load_ray
from meshinfer.rendezvous import choose_address, given_secret, resolve

__all__ = ["RayClient", "RayTransport"]


class RayClient(QueueClient):
    """The client of a :class:`RayTransport`.

    Works in the driver, in actors and tasks of any node, and in processes that are not connected to Ray, as long as the
    server is where it was when the client was made.
    """


class RayTransport(QueueTransport):
    """Requests over TCP between the processes of a Ray cluster, with no layout fixed in advance.

    Ray tells who serves and where, and pickles the clients; requests do not pass through its object store. A payload
    may be whatever can be pickled, and if its leaves are plain tensors nothing is, as with
    :class:`~meshinfer.inference.queues.transport.MPTransport`, with which it shares everything but the address. The
    server may be in the driver, in a task, or in an actor: sync, threaded or async. It listens on the address under
    which Ray knows its node, and interprets nothing before both sides have proved to hold the secret, which travels
    inside pickled clients. What travels is not encrypted.

    A client looks for a server in an actor through the actor's handle, so it finds one that Ray has started again, and
    its error names one that is dead, with Ray's reason. A node that vanishes is noticed within 15 s. The server that an
    actor makes in ``__init__`` is made again when Ray restarts the actor. The actor has to answer Ray meanwhile: serve
    in a thread, as :class:`~meshinfer.server.server.InferenceServer` does. ``ray.init`` is the user's.
    Implements :class:`~meshinfer.inference.protocol.ServedTransport`.

    Args:
        timeout: seconds for a client to connect, and for the server to take a request. Idling has no limit.
        role: ``"server"`` for the process that serves, ``"client"`` for one that only makes clients, which needs
            ``host``, ``port`` and ``secret``, and not Ray.
        host: server: the address to listen on, by default Ray's of this node; client: the server's.
        port: server: 0 or ``None`` lets the system choose; client: the server's.
        secret: proves that both sides belong to one job. ``MESHINFER_SECRET`` by default; else a server makes one.
        name: sets the servers of one actor apart.

    Raises:
        ValueError, TypeError: an argument cannot work, or Ray is not initialised here; says what to do instead.
    """

    transport_kind = "ray"

    def __init__(
        self,
        *,
        timeout: float = 60.0,
        role: Literal["server", "client"] = "server",
        host: str | None = None,
        port: int | None = None,
        secret: str | bytes | None = None,
        name: str = "policy",
    ) -> None:
        check_role(role)
        self.name = _checked_name(name)
        given = given_secret(secret)
        self._wanted_port = _checked_port(port)
        self._actor: Any = None
        self._elsewhere: NamedActor | None = None
        self._known: TcpAddress | None
        self._withdrawal: weakref.finalize[..., RayTransport] | None = None
        if role == "client":
            super().__init__(None, timeout)
            self._address = _address_of_server(host, port, given)
            self._known = self._address
            return
        _check_ray()
        own = secrets.token_bytes(32) if given is None else given
        super().__init__(TcpAddress(_listening_address(host), port or 0, own), timeout)
        self._address = cast(TcpAddress, self._server().address)
        self._known = self._address
        token = f"meshinfer-{secrets.token_hex(8)}"
        self._elsewhere = NamedActor(token, ray.get_runtime_context().namespace)
        self._publish()

    def _publish(self) -> None:
        """Let the actor that we are in, if any, tell where we listen."""
        self._actor = this_actor()
        if self._actor is None:
            return
        try:
            publish(self.name, self._address)
        except ValueError:
            self.close()
            raise
        self._withdrawal = weakref.finalize(self, withdraw, self.name, self._address)

    @property
    def host(self) -> str:
        """The address at which the server listens, or listened before :meth:`serve_elsewhere`."""
        return self._address.host

    @property
    def port(self) -> int:
        """Its port."""
        return self._address.port

    @property
    def secret(self) -> bytes:
        """What a transport of ``role="client"`` elsewhere needs besides host and port. Keep it to yourself."""
        return self._address.secret

    def client(self) -> RayClient:
        """A new client: picklable, connects on first use."""
        self._check_open()
        return RayClient(self._whereabouts(), self.timeout)

    @property
    def actor_options(self) -> dict[str, str]:
        """Options for the actor that calls what :meth:`serve_elsewhere` returns: the name by which clients find it."""
        return {"name": self._other_place().name, "namespace": self._other_place().namespace}

    def serve_elsewhere(self) -> Callable[[], RayTransport]:
        """Let an actor serve; this object only makes clients from now on.

        May be called again when that actor has died. Clients find the new server and wait for it, also those that were
        made before, unless it was in another actor that they have been made.

        Returns:
            A picklable function that opens the server's side. To be called in an actor that was made with
            ``.options(**transport.actor_options)``: in its ``__init__``, if Ray may restart it. It listens on the
            address of that actor's node.
        """
        actor = self._other_place()
        self._stop_serving_here()
        self._withdraw()
        self._actor = None
        self._known = None
        return _Opener(actor.name, self.timeout, self._wanted_port, self._address.secret)

    def close(self) -> None:
        """See :meth:`~meshinfer.inference.queues.served.QueueTransport.close`."""
        self._withdraw()
        super().close()

    def _withdraw(self) -> None:
        if self._withdrawal is not None:
            self._withdrawal()

    def _other_place(self) -> NamedActor:
        if self._elsewhere is None:
            raise ValueError(
                "a RayTransport of role='client' does not say who serves; call it on the one that was made to serve"
            )
        return self._elsewhere

    def _whereabouts(self) -> Whereabouts:
        if self._actor is not None:
            return ActorPlace(HeldActor(self._actor), self.name, self._known)
        if self._elsewhere is not None:
            return ActorPlace(self._elsewhere, self._elsewhere.name, self._known)
        return FixedPlace(self._address)

    def _place(self) -> object:
        return self._known or self._elsewhere


@dataclass(frozen=True)
class _Opener:
    """Opens the server's side of a transport, in the actor that clients look for."""

    actor: str
    timeout: float
    port: int | None
    secret: bytes = field(repr=False)

    def __call__(self) -> RayTransport:
        _check_ray()
        found = None if this_actor() is None else ray.get_runtime_context().get_actor_name()
        if found != self.actor:
            where = "no actor" if found is None else f"an actor named {found!r}"
            raise ValueError(
                f"the server has to be opened in the Ray actor {self.actor!r}, where clients look for it, and this is"
                f" {where}; make the actor with .options(**transport.actor_options)"
            )
        return RayTransport(
            timeout=self.timeout, port=self.port, secret=self.secret, name=self.actor
        )


def _check_ray() -> None:
    if ray.util.client.ray.is_connected():
        raise ValueError(
            "a RayTransport cannot serve in a driver that is connected through Ray Client (ray://), which is no node of"
            " the cluster; serve in an actor, for example with service_backend='ray'"
        )
    load_ray("a RayTransport")


def _checked_name(name: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"name: expected a str, found {type(name).__name__}")
    if not name:
        raise ValueError("name is empty; give at least one character, or leave it out")
    return name


def _checked_port(port: int | None) -> int | None:
    if port is not None and (isinstance(port, bool) or not isinstance(port, int)):
        raise TypeError(f"port: expected an int or None, found {type(port).__name__}")
    if port is not None and not 0 <= port < 1 << 16:
        raise ValueError(f"port={port}: expected 0 to 65535")
    return port


def _address_of_server(host: str | None, port: int | None, secret: bytes | None) -> TcpAddress:
    if host is None or not port or secret is None:
        raise ValueError(
            "role='client' needs to know where the server is: pass its host, port and secret, or give this process"
            " clients of the server's transport"
        )
    return TcpAddress(resolve(host), port, secret)


def _listening_address(host: str | None) -> str:
    """Numeric, of one interface."""
    return choose_address(resolve(ray.util.get_node_ip_address() if host is None else host))
