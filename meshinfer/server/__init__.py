"""Serving a policy: the batching loop, the model and its version, what was measured, and where a server lives."""

from meshinfer.server.config import InferenceDeviceConfig, InferenceServerConfig
from meshinfer.server.lifetime import ServerHealth
from meshinfer.server.monarch import MonarchInferenceServer
from meshinfer.server.process import ProcessInferenceServer
from meshinfer.server.ray import RayInferenceServer
from meshinfer.server.server import InferenceServer
from meshinfer.server.stats import ServerStats
from meshinfer.server.thread import ThreadInferenceServer

__all__ = [
    "InferenceDeviceConfig",
    "InferenceServer",
    "InferenceServerConfig",
    "MonarchInferenceServer",
    "ProcessInferenceServer",
    "RayInferenceServer",
    "ServerHealth",
    "ServerStats",
    "ThreadInferenceServer",
]
