"""TorchRL's inference server with its own defaults, run by an interpreter that has TorchRL."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..workload import Workload
from . import IN_WEIGHTS, START_METHOD, ActorService, Service, Session, Trainer
from .child import GivenHandle, HandleSource
from .threads import ThreadService

if TYPE_CHECKING:
    from tensordict.nn import TensorDictModule

NAME = "torchrl"
PACKAGES = ("torch", "tensordict", "torchrl")
MODULES = ("benchmarks.policy", "torchrl.modules.inference_server")


def open_service(workload: Workload, transport: str) -> Service | ActorService:
    if transport == "slot":
        return _threads(workload)
    if transport in IN_WEIGHTS:
        return TrainerService(workload, _shared_memory(workload))
    if transport == "ray":
        from .ray_actors import RayService
        from .torchrl_ray import TorchRLRayServer

        return RayService(workload, TorchRLConnector, TorchRLRayServer(workload))
    return ProcessService(workload, _PROCESS_TRANSPORTS[transport](workload))


def _distributed(workload: Workload) -> Any:
    from torchrl.modules.inference_server._distributed import _DistributedInferenceTransport

    from ..policy import specs

    return _DistributedInferenceTransport(*specs(workload), host="127.0.0.1")


def _process_slot(workload: Workload) -> Any:
    from torchrl.modules.inference_server import ProcessSlotTransport

    from ..policy import specs

    return ProcessSlotTransport(*specs(workload), num_slots=workload.clients)


def _shared_memory(workload: Workload) -> Any:
    from torchrl.modules.inference_server import SharedMemoryTransport

    from ..policy import specs

    return SharedMemoryTransport(*specs(workload), num_slots=workload.clients)


def _queue(workload: Workload) -> Any:
    from torchrl.modules.inference_server import MPTransport

    return MPTransport()


_PROCESS_TRANSPORTS: dict[str, Callable[[Workload], Any]] = {
    "distributed": _distributed,
    "process_slot": _process_slot,
    "shared_memory": _shared_memory,
    "queue": _queue,
}


def _threads(workload: Workload) -> ThreadService:
    from torchrl.modules.inference_server import InferenceServer, SlotTransport

    transport = SlotTransport(workload.clients)
    server = InferenceServer(make_module(workload), transport, max_batch_size=64)
    return ThreadService(workload, server, TorchRLConnector)


def make_module(workload: Workload) -> TensorDictModule:
    from tensordict.nn import TensorDictModule

    from ..policy import make_policy, with_ballast

    keys = [leaf.key for leaf in workload.request]
    policy = with_ballast(make_policy(), workload)
    return TensorDictModule(policy, in_keys=keys, out_keys=["action"])


class ProcessService:
    """A `ProcessInferenceServer`, which brings its own child process."""

    def __init__(self, workload: Workload, transport: Any) -> None:
        from torchrl.modules.inference_server import ProcessInferenceServer

        self._clients = workload.clients
        self._server = ProcessInferenceServer(
            policy_factory=partial(make_module, workload),
            transport=transport,
            max_batch_size=64,
            mp_context=START_METHOD,
        )

    def connectors(self) -> Sequence[TorchRLConnector]:
        return [
            TorchRLConnector(GivenHandle(client)) for client in self._server.clients(self._clients)
        ]

    def start(self) -> int:
        self._server.start()
        children = multiprocessing.active_children()
        return next(int(c.pid or 0) for c in children if c.name == "ProcessInferenceServer")

    def stop(self) -> None:
        self._server.shutdown(timeout=5.0)


class TrainerService(ProcessService):
    """The same, whose one client is the trainer: each request is an update."""

    def __init__(self, workload: Workload, transport: Any) -> None:
        super().__init__(workload, transport)
        self._module = make_module(workload)

    def connectors(self) -> Sequence[Any]:
        return [Trainer(self._update)]

    def _update(self) -> None:
        from tensordict import TensorDict

        self._server.update_model_weights(TensorDict.from_module(self._module).data)


@dataclass
class TorchRLConnector:
    source: HandleSource

    def connect(self, workload: Workload, client: int) -> Session:
        from tensordict import TensorDict

        from ..policy import observation

        handle = self.source.receive()
        request = TensorDict(observation(workload, client), [])
        # Only some of TorchRL's clients have anything to close.
        close = getattr(handle, "close", lambda: None)
        return Session(lambda: handle(request)["action"], close)
