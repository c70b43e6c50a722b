"""A server and its clients as monarch actors of this host, each in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

# Its log would otherwise grow in the system's folder for temporary files.
os.environ.setdefault("MONARCH_FILE_LOG", "off")

from monarch.actor import Actor, current_rank, endpoint, shutdown_context, this_host

from ..client import Client
from ..workload import Workload
from . import ClientEnd, Connector, Serving
from .child import START_SECONDS, STOP_SECONDS, GivenHandle, HandleSource

# The conductor waits for a burst, whose length it knows, with a limit of its own.
_COMMAND_SECONDS = 300.0
# A process that has imported torch takes a second of a processor to end.
_STOP_MESH_SECONDS = 60.0


class ServerActor(Actor):
    """Serves between `begin` and `end`."""

    def __init__(self, workload: Workload, serving: Serving) -> None:
        self._serving, self._workload = serving, workload
        self._stack = ExitStack()

    @endpoint
    def begin(self) -> tuple[int, Sequence[Any]]:
        """This process's id and the clients' handles."""
        return os.getpid(), self._stack.enter_context(self._serving(self._workload))

    @endpoint
    def end(self) -> None:
        self._stack.close()


class ClientActor(Actor):
    """The client whose number is its rank."""

    def __init__(self, connectors: Sequence[Connector], workload: Workload) -> None:
        # Not in an endpoint: there it is the rank within what was called.
        rank = current_rank().rank
        self._client = Client(connectors[rank], workload, rank)

    @endpoint
    def obey(self, command: Any) -> bytes | None:
        return self._client.obey(command)


class _ClientEnd:
    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._outcome: Any = None

    def tell(self, command: Any) -> None:
        self._outcome = self._actor.obey.call_one(command)

    def answer(self) -> Any:
        return self._outcome.get(timeout=_COMMAND_SECONDS)


class MonarchService:
    """An `ActorService` on one process mesh for the server and one for the clients.

    `server` is called with the workload and `arguments`, and has the endpoints of `ServerActor`.
    """

    def __init__(
        self,
        workload: Workload,
        connector: Callable[[HandleSource], Connector],
        server: type[Actor],
        *arguments: Any,
    ) -> None:
        self._workload, self._connector = workload, connector
        self._server_class, self._arguments = server, arguments
        self._server: Any = None
        self._meshes: list[Any] = []
        self._ends: list[ClientEnd] = []

    def start(self) -> int:
        mesh = self._spawn_procs("server", 1)
        self._server = mesh.spawn("server", self._server_class, self._workload, *self._arguments)
        pid, handles = self._server.begin.call_one().get(timeout=START_SECONDS)
        self._ends = self._start_clients(self._handles(handles))
        return int(pid)

    def clients(self) -> Sequence[ClientEnd]:
        return self._ends

    def stop(self) -> None:
        self._server.end.call_one().get(timeout=STOP_SECONDS)
        for stopping in [mesh.stop() for mesh in self._meshes]:
            stopping.get(timeout=_STOP_MESH_SECONDS)
        shutdown_context(host_timeout=1.0).get(timeout=STOP_SECONDS)

    def _handles(self, made: Sequence[Any]) -> Sequence[Any]:
        return made

    def _spawn_procs(self, name: str, count: int) -> Any:
        mesh = this_host().spawn_procs(per_host={"procs": count}, name=name)
        self._meshes.append(mesh)
        return mesh

    def _start_clients(self, handles: Sequence[Any]) -> list[ClientEnd]:
        connectors = [self._connector(GivenHandle(handle)) for handle in handles]
        mesh = self._spawn_procs("clients", len(connectors))
        actors = mesh.spawn("clients", ClientActor, connectors, self._workload)
        actors.initialized.get(timeout=START_SECONDS)
        return [_ClientEnd(actors.slice(procs=number)) for number in range(len(connectors))]
