"""A server and its clients in threads of one process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..workload import Workload
from . import Connector
from .child import GivenHandle, HandleSource


class ThreadServer(Protocol):
    """What both libraries' `InferenceServer` can do."""

    def start(self) -> Any: ...

    def clients(self, count: int, /) -> Sequence[Any]: ...

    def shutdown(self) -> None: ...


class ThreadService:
    """A `Service` whose server is a thread of this process, and so are its clients."""

    def __init__(
        self,
        workload: Workload,
        server: ThreadServer,
        connector: Callable[[HandleSource], Connector],
    ) -> None:
        self._server = server
        self._connectors = [connector(GivenHandle(c)) for c in server.clients(workload.clients)]

    def connectors(self) -> Sequence[Connector]:
        return self._connectors

    def start(self) -> int:
        self._server.start()
        return os.getpid()

    def stop(self) -> None:
        self._server.shutdown()
