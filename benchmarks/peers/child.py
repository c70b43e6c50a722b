"""A server in a process of its own, and how its clients get what they need to reach it."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

from ..workload import Workload
from . import START_METHOD, Connector, Serving

# Only a backstop: the harness gives up first, and knows how many processes are starting.
START_SECONDS = 300.0
STOP_SECONDS = 10.0


class ServerControl:
    """The server process's line to the conductor and to the clients' connectors."""

    def __init__(self, conductor: Connection, clients: Sequence[Connection]) -> None:
        self._conductor, self._clients = conductor, clients

    def publish(self, handles: Iterable[Any] = ()) -> None:
        """Tell the conductor that requests are served; every client gets its handle first.

        No handles where the clients were given theirs before the server started.
        """
        for pipe, handle in zip(self._clients, handles, strict=True):
            pipe.send(handle)
        self._conductor.send("serving")

    def wait_for_stop(self) -> None:
        """Block until the conductor wants the server to end."""
        self._conductor.recv()


class HandleSource(Protocol):
    """Where a client finds its handle."""

    def receive(self) -> Any:
        """The handle; raises TimeoutError if the server made none in time."""


@dataclass
class PipedHandle:
    """A handle that the server makes once it serves."""

    pipe: Connection

    def receive(self) -> Any:
        if not self.pipe.poll(START_SECONDS):
            raise TimeoutError(f"no client handle from the server within {START_SECONDS:.0f} s")
        return self.pipe.recv()


@dataclass
class GivenHandle:
    """A handle that was made before the server and goes to a client's process as it starts."""

    handle: Any

    def receive(self) -> Any:
        return self.handle


def hold(serving: Serving, workload: Workload, control: ServerControl) -> None:
    """Serve in this process until the conductor wants it to end."""
    with serving(workload) as handles:
        control.publish(handles)
        control.wait_for_stop()


class ChildService:
    """A `Service` whose server is `serve(workload, control)` run in a child process.

    With `handles`, one for each client, the server publishes none.
    """

    def __init__(
        self,
        workload: Workload,
        serve: Callable[[Workload, ServerControl], None],
        connector: Callable[[HandleSource], Connector],
        handles: Sequence[Any] | None = None,
    ) -> None:
        context = multiprocessing.get_context(START_METHOD)
        self._control, self._theirs = context.Pipe()
        writers: list[Connection] = []
        if handles is None:
            pipes = [context.Pipe(duplex=False) for _ in range(workload.clients)]
            writers = [writer for _, writer in pipes]
            self._connectors = [connector(PipedHandle(reader)) for reader, _ in pipes]
        else:
            self._connectors = [connector(GivenHandle(handle)) for handle in handles]
        control = ServerControl(self._theirs, writers)
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
