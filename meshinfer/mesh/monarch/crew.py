"""The processes of a mesh: who is where, what runs there, and what to do when one dies. Imports monarch."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from monarch.actor import ProcMesh

from meshinfer.errors import ClosedError, MeshError
from meshinfer.mesh.groups import RankGroup
from meshinfer.mesh.monarch.actors import RankActors
from meshinfer.mesh.monarch.agent import this_machine
from meshinfer.mesh.monarch.board import Notice, board_of, forget_board
from meshinfer.mesh.monarch.ends import EndWatch, Rounds, await_ends, stop_all
from meshinfer.mesh.monarch.failures import FailureLog, RankFailure
from meshinfer.mesh.monarch.seats import Group, Seat, Spawner
from meshinfer.mesh.monarch.service import RankServer, Service
from meshinfer.monarch_faults import Fault, watch_faults

__all__ = ["Crew"]

logger = logging.getLogger("meshinfer.mesh")


@dataclass(frozen=True)
class _Recipe:
    """How a user's actors were spawned."""

    actors: RankActors
    cls: type
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


class Crew:
    """See :class:`~meshinfer.mesh.monarch.mesh.MonarchMesh`, whose arguments these are."""

    def __init__(
        self, hosts: Any, on_failure: Callable[[RankFailure], object] | None, timeout: float
    ) -> None:
        self.token = f"mi{secrets.token_hex(5)}"
        self.machine = this_machine()
        self.groups: dict[str, Group] = {}
        self.failures = FailureLog(on_failure)
        self.closing = False
        self._spawner = Spawner(self.token, hosts, timeout)
        self._recipes: dict[tuple[str, str], _Recipe] = {}
        self._services: dict[str, Service] = {}
        self._spawned: dict[str, tuple[str, list[Seat]]] = {}
        """By the name of an actor mesh: the actors' name for the user, and the seats."""
        self._old: list[Seat] = []
        self._ends = EndWatch()
        self._rounds = Rounds(lambda seat, cause: self._lose(seat, None, cause))
        self._lock = threading.RLock()
        self._state = threading.Lock()
        self._stop_watching = watch_faults(self.token, self._heed)

    def group(self, name: str) -> Group:
        """Raises :class:`MeshError` that lists the groups there are."""
        if name not in self.groups:
            known = ", ".join(map(repr, self.groups))
            raise MeshError(f"there is no rank group {name!r}; the groups are {known}")
        return self.groups[name]

    def start(self, wanted: Mapping[str, Any]) -> None:
        """Start the processes of all groups at once, and wait for them."""
        numbers = count()
        for name, spec in wanted.items():
            given = isinstance(spec, ProcMesh)
            procs = [spec] if given else self._spawner.spawn_group(name, spec)
            size = len(spec) if given else len(procs)
            ranks = RankGroup(name, tuple(next(numbers) for _ in range(size)))
            self.groups[name] = Group(ranks, procs, given)
        waits = [self._spawner.seat(group) for group in self.groups.values()]
        for wait in waits:
            wait()
        for group in self.groups.values():
            for seat in group.seats:
                self._admit(seat, group.seats if seat.given else [seat])

    def _admit(self, seat: Seat, mates: Sequence[Seat]) -> None:
        self._spawned[f"{seat.prefix}_agent"] = ("meshinfer's agent", list(mates))
        if seat.end is not None:
            self._ends.watch(seat.end, lambda: self._lose(seat, None, "the process has ended"))
        else:
            self._rounds.include(seat)

    # Actors.

    def spawn(
        self, group: str, name: str, cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> RankActors:
        """See :meth:`MonarchMesh.spawn`."""
        with self._lock:
            if not isinstance(name, str) or not name.isidentifier():
                raise MeshError(f"actor name {name!r} is not an identifier, such as 'stepper'")
            if (group, name) in self._recipes:
                raise MeshError(f"group {group!r} has actors called {name!r} already")
            actors = RankActors(name, self._spawn(self.group(group), name, cls, args, kwargs))
            self._recipes[group, name] = _Recipe(actors, cls, args, kwargs)
            return actors

    def spawn_at(self, seat: Seat, name: str, cls: type, *args: Any, **kwargs: Any) -> Any:
        """An actor in the process of a seat that has its proc mesh for itself, as an actor mesh of one."""
        full = f"{seat.prefix}_{name}"
        self._spawned[full] = (name, [seat])
        actor = seat.procs.spawn(full, cls, *args, **kwargs)
        if seat.given:
            self._spawner.guests.append(actor)
        return actor

    def _spawn(
        self, group: Group, name: str, cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> list[Any]:
        if all(seat.is_alone for seat in group.seats):
            return [self.spawn_at(seat, name, cls, *args, **kwargs) for seat in group.seats]
        if group.damaged:
            raise MeshError(
                f"group {group.name!r} has lost ranks or actors, and monarch spawns nothing more on what is left of "
                "the proc mesh that was given: spawn all actors before, or give a number of processes instead"
            )
        (procs,) = group.procs
        full = f"{group.seats[0].prefix}_{name}"
        self._spawned[full] = (name, list(group.seats))
        whole = procs.spawn(full, cls, *args, **kwargs)
        self._spawner.guests.append(whole)
        flat = whole.flatten("rank")
        return [flat.slice(rank=rank) for rank in range(len(group.seats))]

    # Servers.

    def begin_service(
        self,
        name: str,
        group: Group,
        make: Callable[[int, str, Callable[[], Any]], RankServer],
    ) -> Service:
        """Serve a policy on every rank of a group."""
        with self._lock:
            if not isinstance(name, str) or not name.isidentifier():
                raise MeshError(f"policy name {name!r} is not an identifier, such as 'policy'")
            if not all(seat.is_alone for seat in group.seats):
                raise MeshError(
                    f"group {group.name!r} is a proc mesh of {len(group.seats)} processes, where monarch can neither "
                    "watch nor stop one server alone: give a number of processes, or a proc mesh of one"
                )
            if name in self._services:
                raise MeshError(f"a policy called {name!r} is being served; give name= another one")
            service = self._services[name] = Service(self, name, group.name, group.seats, make)
            try:
                service.begin()
            except BaseException:
                service.shutdown(0.0)
                raise
            return service

    def forget_service(self, service: Service) -> None:
        """See :class:`~meshinfer.mesh.monarch.service.Landlord`."""
        self._services = {n: known for n, known in self._services.items() if known is not service}

    def tell(self, server: str, notice: Notice) -> None:
        """See :class:`~meshinfer.mesh.monarch.service.Landlord`; waits for nobody."""
        board_of(self.token).post(server, notice)
        for group in self.groups.values():
            for seat in group.seats:
                if seat.alive:
                    seat.agent.tell.broadcast(server, notice)

    # Deaths.

    def respawn(self, group: str, rank: int) -> None:
        """See :meth:`MonarchMesh.respawn`."""
        with self._lock:
            if self.closing:
                raise ClosedError("this mesh was closed; make a new one")
            seats = self.group(group)
            self._retire(seats, seats.seat(rank))
            seat = seats.seats[rank] = self._spawner.replace(seats.seat(rank))
            self._admit(seat, [seat])
            for server, notice in board_of(self.token).notices().items():
                seat.agent.tell.broadcast(server, notice)
            for (owner, name), recipe in self._recipes.items():
                if owner == group:
                    actor = self.spawn_at(seat, name, recipe.cls, *recipe.args, **recipe.kwargs)
                    recipe.actors.replace(rank, actor)
            for service in list(self._services.values()):
                if service.group == group:
                    service.begin_again(rank)

    def _retire(self, group: Group, seat: Seat) -> None:
        with self._state:
            alive, seat.alive, seat.retired = seat.alive, False, True
        group.damaged = group.damaged or seat.given
        if alive:
            self._bury(seat, None, "its process was replaced")
            seat.agent.leave.broadcast()
        self._old.append(seat)

    def _heed(self, fault: Fault) -> None:
        """Monarch says that an actor of ours, or its process, is no more."""
        label, seats = self._spawned.get(fault.mesh.rpartition("-")[0], ("", []))
        if fault.rank >= len(seats):
            logger.debug("%s, rank %d: %s", fault.mesh, fault.rank, fault.cause)
            return
        self._lose(seats[fault.rank], None if fault.process_died else label, fault.cause)

    def _lose(self, seat: Seat, actor: str | None, cause: str) -> None:
        with self._state:
            news = seat.alive and not self.closing
            seat.alive = seat.alive and actor is not None
        if not news:
            logger.debug("%s rank %d: %s", seat.group, seat.rank, cause)
            return
        self.groups[seat.group].damaged |= seat.given
        self._bury(seat, actor, cause)
        who = seat.who
        failure = RankFailure(seat.group, seat.rank, who.host_name, who.pid, actor, cause)
        self.failures.add(failure)

    def _bury(self, seat: Seat, actor: str | None, cause: str) -> None:
        for service in list(self._services.values()):
            if service.group == seat.group and actor in (None, service.actor_name):
                service.bury(seat.rank, cause)

    # The end.

    def close(self, timeout: float) -> None:
        """See :meth:`MonarchMesh.close`."""
        with self._lock:
            if self.closing:
                return
            try:
                # First of all, so that whoever waits for a reply stops waiting.
                for service in list(self._services.values()):
                    service.shutdown(timeout)
            finally:
                self.closing = True
                self._end_processes(timeout)
        # Without the lock: a thread that is to end may be about to replace a rank.
        self._ends.close()
        self._rounds.close()
        self._stop_watching()
        forget_board(self.token)

    def _end_processes(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        seats = [seat for group in self.groups.values() for seat in group.seats] + self._old
        ours = [seat for seat in seats if not seat.given]
        first = [mesh for group in self.groups.values() if not group.given for mesh in group.procs]
        later = [seat.procs for seat in ours if seat.procs not in first]
        stop_all([*self._spawner.guests, *first, *later], deadline)
        await_ends(ours, deadline)
        for seat in seats:
            seat.forget()
