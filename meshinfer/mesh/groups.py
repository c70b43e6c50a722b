"""Named rank groups of a world, and which server each client talks to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import TypeGuard

from meshinfer.errors import MeshError
from meshinfer.mesh.launcher import LaunchEnvironment

__all__ = ["GroupSpec", "PerNode", "RankGroup", "assign_clients", "spell_ranks", "split_world"]


@dataclass(frozen=True)
class PerNode:
    """Ask for the ``count`` lowest ranks of every node that no other group has taken yet.

    Raises:
        MeshError: ``count`` is not a positive int.
    """

    count: int

    def __post_init__(self) -> None:
        if not _is_int(self.count) or self.count < 1:
            raise MeshError(f"PerNode({self.count!r}): expected a positive int, the ranks per node")


GroupSpec = int | Sequence[int] | PerNode | EllipsisType
"""What a group asks for: a count, the ranks themselves, so many per node, or ``...``, the rest."""


@dataclass(frozen=True)
class RankGroup:
    """Some ranks of the world under one name, in the order in which they were declared."""

    name: str
    ranks: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.ranks)

    def __contains__(self, rank: object) -> bool:
        return rank in self.ranks

    def __iter__(self) -> Iterator[int]:
        return iter(self.ranks)

    def __str__(self) -> str:
        return f"{self.name}[{spell_ranks(self.ranks)}]"

    def index(self, rank: int) -> int:
        """Return the position of ``rank`` in this group.

        Raises:
            MeshError: ``rank`` is not in this group.
        """
        if rank not in self.ranks:
            raise MeshError(
                f"rank {rank} is not in group {self.name!r} (ranks {spell_ranks(self.ranks)})"
            )
        return self.ranks.index(rank)


def split_world(
    world_size: int, groups: Mapping[str, GroupSpec], *, env: LaunchEnvironment
) -> tuple[RankGroup, ...]:
    """Give every rank of the world to exactly one named group.

    Explicit ranks are set aside first. Then counts and :class:`PerNode` take the lowest ranks that
    are still free, in the order of declaration, and ``...`` takes what is left. So
    ``{"server": 1, "env": [0, 1]}`` in a world of three makes rank 2 the server.

    Args:
        world_size: how many ranks there are; the same as ``env.world_size``.
        groups: for each name an int (so many ranks), a sequence of ranks, a :class:`PerNode`, or
            ``...``.
        env: tells which node hosts a rank; asked only when a group is a :class:`PerNode`.

    Returns:
        The groups in the order of declaration; explicit ranks keep the order in which they were
        given.

    Raises:
        MeshError: a name is no identifier, a group is empty or asks for more than is left, a rank
            is outside the world or claimed twice, ranks are left over, or more than one group is
            ``...``.
    """
    if world_size != env.world_size:
        raise MeshError(f"world_size={world_size} is not that of the launcher: {env.world_size}")
    _check_names(groups)
    split = _Split(world_size, env)
    for name, spec in groups.items():
        if isinstance(spec, Sequence) and not isinstance(spec, (str, bytes)):
            split.take_explicit(name, spec)
    for name, spec in groups.items():
        if name not in split.taken and spec is not ...:
            split.take_counted(name, spec)
    split.take_rest([name for name, spec in groups.items() if spec is ...])
    return tuple(RankGroup(name, split.taken[name]) for name in groups)


def assign_clients(
    servers: Sequence[int], clients: Sequence[int], node_of: Callable[[int], int]
) -> dict[int, int]:
    """Choose one server for each client, the same whatever the order of ``clients``.

    A client whose node has servers is given to one of those, in turn, even where they are busier
    than servers elsewhere. Then each client whose node has none, lowest rank first, is given to the
    server with the fewest clients. Ties go to the server that comes first in ``servers``.

    Args:
        servers: ranks of the servers.
        clients: ranks of the clients.
        node_of: the node that hosts a rank.

    Returns:
        For each client's rank the position of its server in ``servers``, in ascending order of
        clients.

    Raises:
        MeshError: a rank comes twice, or there are clients but no server.
    """
    _check_assignable(servers, clients)
    positions: dict[int, list[int]] = {}
    for position, server in enumerate(servers):
        positions.setdefault(node_of(server), []).append(position)
    hosts = {client: node_of(client) for client in sorted(clients)}
    # Stable: clients with a server on their node come first, so that the others fill up what those
    # leave uneven.
    placing = sorted(hosts, key=lambda client: hosts[client] not in positions)
    loads = [0] * len(servers)
    chosen: dict[int, int] = {}
    for client in placing:
        candidates = positions.get(hosts[client], range(len(servers)))
        chosen[client] = min(candidates, key=lambda position: (loads[position], position))
        loads[chosen[client]] += 1
    return {client: chosen[client] for client in hosts}


def spell_ranks(ranks: Iterable[int]) -> str:
    """Write ranks compactly, runs as ``first-last``: ``(0, 1, 2, 7)`` becomes ``"0-2, 7"``."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1][1:] = [rank]
        else:
            runs.append([rank])
    return ", ".join("-".join(map(str, run)) for run in runs) or "none"


class _Split:
    """The ranks that are still free while groups take theirs."""

    def __init__(self, world_size: int, env: LaunchEnvironment) -> None:
        self.world_size = world_size
        self.env = env
        self.taken: dict[str, tuple[int, ...]] = {}
        self._owner: dict[int, str] = {}

    def take_explicit(self, name: str, ranks: Sequence[int]) -> None:
        if len(ranks) == 0:
            raise MeshError(f"group {name!r} is empty: give it at least one rank, or leave it out")
        for rank in ranks:
            self._check_rank(name, rank)
            self._owner[rank] = name
        self.taken[name] = tuple(ranks)

    def take_counted(self, name: str, spec: object) -> None:
        if isinstance(spec, PerNode):
            self._give(name, self._lowest_per_node(name, spec.count))
        elif _is_int(spec):
            self._give(name, self._lowest(name, spec))
        else:
            raise MeshError(
                f"group {name!r} is {spec!r} ({type(spec).__name__}): expected a count of ranks, a "
                "sequence of ranks, PerNode(n), or ..."
            )

    def take_rest(self, names: Sequence[str]) -> None:
        free = self._free()
        if len(names) > 1:
            raise MeshError(
                f"groups {', '.join(map(repr, names))} are all `...`: only one can take the rest "
                f"of the world of {self.world_size} ranks; give the others a count"
            )
        if not names and free:
            raise MeshError(
                f"no group takes ranks {spell_ranks(free)} of the world of {self.world_size}: "
                "enlarge a group, or add one that is `...` to take the rest"
            )
        for name in names:
            if not free:
                raise MeshError(
                    f"nothing is left for group {name!r}: {self._takers()} take all "
                    f"{self.world_size} ranks of the world; start more processes or make them "
                    "smaller"
                )
            self._give(name, free)

    def _check_rank(self, name: str, rank: object) -> None:
        if not _is_int(rank):
            raise MeshError(
                f"group {name!r} lists {rank!r} ({type(rank).__name__}): ranks are ints"
            )
        if not 0 <= rank < self.world_size:
            raise MeshError(
                f"group {name!r} lists rank {rank}, outside the world of {self.world_size} ranks "
                f"(0-{self.world_size - 1}); start more processes or change the group"
            )
        owner = self._owner.get(rank)
        if owner == name:
            raise MeshError(f"group {name!r} lists rank {rank} twice; list each rank once")
        if owner is not None:
            raise MeshError(
                f"groups {owner!r} and {name!r} both claim rank {rank} of the world of "
                f"{self.world_size}; leave it in one of them"
            )

    def _lowest(self, name: str, count: int) -> list[int]:
        if count < 1:
            raise MeshError(
                f"group {name!r} asks for {count} ranks: give it at least one, or leave it out"
            )
        free = self._free()
        if count > len(free):
            raise MeshError(
                f"group {name!r} asks for {count} ranks, but of the world of {self.world_size} "
                f"only {len(free)} are left (ranks {spell_ranks(free)}); start more processes or "
                "make a group smaller"
            )
        return free[:count]

    def _lowest_per_node(self, name: str, count: int) -> list[int]:
        free: dict[int, list[int]] = {node: [] for node in range(self.env.num_nodes)}
        for rank in self._free():
            free[self.env.node_of(rank)].append(rank)
        for node, ranks in free.items():
            if count > len(ranks):
                raise MeshError(
                    f"group {name!r} asks for {count} ranks per node, but node {node} of the world "
                    f"of {self.world_size} has only {len(ranks)} left (ranks "
                    f"{spell_ranks(ranks)}); start more processes on each node or make a group "
                    "smaller"
                )
        return [rank for ranks in free.values() for rank in ranks[:count]]

    def _free(self) -> list[int]:
        return [rank for rank in range(self.world_size) if rank not in self._owner]

    def _give(self, name: str, ranks: Sequence[int]) -> None:
        self.taken[name] = tuple(ranks)
        self._owner.update(dict.fromkeys(ranks, name))

    def _takers(self) -> str:
        return ", ".join(str(RankGroup(name, ranks)) for name, ranks in self.taken.items())


def _is_int(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_names(groups: Mapping[str, GroupSpec]) -> None:
    for name in groups:
        if not isinstance(name, str) or not name.isidentifier():
            raise MeshError(
                f"group name {name!r} is not an identifier: use letters, digits and underscores, "
                "such as 'server'"
            )


def _check_assignable(servers: Sequence[int], clients: Sequence[int]) -> None:
    for kind, ranks in (("server", servers), ("client", clients)):
        twice = sorted(rank for rank, times in Counter(ranks).items() if times > 1)
        if twice:
            raise MeshError(f"{kind} ranks come twice: {spell_ranks(twice)}; list each rank once")
    if clients and not servers:
        raise MeshError(
            f"clients {spell_ranks(sorted(clients))} have no server: give the server group a rank"
        )
