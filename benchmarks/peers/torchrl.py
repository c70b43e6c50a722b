"""TorchRL's `distributed` inference transport, run by an interpreter that has TorchRL."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..workload import Workload
from . import Session

if TYPE_CHECKING:
    from tensordict.nn import TensorDictModule

NAME = "torchrl"
PACKAGES = ("torch", "tensordict", "torchrl")


def open_service(workload: Workload) -> TorchRLService:
    return TorchRLService(workload)


def _policy(workload: Workload) -> TensorDictModule:
    from tensordict.nn import TensorDictModule

    from ..policy import make_policy

    keys = [leaf.key for leaf in workload.request]
    return TensorDictModule(make_policy(), in_keys=keys, out_keys=["action"])


class TorchRLService:
    """A `ProcessInferenceServer` with its own defaults, apart from the loopback address."""

    def __init__(self, workload: Workload) -> None:
        from tensordict import TensorDict
        from torchrl.modules.inference_server import ProcessInferenceServer
        from torchrl.modules.inference_server._distributed import _DistributedInferenceTransport

        from ..policy import zeros

        transport = _DistributedInferenceTransport(
            TensorDict(zeros(workload.request), []),
            TensorDict(zeros(workload.reply), []),
            host="127.0.0.1",
        )
        self._clients = workload.clients
        self._server = ProcessInferenceServer(
            policy_factory=partial(_policy, workload), transport=transport, max_batch_size=64
        )

    def connectors(self) -> Sequence[TorchRLConnector]:
        return [TorchRLConnector(client) for client in self._server.clients(self._clients)]

    def start(self) -> int:
        self._server.start()
        children = multiprocessing.active_children()
        return next(int(c.pid or 0) for c in children if c.name == "ProcessInferenceServer")

    def stop(self) -> None:
        self._server.shutdown(timeout=5.0)


@dataclass
class TorchRLConnector:
    client: Any

    def prepare(self) -> None:
        """Nothing left to do: unpickling the client has imported TorchRL."""

    def connect(self, workload: Workload, client: int) -> Session:
        from tensordict import TensorDict

        from ..policy import observation

        request = TensorDict(observation(workload, client), [])
        return Session(lambda: self.client(request)["action"], self.client.close)
