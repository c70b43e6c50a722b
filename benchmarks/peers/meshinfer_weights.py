"""A meshinfer server whose weights a trainer in the conductor's process publishes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from ..workload import Workload
from . import IN_WEIGHTS, Connector, Trainer
from .child import ChildService, ServerControl
from .meshinfer import MeshInferConnector, _server, _shared_memory


def open_updated(workload: Workload, transport: str) -> UpdatedService:
    if transport in IN_WEIGHTS:
        return TrainerService(workload, transport)
    return UpdatedService(workload, IN_WEIGHTS[0])


class UpdatedService(ChildService):
    """A server in a child for clients in others; the weights come from here."""

    def __init__(self, workload: Workload, kind: str) -> None:
        from ..policy import make_policy, with_ballast

        self._workload = workload
        self._policy = with_ballast(make_policy(), workload)
        self._weights = _weights(kind, self._policy)
        self._transport = _shared_memory(workload)
        serve = partial(_serve, self._transport.serve_elsewhere(), self._weights)
        clients = [self._transport.client() for _ in range(workload.clients)]
        super().__init__(workload, serve, MeshInferConnector, handles=clients)

    def start(self) -> int:
        server_pid = super().start()
        self._publisher = self._weights.publisher(self._policy)
        for _ in range(_WARM_UP):
            self.update()
        return server_pid

    def update(self) -> None:
        """Publish the weights, and wait until they are served."""
        self._publisher.publish()
        self._publisher.wait()

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """Publish as often as the workload says."""
        stop = threading.Event()
        thread = threading.Thread(target=self._publish_until, args=(stop,))
        thread.start()
        yield
        stop.set()
        thread.join()

    def stop(self) -> None:
        self._publisher.close()
        super().stop()
        self._weights.close()
        self._transport.close()

    def _publish_until(self, stop: threading.Event) -> None:
        period = 1.0 / self._workload.publishes
        following = time.monotonic() + period / 2
        while not stop.wait(max(0.0, following - time.monotonic())):
            self._publisher.publish()
            following += period


class TrainerService(UpdatedService):
    """The same, whose one client is the trainer: each request is an update."""

    def connectors(self) -> Sequence[Connector]:
        return [Trainer(self.update)]


_WARM_UP = 5


def _weights(kind: str, policy: Any) -> Any:
    import meshinfer

    if kind == "weights/distributed":
        from meshinfer.weights.distributed import DistributedWeights

        return DistributedWeights(policy, host="127.0.0.1")
    return meshinfer.make_weight_transport(
        "shared_memory", spec=policy, policy_backend="multiprocessing"
    )


def _serve(
    make_transport: Callable[[], Any], weights: Any, workload: Workload, control: ServerControl
) -> None:
    with _server(workload, make_transport(), weight_transport=weights):
        control.publish()
        control.wait_for_stop()
