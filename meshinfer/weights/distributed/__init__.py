"""Weights to other processes and hosts: a long poll over the pairs that requests use.

A subscriber (``subscriber``, over a ``link`` that it keeps up) asks for what is newer than what it has, and says what
it serves; the publisher's ``desk`` answers when there is something, with a row that it packed once (``rows``) for all.
So a subscriber that is slow gets the newest when it asks again, and one that is dead or frozen is sent nothing.
"""

from meshinfer.weights.distributed.transport import DistributedWeights

__all__ = ["DistributedWeights"]
