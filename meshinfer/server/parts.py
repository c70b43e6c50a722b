"""What runs for a server in a thread."""

from __future__ import annotations

from dataclasses import dataclass

from meshinfer.inference.protocol import InferenceTransport
from meshinfer.server.batcher import Batcher
from meshinfer.server.intake import WeightIntake
from meshinfer.server.policy import ServedPolicy
from meshinfer.weights.protocol import WeightTransport

__all__ = ["ServerParts"]


@dataclass
class ServerParts:
    """What runs for a server, without the server: so that it is stopped when that is collected, or at exit.

    Args:
        transport: of its clients.
        weight_transport: where its weights come from, if from anywhere.
        owns_weight_transport: whether to close that too.
    """

    transport: InferenceTransport
    weight_transport: WeightTransport | None
    owns_weight_transport: bool
    batcher: Batcher | None = None
    intake: WeightIntake | None = None

    def start(self, batcher: Batcher, policy: ServedPolicy) -> Batcher:
        """Begin to serve, with the weights that are there; returns ``batcher``."""
        if self.weight_transport is not None:
            weights = policy.weights_from(self.weight_transport)
            intake = WeightIntake(self.weight_transport, weights, policy, batcher.settle)
            intake.start()
            self.intake = intake
        self.batcher = batcher
        batcher.start()
        return batcher

    def stop(self, timeout: float = 5.0) -> bool:
        """Whether the batch in hand was done within ``timeout`` seconds."""
        if self.intake is not None:
            self.intake.close()
        stopped = self.batcher is None or self.batcher.stop(timeout)
        self.transport.close()
        if self.intake is not None and stopped:
            stopped = self.intake.join(timeout)
        if self.weight_transport is not None and self.owns_weight_transport:
            self.weight_transport.close()
        return stopped
