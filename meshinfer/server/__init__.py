"""Serving a policy: the batching loop, the model and its version, and what was measured."""

from meshinfer.server.config import InferenceDeviceConfig, InferenceServerConfig
from meshinfer.server.lifetime import ServerHealth
from meshinfer.server.process import ProcessInferenceServer
from meshinfer.server.server import InferenceServer
from meshinfer.server.stats import ServerStats

__all__ = [
    "InferenceDeviceConfig",
    "InferenceServer",
    "InferenceServerConfig",
    "ProcessInferenceServer",
    "ServerHealth",
    "ServerStats",
]
