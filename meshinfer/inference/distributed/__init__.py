"""Inference between processes and hosts, over standalone process groups of two.

The path of a request: ``client`` packs it into a frame (``frames``), ``connection`` sends it over its ``pair``; at
the server its ``session`` receives it and the ``reception`` queues it for the batcher; the reply goes back the same
way. ``join`` is how the two meet, ``locate`` how the client finds the server, ``transport`` the public face.

Rows travel in their frames, or are ``announced`` by them (``plane``), as those between GPUs (``nccl``).
"""

from meshinfer.inference.distributed.client import DistributedClient
from meshinfer.inference.distributed.nccl import NcclRows
from meshinfer.inference.distributed.transport import DistributedTransport

__all__ = ["DistributedClient", "DistributedTransport", "NcclRows"]
