"""Processes of a monarch mesh by group and rank: started, introduced, replaced."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from meshinfer.errors import MeshError
from meshinfer.mesh.groups import PerNode, RankGroup
from meshinfer.mesh.monarch.agent import Agent, Introduction
from meshinfer.server.lifetime import end_of_process, this_machine

__all__ = ["Group", "Seat", "Spawner", "count_procs"]


@dataclass
class Seat:
    """One process, and what runs in it.

    Args:
        group: its name.
        rank: in the group.
        prefix: what the names of its meshes begin with.
        procs: the proc mesh that it belongs to: of one process, or one of the user's.
        given: whether that is the user's, who stops it.
        index: of the process in it, dimensions in order.
        agent: ours there, an actor mesh of one.
        who: what the process said of itself.
        end: becomes readable when a process of this machine has ended.
        alive: whether the process is, as far as is known.
        retired: whether another process has its place, so that nothing it does matters.
    """

    group: str
    rank: int
    prefix: str
    procs: Any
    given: bool
    index: int
    agent: Any
    who: Introduction
    end: int | None = None
    alive: bool = True
    retired: bool = False

    @property
    def is_alone(self) -> bool:
        """Whether its proc mesh has no other process."""
        return len(self.procs) == 1

    def forget(self) -> None:
        """Close what was kept of the process."""
        if self.end is not None:
            os.close(self.end)
            self.end = None


@dataclass
class Group:
    """The processes of one rank group.

    Args:
        ranks: their numbers among all of the mesh.
        procs: a proc mesh of one process for each rank, or the user's, of all.
        given: whether it is the user's.
        seats: by rank.
        damaged: whether a process of the user's proc mesh has died, or an actor in it: monarch spawns nothing there
            any more.
    """

    ranks: RankGroup
    procs: list[Any]
    given: bool
    seats: list[Seat] = field(default_factory=list)
    damaged: bool = False

    @property
    def name(self) -> str:
        """Of the group."""
        return self.ranks.name

    def seat(self, rank: int) -> Seat:
        """Raises :class:`MeshError` for a rank that the group does not have."""
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < len(self.seats):
            raise MeshError(
                f"rank {rank!r} is not in group {self.name!r}: its ranks are 0-{len(self.seats) - 1}"
            )
        return self.seats[rank]


class Spawner:
    """Makes proc meshes and seats whose names all contain the token of the mesh.

    Args:
        token: of the mesh.
        hosts: monarch's host mesh.
        timeout: seconds for processes to start and to import what they need.
    """

    def __init__(self, token: str, hosts: Any, timeout: float) -> None:
        self.token = token
        self.timeout = timeout
        self._hosts = hosts.flatten("hosts") if len(hosts.extent) > 0 else hosts
        self.guests: list[Any] = []
        """Actor meshes in proc meshes of the user's, which go on when they are stopped."""
        self._lives = 0

    @property
    def num_hosts(self) -> int:
        """Hosts of the mesh."""
        return len(self._hosts)

    def spawn_group(self, name: str, spec: object) -> list[Any]:
        """A proc mesh for each rank of a group; the processes are starting when this returns.

        Not one proc mesh for all: in monarch 0.7.0 nothing can be spawned on one that has lost a process or an actor,
        a call to all of its actors fails with one of them, and the others may be stopped after a while as "orphaned".
        """
        hosts = [self._hosts]
        if self.num_hosts > 1:
            hosts = [self._hosts.slice(hosts=n) for n in range(self.num_hosts)]
        counts = self._counts(name, spec)
        placed = [host for n, host in enumerate(hosts[: len(counts)]) for _ in range(counts[n])]
        return [
            host.spawn_procs(per_host={"procs": 1}, name=f"{self.token}_{name}_{rank}")
            for rank, host in enumerate(placed)
        ]

    def _counts(self, name: str, spec: object) -> list[int]:
        per_host = count_procs(name, spec, self.num_hosts)
        if per_host is None:  # fewer processes than hosts
            return [1] * spec  # type: ignore[operator]  # count_procs() has found an int
        return [per_host] * self.num_hosts

    def seat(self, group: Group) -> Callable[[], None]:
        """Send our actors into the processes of a group; the returned function waits until each has a seat."""
        prefix = f"{self.token}_{group.name}"
        if group.given:
            (procs,) = group.procs
            agents = procs.spawn(f"{prefix}_agent", Agent, self.token, group.name, None)
            self.guests.append(agents)
            flat = agents.flatten("rank")
            asked = [(procs, prefix, rank, flat.slice(rank=rank)) for rank in range(len(procs))]
        else:
            asked = [
                (
                    procs,
                    f"{prefix}_{rank}",
                    0,
                    self._agent(procs, f"{prefix}_{rank}", group.name, rank),
                )
                for rank, procs in enumerate(group.procs)
            ]
        answers = [agent.introduce.call_one() for _, _, _, agent in asked]

        def wait() -> None:
            for (procs, name, index, agent), answer in zip(asked, answers, strict=True):
                who = self._await(answer, f"group {group.name!r}")
                group.seats.append(
                    self._take(group.name, name, procs, group.given, index, agent, who)
                )

        return wait

    def replace(self, seat: Seat) -> Seat:
        """A new process for the place of ``seat``, on the same host."""
        self._lives += 1
        prefix = f"{self.token}_{seat.group}_{seat.rank}_life{self._lives}"
        procs = self._host_of(seat).spawn_procs(per_host={"procs": 1}, name=prefix)
        agent = self._agent(procs, prefix, seat.group, seat.rank)
        who = self._await(agent.introduce.call_one(), f"rank {seat.rank} of group {seat.group!r}")
        return self._take(seat.group, prefix, procs, False, 0, agent, who)

    def _agent(self, procs: Any, prefix: str, group: str, rank: int) -> Any:
        agents = procs.spawn(f"{prefix}_agent", Agent, self.token, group, rank)
        return agents.flatten("rank").slice(rank=0)

    def _take(
        self,
        group: str,
        prefix: str,
        procs: Any,
        given: bool,
        index: int,
        agent: Any,
        who: Introduction,
    ) -> Seat:
        end = None
        if who.process_space == this_machine():
            with contextlib.suppress(ProcessLookupError):  # it is told elsewhere
                end = end_of_process(who.pid)
        return Seat(group, who.rank, prefix, procs, given, index, agent, who, end)

    def _host_of(self, seat: Seat) -> Any:
        return seat.procs.flatten("rank").slice(rank=seat.index).host_mesh

    def _await(self, future: Any, what: str) -> Any:
        try:
            return future.get(timeout=self.timeout)
        except TimeoutError as error:
            raise TimeoutError(
                f"{what}: its processes did not all start within {self.timeout:g} s; are the hosts reachable, "
                "and meshinfer installed there? Raise startup_timeout if they are only slow"
            ) from error
        except RuntimeError as error:  # monarch's SupervisionError is one
            raise MeshError(f"{what}: its processes could not start: {error}") from error


def count_procs(name: str, spec: object, num_hosts: int) -> int | None:
    """How many processes of a group each host gets; ``None`` when fewer hosts than all get one each.

    Raises:
        MeshError: the processes cannot be spread evenly, or ``spec`` is something else.
    """
    if isinstance(spec, PerNode):
        return spec.count
    if isinstance(spec, bool) or not isinstance(spec, int):
        raise MeshError(
            f"group {name!r} is {spec!r} ({type(spec).__name__}): expected a number of processes, PerNode(n) for so "
            "many on each host, or a ProcMesh"
        )
    if spec < 1:
        raise MeshError(f"group {name!r} asks for {spec} processes: give it at least one")
    if spec < num_hosts:
        return None
    if spec % num_hosts:
        raise MeshError(
            f"group {name!r}: {spec} processes cannot be spread evenly over {num_hosts} hosts; give a multiple of "
            f"{num_hosts}, PerNode(n) for so many on each host, or a ProcMesh"
        )
    return spec // num_hosts
