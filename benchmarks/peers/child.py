"""A server in a process of its own that hands each client a handle once it serves."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from ..workload import Workload
from . import Connector

# Only a backstop: the harness gives up first, and knows how many processes are starting.
START_SECONDS = 300.0
STOP_SECONDS = 10.0


class ServerControl:
    """The server process's line to the conductor and to the clients' connectors."""

    def __init__(self, conductor: Connection, clients: Sequence[Connection]) -> None:
        self._conductor, self._clients = conductor, clients

    def publish(self, handles: Iterable[Any]) -> None:
        """Give every client its handle and tell the conductor that requests are served."""
        for pipe, handle in zip(self._clients, handles, strict=True):
            pipe.send(handle)
        self._conductor.send("serving")

    def wait_for_stop(self) -> None:
        """Block until the conductor wants the server to end."""
        self._conductor.recv()


@dataclass
class HandleSource:
    """Where a client process reads the handle that the server made for it."""

    pipe: Connection

    def receive(self) -> Any:
        """The handle; raises TimeoutError if the server made none in time."""
        if not self.pipe.poll(START_SECONDS):
            raise TimeoutError(f"no client handle from the server within {START_SECONDS:.0f} s")
        return self.pipe.recv()


class ChildService:
    """A `Service` whose server is `serve(workload, control)` run in a spawned process."""

    def __init__(
        self,
        workload: Workload,
        serve: Callable[[Workload, ServerControl], None],
        connector: Callable[[HandleSource], Connector],
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._control, self._theirs = context.Pipe()
        pipes = [context.Pipe(duplex=False) for _ in range(workload.clients)]
        self._connectors = [connector(HandleSource(reader)) for reader, _ in pipes]
        control = ServerControl(self._theirs, [writer for _, writer in pipes])
        self._process = context.Process(target=serve, args=(workload, control), daemon=True)

    def connectors(self) -> Sequence[Connector]:
        return self._connectors

    def start(self) -> int:
        self._process.start()
        # With this copy closed, the death of the process ends the pipe and no read hangs.
        self._theirs.close()
        if not self._control.poll(START_SECONDS):
            raise RuntimeError(f"the server was not ready within {START_SECONDS:.0f} s")
        try:
            self._control.recv()
        except EOFError:
            self._process.join(STOP_SECONDS)
            raise RuntimeError(f"the server process died: {self._process!r}") from None
        return int(self._process.pid or 0)

    def stop(self) -> None:
        self._control.send("stop")
        self._process.join(STOP_SECONDS)
        if self._process.exitcode != 0:
            raise RuntimeError(f"the server process did not end cleanly: {self._process!r}")
