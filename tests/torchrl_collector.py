"""Runs in an interpreter that has TorchRL: a collector whose policy is served by meshinfer. Prints what came of it."""

from __future__ import annotations

import json
import sys
import warnings
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn.probabilistic import interaction_type
from torchrl.collectors import Collector
from torchrl.envs import GymEnv

from meshinfer import (
    DistributedTransport,
    InferenceServer,
    PolicyClientModule,
    make_inference_transport,
)

FRAMES = 150
REQUEST = TensorDict({"observation": torch.zeros(4)})
RESPONSE = TensorDict({"action": torch.zeros(2, dtype=torch.int64)})


class Policy(torch.nn.Module):
    """Pushes the cart to where the pole falls, or with a sign of -1 to where it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sign", torch.ones(()))
        self.modes: set[Any] = set()

    def forward(self, batch: TensorDictBase) -> TensorDict:
        self.modes.add(interaction_type())
        right = batch["observation"][:, 2] * self.sign > 0
        action = torch.nn.functional.one_hot(right.long(), 2)
        return TensorDict({"action": action}, batch.batch_size)


def collect(module: PolicyClientModule, server: InferenceServer) -> dict[str, Any]:
    found: dict[str, Any] = {"batches": [], "wrong_actions": 0, "versions": []}
    collector = Collector(GymEnv("CartPole-v1"), module, frames_per_batch=50, total_frames=FRAMES)
    sign = 1.0
    for batch in collector:
        right = batch["observation"][:, 2] * sign > 0
        found["wrong_actions"] += int((batch["action"].argmax(-1) != right.long()).sum())
        found["batches"].append(batch.numel())
        found["versions"].append(batch["policy_version"].unique().tolist())
        sign = -sign
        server.update_policy_weights_({"sign": torch.tensor(sign)})
    collector.shutdown()
    return found


def run(kind: str) -> dict[str, Any]:
    distributed = kind == "distributed"
    transport = (
        DistributedTransport(REQUEST, RESPONSE) if distributed else make_inference_transport(kind)
    )
    policy = Policy()
    with (
        InferenceServer(policy, transport, policy_version=7, share_weights=True) as server,
        PolicyClientModule(server, ["observation"], ["action"], max_inflight=1) as module,
    ):
        found = collect(module, server)
        found["modes"] = sorted(mode.name for mode in policy.modes if mode is not None)
        found["errors"] = server.stats().errors
    return found


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps({kind: run(kind) for kind in sys.argv[1:]}))
