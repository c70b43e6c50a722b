"""Any payload between processes of one host, over AF_UNIX sockets of the abstract namespace."""

from __future__ import annotations

from meshinfer.inference.queues.client import MPClient
from meshinfer.inference.queues.transport import MPTransport

__all__ = ["MPClient", "MPTransport"]
