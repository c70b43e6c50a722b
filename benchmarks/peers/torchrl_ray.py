"""TorchRL's inference server as the Ray actor that it makes of itself, over its Ray queues."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any

import ray
from torchrl.modules.inference_server import InferenceServer

from ..workload import Workload
from .child import START_SECONDS, STOP_SECONDS
from .torchrl import make_module

# How long one look for work lasts. It is a call of the queue's actor, and TorchRL's default of 10 ms leaves this server
# a few requests a second; with a longer one a request is noticed no later.
_LOOK_SECONDS = 1.0


class TorchRLRayServer:
    """A `RayServer` whose largest batch is the largest that can come: no full batch waits for a look for more."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._server: Any = None

    def begin(self) -> tuple[int, Sequence[Any]]:
        self._server = InferenceServer(
            policy_factory=partial(make_module, self._workload),
            transport="ray",
            service_backend="ray",
            # With no options at all TorchRL 0.14.1 and Ray 2.60 do not get on.
            service_backend_options={"remote_config": {"num_cpus": 0}},
            max_batch_size=self._workload.clients,
            timeout=_LOOK_SECONDS,
        ).start()
        pid = self._server._actor.__ray_call__.remote(lambda actor: os.getpid())
        return ray.get(pid, timeout=START_SECONDS), self._server.clients(self._workload.clients)

    def end(self) -> None:
        self._server.shutdown(timeout=STOP_SECONDS)
