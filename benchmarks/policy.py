"""The policy that every server serves, with the same weights in every process."""

from __future__ import annotations

import torch
from torch import nn

from .workload import Leaf, Workload


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


def make_policy() -> FirstFourMLP:
    """The policy with weights that depend on nothing but a constant seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return FirstFourMLP().eval()


def observation(workload: Workload, client: int) -> dict[str, torch.Tensor]:
    """What client number `client` sends: different for each, so that mixed-up replies show."""
    return {leaf.key: _filled(leaf, client + 1) for leaf in workload.request}


def zeros(leaves: tuple[Leaf, ...]) -> dict[str, torch.Tensor]:
    """One zero tensor per leaf, the form in which a spec is given."""
    return {leaf.key: _filled(leaf, 0) for leaf in leaves}


def expected_action(workload: Workload, client: int) -> torch.Tensor:
    """The reply `float32[2]` that client number `client` must get."""
    leaves = [leaf.unsqueeze(0) for leaf in observation(workload, client).values()]
    with torch.inference_mode():
        return make_policy()(*leaves)[0]


def _filled(leaf: Leaf, value: int) -> torch.Tensor:
    return torch.full(leaf.shape, value, dtype=getattr(torch, leaf.dtype))
