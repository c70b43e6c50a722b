"""A server and its clients as actors of a Ray of this host, each in a process of its own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import ray

from ..client import Client
from ..workload import Workload
from . import ClientEnd, Connector, Serving
from .child import START_SECONDS, STOP_SECONDS, GivenHandle, HandleSource

# The conductor waits for a burst, whose length it knows, with a limit of its own.
_COMMAND_SECONDS = 300.0
# For placing actors only, none of which keeps a processor; Ray starts as many processes in advance.
_PROCESSORS = 2
_STORE_BYTES = 100 << 20


class Server:
    """Serves between `begin` and `end`."""

    def __init__(self, workload: Workload, serving: Serving) -> None:
        self._workload, self._serving = workload, serving
        self._stack = ExitStack()

    def begin(self) -> tuple[int, Sequence[Any]]:
        """This process's id and the clients' handles."""
        return os.getpid(), self._stack.enter_context(self._serving(self._workload))

    def end(self) -> None:
        self._stack.close()


class _ClientEnd:
    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._outcome: Any = None

    def tell(self, command: Any) -> None:
        self._outcome = self._actor.obey.remote(command)

    def answer(self) -> Any:
        return ray.get(self._outcome, timeout=_COMMAND_SECONDS)


class RayServer(Protocol):
    """A server in an actor, as seen by the program that has it started."""

    def begin(self) -> tuple[int, Sequence[Any]]:
        """Start it: its process's id and the clients' handles. Ray is running."""

    def end(self) -> None:
        """End it in the way its users would."""


class ServingActor:
    """A `RayServer` that runs `serving`."""

    def __init__(self, workload: Workload, serving: Serving) -> None:
        self._arguments = workload, serving
        self._actor: Any = None

    def begin(self) -> tuple[int, Sequence[Any]]:
        self._actor = ray.remote(num_cpus=0)(Server).remote(*self._arguments)
        return ray.get(self._actor.begin.remote(), timeout=START_SECONDS)

    def end(self) -> None:
        ray.get(self._actor.end.remote(), timeout=STOP_SECONDS)


class RayService:
    """An `ActorService` in a Ray of its own."""

    def __init__(
        self,
        workload: Workload,
        connector: Callable[[HandleSource], Connector],
        server: RayServer,
    ) -> None:
        self._workload, self._connector, self._server = workload, connector, server
        self._ends: list[ClientEnd] = []

    def start(self) -> int:
        ray.init(
            address="local",
            num_cpus=_PROCESSORS,
            object_store_memory=_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            _temp_dir=tempfile.gettempdir(),
        )
        pid, handles = self._server.begin()
        self._ends = self._start_clients(handles)
        return pid

    def clients(self) -> Sequence[ClientEnd]:
        return self._ends

    def stop(self) -> None:
        self._server.end()
        ray.shutdown()

    def _start_clients(self, handles: Sequence[Any]) -> list[ClientEnd]:
        actor = ray.remote(num_cpus=0)(Client)
        connectors = [self._connector(GivenHandle(handle)) for handle in handles]
        actors = [actor.remote(c, self._workload, n) for n, c in enumerate(connectors)]
        ray.get([client.__ray_ready__.remote() for client in actors], timeout=START_SECONDS)
        return [_ClientEnd(client) for client in actors]
