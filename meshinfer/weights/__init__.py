"""The weights domain: versions of a model's parameters and buffers, from one trainer to its servers."""

from __future__ import annotations

from meshinfer.weights.direct import DirectWeights
from meshinfer.weights.distributed.transport import DistributedWeights
from meshinfer.weights.layout import WeightLayout
from meshinfer.weights.protocol import (
    WeightPublisher,
    WeightSubscriber,
    WeightTransport,
    WeightUpdate,
)
from meshinfer.weights.resolver import make_weight_transport
from meshinfer.weights.shared_memory.transport import SharedMemoryWeights

__all__ = [
    "DirectWeights",
    "DistributedWeights",
    "SharedMemoryWeights",
    "WeightLayout",
    "WeightPublisher",
    "WeightSubscriber",
    "WeightTransport",
    "WeightUpdate",
    "make_weight_transport",
]
