"""Transports for the processes of one host, through shared memory.

``board`` says who writes which word, ``client`` and ``future`` are the client's side, ``desk`` the server's.
"""

from meshinfer.inference.shared.future import SlotFuture
from meshinfer.inference.shared.pool import PoolClient, SharedMemoryTransport
from meshinfer.inference.shared.process_slot import ProcessSlotClient, ProcessSlotTransport

__all__ = [
    "PoolClient",
    "ProcessSlotClient",
    "ProcessSlotTransport",
    "SharedMemoryTransport",
    "SlotFuture",
]
