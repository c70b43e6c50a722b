"""meshinfer, the server with its own defaults, over one of its transports."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..workload import Workload
from . import MONARCH_DISTRIBUTED, RAY_DISTRIBUTED, ActorService, Service, Serving, Session
from .child import ChildService, HandleSource, ServerControl, hold
from .threads import ThreadService

if TYPE_CHECKING:
    from meshinfer import InferenceServer

NAME = "meshinfer"
PACKAGES = ("torch", "tensordict", "meshinfer")
MODULES = ("benchmarks.policy", "meshinfer")


def open_service(workload: Workload, transport: str) -> Service | ActorService:
    if transport == "distributed":
        return ChildService(workload, partial(hold, serving_distributed), MeshInferConnector)
    if transport == "slot":
        return _threads(workload)
    if workload.weight_bytes:
        from .meshinfer_weights import open_updated

        return open_updated(workload, transport)
    if transport in _IN_MONARCH_ACTORS:
        from .monarch_actors import MonarchService, ServerActor

        serving = _IN_MONARCH_ACTORS[transport]
        return MonarchService(workload, MeshInferConnector, ServerActor, serving)
    if transport in _IN_RAY_ACTORS:
        from .ray_actors import RayService, ServingActor

        server = ServingActor(workload, _IN_RAY_ACTORS[transport])
        return RayService(workload, MeshInferConnector, server)
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


@contextmanager
def _serving(workload: Workload, transport: Any) -> Iterator[list[Any]]:
    with _server(workload, transport):
        yield [transport.client() for _ in range(workload.clients)]


@contextmanager
def serving_distributed(workload: Workload) -> Iterator[list[Any]]:
    import meshinfer

    from ..policy import specs

    transport = meshinfer.DistributedTransport(*specs(workload), host="127.0.0.1")
    with _serving(workload, transport) as clients:
        yield clients


@contextmanager
def serving_monarch(workload: Workload) -> Iterator[list[Any]]:
    from meshinfer.inference.monarch import MonarchTransport

    with _serving(workload, MonarchTransport()) as clients:
        yield clients


@contextmanager
def serving_ray(workload: Workload) -> Iterator[list[Any]]:
    from meshinfer.inference.ray import RayTransport

    with _serving(workload, RayTransport()) as clients:
        yield clients


_IN_MONARCH_ACTORS: dict[str, Serving] = {
    "monarch": serving_monarch,
    MONARCH_DISTRIBUTED: serving_distributed,
}
_IN_RAY_ACTORS: dict[str, Serving] = {"ray": serving_ray, RAY_DISTRIBUTED: serving_distributed}


def _server(workload: Workload, transport: Any, **options: Any) -> InferenceServer:
    import meshinfer

    from ..policy import make_policy, with_ballast

    return meshinfer.InferenceServer(
        with_ballast(make_policy(), workload),
        transport,
        max_batch_size=64,
        in_keys=[leaf.key for leaf in workload.request],
        out_keys=["action"],
        **options,
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
