"""Serving a policy: the batching loop, the model and its version, and what was measured."""

from meshinfer.server.config import InferenceServerConfig
from meshinfer.server.server import InferenceServer
from meshinfer.server.stats import ServerStats

__all__ = ["InferenceServer", "InferenceServerConfig", "ServerStats"]
