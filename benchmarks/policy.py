"""The policy that every server serves, with the same weights in every process."""

from __future__ import annotations

import statistics
import time

import torch
from tensordict import TensorDict
from torch import nn

from .workload import Leaf, Workload

_BALLAST_BYTES = 4_000_000


class FirstFourMLP(nn.Module):
    """An MLP 4-64-2 over the first four numbers of the first leaf, whatever else was sent.

    The payload's size then changes what the wire carries and leaves the policy's cost alone.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2))

    def forward(self, first: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        """Map leaves `[B, *shape]` to actions `float32[B, 2]`."""
        return self.layers(first.flatten(1)[:, :4].float())


class CartPolePolicy(FirstFourMLP):
    """The same MLP, whose greater output is the action."""

    def forward(self, first: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        """Map observations `[B, 4]` to actions `int64[B]`."""
        return super().forward(first, *others).argmax(-1)


def make_policy(kind: type[FirstFourMLP] = FirstFourMLP) -> FirstFourMLP:
    """The policy with weights that depend on nothing but a constant seed."""
    # Not the seed of the process: several threads make their policies at once.
    generator = torch.Generator().manual_seed(0)
    policy = kind().eval().requires_grad_(False)
    for parameter in policy.parameters():
        parameter.uniform_(-0.5, 0.5, generator=generator)
    return policy.requires_grad_(True)


def with_ballast(policy: FirstFourMLP, workload: Workload) -> FirstFourMLP:
    """The same policy, with the workload's bytes of weights that it does not use, 4 MB each."""
    sizes = [_BALLAST_BYTES] * (workload.weight_bytes // _BALLAST_BYTES)
    ballast = [nn.Parameter(torch.zeros(nbytes // 4)) for nbytes in sizes]
    policy.ballast = nn.ParameterList(ballast)
    return policy


def observation(workload: Workload, client: int) -> dict[str, torch.Tensor]:
    """What client number `client` sends: different for each, so that mixed-up replies show."""
    return {leaf.key: _filled(leaf, client + 1) for leaf in workload.request}


def specs(workload: Workload) -> tuple[TensorDict, TensorDict]:
    """The layouts of a request and of a reply, as TensorDicts of zeros."""
    return _zeros(workload.request), _zeros(workload.reply)


def expected_action(workload: Workload, client: int) -> torch.Tensor:
    """The reply `float32[2]` that client number `client` must get."""
    leaves = [leaf.unsqueeze(0) for leaf in observation(workload, client).values()]
    with torch.inference_mode():
        return make_policy()(*leaves)[0]


def forward_seconds(workload: Workload, passes: int = 300) -> float:
    """What a bare pass over one row for each client takes, the median of `passes`."""
    policy = make_policy()
    leaves = [
        torch.stack([_filled(leaf, client) for client in range(workload.clients)])
        for leaf in workload.request
    ]
    times = []
    with torch.inference_mode():
        for _ in range(passes):
            began = time.perf_counter()
            policy(*leaves)
            times.append(time.perf_counter() - began)
    return statistics.median(times)


def _zeros(leaves: tuple[Leaf, ...]) -> TensorDict:
    return TensorDict({leaf.key: _filled(leaf, 0) for leaf in leaves}, [])


def _filled(leaf: Leaf, value: int) -> torch.Tensor:
    return torch.full(leaf.shape, value, dtype=getattr(torch, leaf.dtype))
