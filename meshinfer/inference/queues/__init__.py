"""Any payload between processes, over sockets: AF_UNIX ones of the abstract namespace on one host, or TCP.

``address`` says where a server listens, ``locate`` how clients find it, ``proof`` how both sides recognise each other;
``served`` is the transport that all have in common.
"""

from __future__ import annotations

from meshinfer.inference.queues.client import MPClient
from meshinfer.inference.queues.transport import MPTransport

__all__ = ["MPClient", "MPTransport"]
