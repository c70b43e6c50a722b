"""Weights for the servers of one host, through shared memory.

``board`` says who writes which word, ``pool`` and ``publisher`` are the trainer's side, ``subscriber`` the servers'.
"""

from meshinfer.weights.shared_memory.transport import SharedMemoryWeights

__all__ = ["SharedMemoryWeights"]
