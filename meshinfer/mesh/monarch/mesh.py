"""Rank groups made of monarch's processes, watched over by the program that made them."""

from __future__ import annotations

import atexit
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from tensordict import TensorDictBase

from meshinfer.arguments import as_seconds
from meshinfer.errors import ClosedError, MeshError
from meshinfer.inference.protocol import InferenceTransport
from meshinfer.mesh.groups import GroupSpec, RankGroup, assign_clients
from meshinfer.mesh.monarch.actors import RankActors
from meshinfer.mesh.monarch.failures import RankFailure
from meshinfer.mesh.monarch.server import MonarchServer
from meshinfer.mesh.monarch.wiring import PostedTransport, ServerPlace, client_side
from meshinfer.optional import load_monarch
from meshinfer.rendezvous import given_secret
from meshinfer.transport import TransportConfig, as_transport_config
from meshinfer.weights.protocol import WeightTransport
from meshinfer.weights.resolver import make_weight_transport

if TYPE_CHECKING:
    from meshinfer.mesh.monarch.crew import Crew
    from meshinfer.mesh.monarch.seats import Group
    from meshinfer.mesh.monarch.service import RankServer

__all__ = ["MonarchMesh"]

_DEFAULT_GROUPS: Mapping[str, Any] = {"server": 1, "env": 3}


class MonarchMesh:
    """Named rank groups of monarch's processes.

    The program that makes it is the controller: it serves policies on one group (:meth:`serve`), spawns actors on the
    others (:meth:`spawn`), is told of ranks that die (:attr:`failures`, :meth:`next_failure`, ``on_failure``), which
    do not end it, and may replace them (:meth:`respawn`). A context manager; :meth:`close` ends it all.

    monarch's fault hook is in front of the user's from then on: faults of this mesh are told here, all others go on to
    ``monarch.actor.unhandled_fault_hook`` as it was. Not for use within a running asyncio loop.

    Args:
        hosts: monarch's host mesh; ``this_host()`` by default.
        groups: by name a number of processes in total, spread evenly over the hosts (fewer than hosts go to the first
            ones), :class:`~meshinfer.PerNode` for so many on each host: then each process has a proc mesh of its own,
            and its death touches no other. Or a ready proc mesh, which stays the caller's: only the actors in it are
            stopped here, and monarch may stop the actors of all its ranks some time after it has lost one. It cannot
            serve, unless it is of one process.
        on_failure: called with a :class:`RankFailure` for each rank that dies, in a thread of meshinfer.
        secret: of the job; by default ``MESHINFER_SECRET``, else one is made and goes round by monarch's messages.
        interface: name or address of the interface that servers listen on. By default the address by which monarch
            reaches their host, and the loopback interface where all clients are on the same machine.
        startup_timeout: seconds for processes to start and to import what they need, and for policies to be made.

    Raises:
        ImportError: torchmonarch is missing.
        MeshError: the groups do not fit the hosts, or processes could not start.
        TimeoutError: they did not in time.
    """

    def __init__(
        self,
        hosts: Any = None,
        groups: Mapping[str, Any] | None = None,
        *,
        on_failure: Callable[[RankFailure], object] | None = None,
        secret: str | bytes | None = None,
        interface: str | None = None,
        startup_timeout: float = 120.0,
    ) -> None:
        monarch = load_monarch("MonarchMesh")
        from meshinfer.mesh.monarch.crew import Crew  # not earlier: it imports monarch

        as_seconds("startup_timeout", startup_timeout)
        self._timeout = float(startup_timeout)
        self._secret = given_secret(secret)
        self._interface = interface
        wanted = _DEFAULT_GROUPS if groups is None else groups
        _check_names(wanted)
        self._crew: Crew = Crew(
            monarch.this_host() if hosts is None else hosts, on_failure, self._timeout
        )
        atexit.register(self.close)
        try:
            self._crew.start(wanted)
        except BaseException:
            self.close()
            raise

    @property
    def groups(self) -> tuple[RankGroup, ...]:
        """All groups; their ranks are numbers among all processes of the mesh, in order of declaration."""
        return tuple(group.ranks for group in self._crew.groups.values())

    def procs(self, group: str) -> list[Any]:
        """The proc mesh of each rank: of one process, or the one that was given. Only :meth:`spawn` watches actors."""
        return [seat.procs for seat in self._crew.group(group).seats]

    def hosts(self, group: str) -> list[str]:
        """The name of each rank's host."""
        return [seat.who.host_name for seat in self._crew.group(group).seats]

    def pids(self, group: str) -> list[int]:
        """The process of each rank, on its host."""
        return [seat.who.pid for seat in self._crew.group(group).seats]

    def spawn(self, group: str, name: str, cls: type, *args: Any, **kwargs: Any) -> RankActors:
        """Spawn an actor on every rank of a group.

        Args:
            group: its name.
            name: of the actors; an identifier.
            cls: a class of monarch's actors.
            args, kwargs: for its constructor; a :class:`MonarchServer` among them makes clients there.

        Raises:
            MeshError: there is no such group, the name is taken, or the group has lost ranks or actors: monarch spawns
                nothing more on what is left of its proc mesh.
        """
        self._check_open()
        return self._crew.spawn(group, name, cls, args, kwargs)

    def serve(
        self,
        policy_factory: Callable[[], Any],
        transport: TransportConfig | str | None = "auto",
        *,
        servers: str = "server",
        clients: str | Sequence[str] | None = None,
        name: str = "policy",
        request_spec: TensorDictBase | None = None,
        response_spec: TensorDictBase | None = None,
        transport_options: Mapping[str, Any] | None = None,
        weight_transport: WeightTransport | TransportConfig | str | None = None,
        **arguments: Any,
    ) -> MonarchServer:
        """Serve a policy on every rank of a group, and wait until it is served.

        Args:
            policy_factory: called without arguments in each server's process; returns the policy. May be a function of
                the script itself.
            transport: ``"monarch"`` (any payload, by monarch's messages; ``"auto"`` too), ``"distributed"`` (fixed
                layouts, over gloo), or a :class:`~meshinfer.TransportConfig` of these.
            servers: name of the group that serves.
            clients: name or names of the groups that ask; by default ``"env"`` where it exists, else all the others.
            name: of the policy; two policies need two names.
            request_spec, response_spec: for ``"distributed"``.
            transport_options: for the transport; ``host`` and ``interface`` say where ``"distributed"`` listens.
            weight_transport: where every server gets new weights from; as for
                :class:`~meshinfer.MonarchInferenceServer`.
            arguments: more for :class:`~meshinfer.InferenceServer`: batching, ``in_keys``, devices.

        Raises:
            MeshError: there is no such group, the name is taken, or other hosts cannot reach the server's address.
            Exception: what the factory raised, and what a server raises for its arguments.
        """
        self._check_open()
        config = as_transport_config(transport).with_options(transport_options)
        group = self._crew.group(servers)
        assigned = self._assign(group, self._client_groups(servers, clients))
        specs = {"request_spec": request_spec, "response_spec": response_spec}
        facts = {key: spec for key, spec in specs.items() if spec is not None}
        weights = weight_transport
        if weights is not None:  # one for all of them
            weights = make_weight_transport(weights, policy_backend="monarch")

        def make(rank: int, server: str, begin: Callable[[], Any]) -> RankServer:
            from meshinfer.mesh.monarch.service import RankServer

            made = self._transport(
                config, server, facts, lambda: self._place(group, rank, assigned)
            )
            ours = {"policy_factory": policy_factory, "startup_timeout": self._timeout, **made}
            ours["weight_transport"] = weights
            return RankServer(server, begin, **{**ours, **arguments})

        try:
            service = self._crew.begin_service(name, group, make)
        except BaseException:
            if weights is not None and weights is not weight_transport:
                weights.close()
            raise
        service.made_weights = None if weights is weight_transport else weights
        sides = [client_side(server.transport) for server in service.servers]
        return MonarchServer(self._crew.token, name, sides, assigned, service)

    def respawn(self, group: str, rank: int) -> None:
        """Give a rank a new process on the same host: after it has died, or instead of the one that it has.

        Its actors are spawned again with the arguments that they had, and found in their :class:`RankActors`; their
        clients replace those of the old process. A server rank serves its policies again, as the factories make them.

        Raises:
            MeshError: there is no such group or rank, or the process could not start.
        """
        self._check_open()
        self._crew.respawn(group, rank)

    @property
    def failures(self) -> list[RankFailure]:
        """Every rank, or actor of a rank, that has died so far."""
        return self._crew.failures.all()

    def next_failure(self, timeout: float | None = None) -> RankFailure:
        """The next failure that was not returned yet, waiting for it.

        Args:
            timeout: seconds; ``None`` for no limit.

        Raises:
            TimeoutError: there was none.
        """
        return self._crew.failures.take(timeout)

    def close(self, timeout: float = 15.0) -> None:
        """End servers, actors and processes. Clients that wait raise :class:`ServerClosedError` first. Idempotent.

        Args:
            timeout: seconds for endpoints that still run; what is left on this machine then is killed.
        """
        as_seconds("timeout", timeout, zero=True)
        atexit.unregister(self.close)
        self._crew.close(timeout)

    def __enter__(self) -> MonarchMesh:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> Any:
        raise TypeError(
            "a MonarchMesh stays with its controller; give actors what serve() returned"
        )

    def __repr__(self) -> str:
        groups = ", ".join(f"{ranks.name}: {len(ranks)}" for ranks in self.groups)
        return f"MonarchMesh({groups}{', closed' if self._crew.closing else ''})"

    def _client_groups(self, servers: str, clients: str | Sequence[str] | None) -> list[Group]:
        if clients is None:
            others = [group for name, group in self._crew.groups.items() if name != servers]
            return [group for group in others if group.name == "env"] or others
        names = [clients] if isinstance(clients, str) else list(clients)
        if servers in names:
            raise MeshError(f"group {servers!r} cannot be server and client of the same policy")
        return [self._crew.group(name) for name in names]

    def _assign(
        self, servers: Group, clients: list[Group]
    ) -> dict[tuple[str, int], tuple[int, int]]:
        numbered = {
            number: (seat.group, seat.rank, seat.who.host)
            for group in (servers, *clients)
            for number, seat in zip(group.ranks, group.seats, strict=True)
        }
        hosts = list(dict.fromkeys(host for _, _, host in numbered.values()))
        chosen = assign_clients(
            servers.ranks.ranks,
            [number for group in clients for number in group.ranks],
            lambda number: hosts.index(numbered[number][2]),
        )
        return {numbered[number][:2]: (number, position) for number, position in chosen.items()}

    def _transport(
        self,
        config: TransportConfig,
        server: str,
        facts: Mapping[str, Any],
        locate: Callable[[], ServerPlace],
    ) -> dict[str, Any]:
        """Arguments of a server that say how clients reach it."""
        if config.kind != "distributed":
            options = dict(config.options)
            if self._secret is not None:
                options.setdefault("secret", self._secret)
            return {"transport": TransportConfig(config.kind, options), **facts}
        missing = [spec for spec in ("request_spec", "response_spec") if spec not in facts]
        if missing:
            raise ValueError(f"transport 'distributed' needs {' and '.join(missing)}")
        secret = self._secret if self._secret is not None else secrets.token_bytes(32)
        options = {"secret": secret, "interface": self._interface, **facts, **config.options}
        made: InferenceTransport = PostedTransport(self._crew.token, server, locate, options)
        return {"transport": made}

    def _place(
        self, group: Group, rank: int, assigned: Mapping[tuple[str, int], tuple[int, int]]
    ) -> ServerPlace:
        mine = {key: number for key, (number, server) in assigned.items() if server == rank}
        seats = [self._crew.group(name).seat(index) for name, index in mine]
        who = group.seat(rank).who
        machines = {seat.who.machine for seat in seats} | {self._crew.machine}
        return ServerPlace(
            host_name=who.host_name,
            address=who.address,
            spans_hosts=bool(machines - {who.machine}),
            expected_ranks=tuple(mine.values()),
        )

    def _check_open(self) -> None:
        if self._crew.closing:
            raise ClosedError("this mesh was closed; make a new one")


def _check_names(groups: Mapping[str, GroupSpec]) -> None:
    if not groups:
        raise MeshError("a mesh needs at least one group, such as {'server': 1, 'env': 3}")
    for name in groups:
        if not isinstance(name, str) or not name.isidentifier():
            raise MeshError(
                f"group name {name!r} is not an identifier: use letters, digits and underscores, such as 'server'"
            )
