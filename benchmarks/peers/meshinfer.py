"""meshinfer's `distributed` transport, the server with its own defaults."""

from __future__ import annotations

from dataclasses import dataclass

from ..workload import Workload
from . import Session
from .child import ChildService, HandleSource, ServerControl

NAME = "meshinfer"
PACKAGES = ("torch", "tensordict", "meshinfer")


def open_service(workload: Workload) -> ChildService:
    return ChildService(workload, _serve, MeshInferConnector)


def _serve(workload: Workload, control: ServerControl) -> None:
    from tensordict import TensorDict

    import meshinfer

    from ..policy import make_policy, zeros

    transport = meshinfer.DistributedTransport(
        TensorDict(zeros(workload.request), []),
        TensorDict(zeros(workload.reply), []),
        host="127.0.0.1",
    )
    with meshinfer.InferenceServer(
        make_policy(),
        transport,
        max_batch_size=64,
        in_keys=[leaf.key for leaf in workload.request],
        out_keys=["action"],
    ):
        control.publish([transport.client() for _ in range(workload.clients)])
        control.wait_for_stop()


@dataclass
class MeshInferConnector:
    source: HandleSource

    def prepare(self) -> None:
        import meshinfer  # noqa: F401

    def connect(self, workload: Workload, client: int) -> Session:
        from tensordict import TensorDict

        from ..policy import observation

        handle = self.source.receive()
        request = TensorDict(observation(workload, client), [])
        return Session(lambda: handle(request)["action"], handle.close)
