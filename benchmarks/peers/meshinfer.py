"""meshinfer, the server with its own defaults, over one of its transports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..workload import Workload
from . import Service, Session
from .child import ChildService, HandleSource, ServerControl
from .threads import ThreadService

if TYPE_CHECKING:
    from meshinfer import InferenceServer

NAME = "meshinfer"
PACKAGES = ("torch", "tensordict", "meshinfer")
MODULES = ("benchmarks.policy", "meshinfer")


def open_service(workload: Workload, transport: str) -> Service:
    if transport == "distributed":
        return ChildService(workload, _serve_distributed, MeshInferConnector)
    if transport == "slot":
        return _threads(workload)
    return LocalService(workload, _PROCESS_TRANSPORTS[transport](workload))


class LocalService(ChildService):
    """A transport of the conductor, the parent of server and clients, served by one child for the others."""

    def __init__(self, workload: Workload, transport: Any) -> None:
        self._transport = transport
        clients = [transport.client() for _ in range(workload.clients)]
        serve = partial(_serve_elsewhere, transport.serve_elsewhere())
        super().__init__(workload, serve, MeshInferConnector, handles=clients)

    def stop(self) -> None:
        super().stop()
        self._transport.close()


def _process_slot(workload: Workload) -> Any:
    from meshinfer.inference.shared import ProcessSlotTransport

    from ..policy import specs

    return ProcessSlotTransport(*specs(workload), num_slots=workload.clients)


def _shared_memory(workload: Workload) -> Any:
    from meshinfer.inference.shared import SharedMemoryTransport

    from ..policy import specs

    return SharedMemoryTransport(*specs(workload), num_slots=workload.clients)


def _queue(workload: Workload) -> Any:
    from meshinfer.inference.queues import MPTransport

    return MPTransport()


_PROCESS_TRANSPORTS: dict[str, Callable[[Workload], Any]] = {
    "process_slot": _process_slot,
    "shared_memory": _shared_memory,
    "queue": _queue,
}


def _threads(workload: Workload) -> ThreadService:
    from meshinfer.inference.slot import SlotTransport

    server = _server(workload, SlotTransport(workload.clients))
    return ThreadService(workload, server, MeshInferConnector)


def _serve_elsewhere(
    make_transport: Callable[[], Any], workload: Workload, control: ServerControl
) -> None:
    with _server(workload, make_transport()):
        control.publish()
        control.wait_for_stop()


def _serve_distributed(workload: Workload, control: ServerControl) -> None:
    import meshinfer

    from ..policy import specs

    transport = meshinfer.DistributedTransport(*specs(workload), host="127.0.0.1")
    with _server(workload, transport):
        control.publish([transport.client() for _ in range(workload.clients)])
        control.wait_for_stop()


def _server(workload: Workload, transport: Any) -> InferenceServer:
    import meshinfer

    from ..policy import make_policy

    return meshinfer.InferenceServer(
        make_policy(),
        transport,
        max_batch_size=64,
        in_keys=[leaf.key for leaf in workload.request],
        out_keys=["action"],
    )


@dataclass
class MeshInferConnector:
    source: HandleSource

    def connect(self, workload: Workload, client: int) -> Session:
        from tensordict import TensorDict

        from ..policy import observation

        handle = self.source.receive()
        request = TensorDict(observation(workload, client), [])
        return Session(lambda: handle(request)["action"], handle.close)
