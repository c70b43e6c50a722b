"""Serve one policy to many environment ranks, in batches.

Each row of a batch finds its way back to the rank that sent it. The default
process group is yours: meshinfer never creates, needs or touches it.
"""

from __future__ import annotations

import logging

from meshinfer._version import __version__
from meshinfer.clients import PolicyClientModule
from meshinfer.collect import AsyncBatchedCollector, CollectorStats
from meshinfer.errors import (
    ClosedError,
    EnvironmentFailedError,
    MeshError,
    MeshInferError,
    PeerLostError,
    RefusedError,
    RemoteError,
    ServerClosedError,
    TransportError,
)
from meshinfer.inference import (
    InferenceClient,
    InferenceFuture,
    InferenceTransport,
    inference_transport_kind,
    make_inference_transport,
)
from meshinfer.inference.distributed import DistributedClient, DistributedTransport, NcclRows
from meshinfer.inference.merged import MergedTransport
from meshinfer.inference.monarch import MonarchTransport
from meshinfer.inference.queues import MPTransport
from meshinfer.inference.shared import ProcessSlotTransport, SharedMemoryTransport
from meshinfer.inference.slot import SlotTransport
from meshinfer.inference.threads import ThreadingTransport
from meshinfer.layout import PayloadLayout
from meshinfer.mesh import LaunchEnvironment, Mesh, PerNode, RankGroup, init_mesh
from meshinfer.server import (
    InferenceDeviceConfig,
    InferenceServer,
    InferenceServerConfig,
    MonarchInferenceServer,
    ProcessInferenceServer,
    RayInferenceServer,
    ServerHealth,
    ServerStats,
    ThreadInferenceServer,
)
from meshinfer.transport import (
    TransportConfig,
    TransportKind,
    as_transport_config,
    normalize_transport_kind,
    register_transport_resolver,
    resolve_transport,
)
from meshinfer.weights import (
    DirectWeights,
    DistributedWeights,
    SharedMemoryWeights,
    WeightLayout,
    WeightPublisher,
    WeightSubscriber,
    WeightTransport,
    WeightUpdate,
    make_weight_transport,
)

__all__ = [
    "AsyncBatchedCollector",
    "ClosedError",
    "CollectorStats",
    "DirectWeights",
    "DistributedClient",
    "DistributedTransport",
    "DistributedWeights",
    "EnvironmentFailedError",
    "InferenceClient",
    "InferenceDeviceConfig",
    "InferenceFuture",
    "InferenceServer",
    "InferenceServerConfig",
    "InferenceTransport",
    "LaunchEnvironment",
    "MPTransport",
    "MergedTransport",
    "Mesh",
    "MeshError",
    "MeshInferError",
    "MonarchInferenceServer",
    "MonarchTransport",
    "NcclRows",
    "PayloadLayout",
    "PeerLostError",
    "PerNode",
    "PolicyClientModule",
    "ProcessInferenceServer",
    "ProcessSlotTransport",
    "RankGroup",
    "RayInferenceServer",
    "RefusedError",
    "RemoteError",
    "ServerClosedError",
    "ServerHealth",
    "ServerStats",
    "SharedMemoryTransport",
    "SharedMemoryWeights",
    "SlotTransport",
    "ThreadInferenceServer",
    "ThreadingTransport",
    "TransportConfig",
    "TransportError",
    "TransportKind",
    "WeightLayout",
    "WeightPublisher",
    "WeightSubscriber",
    "WeightTransport",
    "WeightUpdate",
    "__version__",
    "as_transport_config",
    "inference_transport_kind",
    "init_mesh",
    "make_inference_transport",
    "make_weight_transport",
    "normalize_transport_kind",
    "register_transport_resolver",
    "resolve_transport",
]

logging.getLogger("meshinfer").addHandler(logging.NullHandler())
