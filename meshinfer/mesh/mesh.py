"""One script on every rank: who serves, who steps environments, and how they find each other."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshinfer.errors import MeshError
from meshinfer.inference.distributed import DistributedTransport
from meshinfer.mesh.groups import GroupSpec, RankGroup, assign_clients, split_world
from meshinfer.mesh.job_store import open_job_store
from meshinfer.mesh.launcher import LaunchEnvironment
from meshinfer.rendezvous import Directory
from meshinfer.weights.direct import DirectWeights
from meshinfer.weights.distributed import DistributedWeights
from meshinfer.weights.protocol import WeightTransport

__all__ = ["Mesh", "init_mesh"]

_DEFAULT_GROUPS: Mapping[str, GroupSpec] = {"server": 1, "env": ...}


@dataclass(frozen=True)
class Mesh:
    """The ranks of one job, split into named groups, as seen from one of them.

    Args:
        environment: what the launcher said.
        groups: every rank is in exactly one.
        role: the name of this rank's group.
        directory: the store where servers are published; ``None`` when ranks were given without ``host`` and ``port``.
        secret: of the job, when it was given by hand.
        interface: see :func:`~meshinfer.rendezvous.choose_address`.
    """

    environment: LaunchEnvironment
    groups: tuple[RankGroup, ...]
    role: str
    directory: Directory | None = None
    secret: str | bytes | None = field(default=None, repr=False)
    interface: str | None = None
    _close_store: Callable[[], None] | None = field(default=None, repr=False, compare=False)

    @property
    def rank(self) -> int:
        """This process among all of the job."""
        return self.environment.rank

    @property
    def world_size(self) -> int:
        """How many processes the job has."""
        return self.environment.world_size

    @property
    def local_rank(self) -> int:
        """This process among those of its node."""
        return self.environment.local_rank

    def group(self, name: str) -> RankGroup:
        """The group called ``name``; :class:`MeshError` lists the names that exist."""
        for group in self.groups:
            if group.name == name:
                return group
        known = ", ".join(repr(group.name) for group in self.groups)
        raise MeshError(f"there is no rank group {name!r}; the groups are {known}")

    def assignment(
        self, servers: str = "server", clients: str | Sequence[str] | None = None
    ) -> dict[int, int]:
        """Which server, by its position in the group ``servers``, each client rank talks to.

        Same host first, then evenly; every rank computes the same answer.

        Args:
            servers: name of the group that serves.
            clients: name or names of the groups that ask; by default ``"env"`` where it exists, else all the others.
        """
        ranks = [rank for group in self._client_groups(servers, clients) for rank in group]
        return assign_clients(self.group(servers).ranks, ranks, self.environment.node_of)

    def transport(
        self,
        request_spec: Any,
        response_spec: Any,
        *,
        name: str = "policy",
        servers: str = "server",
        clients: str | Sequence[str] | None = None,
        **options: Any,
    ) -> DistributedTransport:
        """This rank's end of a transport from the ``clients`` groups to the ``servers`` group.

        Args:
            request_spec, response_spec: see :class:`~meshinfer.DistributedTransport`.
            name: of what is served; two different policies in one job need two names.
            servers, clients: see :meth:`assignment`.
            options: more arguments for :class:`~meshinfer.DistributedTransport`.

        Returns:
            A transport with role ``"server"`` in the servers' group, ``"client"`` in the clients' groups.

        Raises:
            MeshError: this rank is in neither group, or ranks have no way to find each other.
        """
        common = {"rank": self.rank, "secret": self.secret, "interface": self.interface, **options}
        common["directory"] = self._find_directory()
        assigned = self.assignment(servers, clients)
        if self.role == servers:
            index = self.group(servers).index(self.rank)
            return DistributedTransport(
                request_spec,
                response_spec,
                role="server",
                name=f"{name}/{index}",
                expected_ranks=[rank for rank, server in assigned.items() if server == index],
                spans_hosts=self.environment.spans_hosts,
                **common,
            )
        if self.rank not in assigned:
            raise MeshError(
                f"rank {self.rank} is in group {self.role!r}, neither a server nor a client of {name!r}; "
                "name its group in servers= or clients="
            )
        return DistributedTransport(
            request_spec,
            response_spec,
            role="client",
            name=f"{name}/{assigned[self.rank]}",
            **common,
        )

    def weight_transport(
        self,
        spec: object,
        *,
        name: str = "weights",
        publishers: str = "learner",
        subscribers: str | Sequence[str] = "server",
        **options: Any,
    ) -> WeightTransport:
        """This rank's end of what moves weights from the group ``publishers`` to the ``subscribers`` groups.

        Args:
            spec: the weights, the same on every rank; see :class:`~meshinfer.weights.distributed.DistributedWeights`.
            name: of the weights; those of two models in one job need two names.
            publishers: the group that trains. Where it has several ranks, its first one publishes for all of them.
            subscribers: the groups that serve; the same group where each rank trains and serves by itself.
            options: more arguments for the transport.

        Returns:
            A :class:`~meshinfer.weights.DirectWeights` where both groups are the same; else a
            :class:`~meshinfer.weights.distributed.DistributedWeights` with role ``"publisher"`` or ``"subscriber"``.

        Raises:
            MeshError: this rank is in none of the groups or is not the one that publishes, or ranks have no way to find
                each other.
        """
        first = self.group(publishers).ranks[0]
        served = [subscribers] if isinstance(subscribers, str) else list(subscribers)
        if not any(self.rank in self.group(each) for each in [publishers, *served]):
            raise MeshError(
                f"rank {self.rank} is in group {self.role!r}, which neither publishes nor subscribes to {name!r}; "
                "name its group in publishers= or subscribers="
            )
        if served == [publishers]:
            return DirectWeights(spec, **options)
        publishes = self.role == publishers
        if publishes and self.rank != first:
            raise MeshError(
                f"rank {self.rank} is not the first of group {publishers!r}: rank {first} publishes {name!r} for all "
                "of them, so call weight_transport() there only"
            )
        return DistributedWeights(
            spec,
            role="publisher" if publishes else "subscriber",
            name=name,
            directory=self._find_directory(),
            spans_hosts=publishes and self.environment.spans_hosts,
            **{"rank": self.rank, "secret": self.secret, "interface": self.interface, **options},
        )

    def close(self) -> None:
        """Close the store that rank 0 hosts where no launcher does. Idempotent; happens at exit by itself."""
        if self._close_store is not None:
            self._close_store()

    def __str__(self) -> str:
        groups = ", ".join(str(group) for group in self.groups)
        env = self.environment
        return (
            f"Mesh(rank {env.rank} of {env.world_size} is {self.role!r}; {groups}; node {env.node_rank} of "
            f"{env.num_nodes}; {env.launcher} job {env.job_id!r}, restart {env.restart_count})"
        )

    __repr__ = __str__

    def _client_groups(self, servers: str, clients: str | Sequence[str] | None) -> list[RankGroup]:
        if clients is None:
            others = [group for group in self.groups if group.name != servers]
            return [group for group in others if group.name == "env"] or others
        names = [clients] if isinstance(clients, str) else list(clients)
        if servers in names:
            raise MeshError(f"group {servers!r} cannot be server and client of the same transport")
        return [self.group(name) for name in names]

    def _find_directory(self) -> Directory:
        if self.directory is None:
            raise MeshError(
                "ranks cannot find each other: no launcher hosts a store, so init_mesh needs host= and port= "
                "(an address of rank 0 and a free port there, the same on every rank)"
            )
        return self.directory


def init_mesh(
    groups: Mapping[str, GroupSpec] | None = None,
    *,
    rank: int | None = None,
    world_size: int | None = None,
    local_rank: int | None = None,
    local_world_size: int | None = None,
    host: str | None = None,
    port: int | None = None,
    secret: str | bytes | None = None,
    interface: str | None = None,
) -> Mesh:
    """Read the launcher's environment, split the world into rank groups, and give this rank its role.

    Launchers are torchrun, ``srun``, ``mpirun``, and whoever set RANK, WORLD_SIZE and MASTER_ADDR: a user, or monarch's
    SPMD actor. Where torchrun's agent hosts no store for the job, rank 0 does.
    Neither creates nor touches ``torch.distributed``'s default process group, and waits for no other rank.

    Args:
        groups: how many ranks (``2``), which ranks (``[0, 5]``), :class:`~meshinfer.PerNode`, or ``...`` for the rest,
            by name. By default one ``"server"``, the rest ``"env"``.
        rank, world_size: given together where no launcher started the processes.
        local_rank, local_world_size: with them, on several hosts.
        host: an address or name of rank 0's host; where neither the launcher nor ``MASTER_ADDR`` says it, or to
            correct what they say. With ``rank`` and ``world_size`` together with ``port``.
        port: where rank 0 hosts the job's store. By default a port that the system chooses, which the other ranks
            learn from rank 0; never ``MASTER_PORT``.
        secret: of the job; ``MESHINFER_SECRET`` by default. Without either, each server makes one and publishes it in
            the job's store, so that it protects from strangers and mix-ups, but not from those who can read that store.
        interface: name or address of the interface that this rank uses.

    Raises:
        MeshError: a variable is missing or senseless, or the groups do not fit the world.
    """
    environment = _environment(rank, world_size, local_rank, local_world_size)
    split = split_world(
        environment.world_size, _DEFAULT_GROUPS if groups is None else groups, env=environment
    )
    role = next(group.name for group in split if environment.rank in group)
    directory, close = open_job_store(
        environment, host=host, port=port, secret=secret, interface=interface
    )
    mesh = Mesh(environment, split, role, directory, secret, interface, close)
    if close is not None:
        weakref.finalize(directory, close)  # which transports keep, also when nobody keeps the mesh
    return mesh


def _environment(
    rank: int | None, world_size: int | None, local_rank: int | None, local_world_size: int | None
) -> LaunchEnvironment:
    if (rank is None) != (world_size is None):
        raise MeshError(
            f"rank={rank} and world_size={world_size}: give both, or neither under a launcher"
        )
    if rank is None or world_size is None:
        return LaunchEnvironment.from_environ()
    return LaunchEnvironment.explicit(
        rank, world_size, local_rank=local_rank, local_world_size=local_world_size
    )
