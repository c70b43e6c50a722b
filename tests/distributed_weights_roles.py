"""Weights whose every element is their version, and what trainers and servers in other processes do with them."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from support import wait_until
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

import meshinfer
from meshinfer.weights.distributed import DistributedWeights

SECRET = "a secret of the tests"
SECONDS = 30.0
"""For what must happen, but whose speed no test asserts."""
LARGE = 8_000_000
"""Elements of float32, in each of two weights: 64 MB in all."""


def weights(value: float, size: int = 3) -> dict[str, Tensor]:
    """Two weights of ``size`` elements and a scalar, all of them ``value``."""
    shapes = {"body.bias": (size,), "body.weight": (size, 1), "steps": ()}
    return {name: torch.full(shape, float(value)) for name, shape in shapes.items()}


def value_of(found: Mapping[str, Tensor]) -> float:
    """The one value that all weights have; fails for weights of several versions."""
    values = {extreme.item() for tensor in found.values() for extreme in tensor.aminmax()}
    assert len(values) == 1, values
    return float(values.pop())


def at(port: int, spec: Any, **options: Any) -> DistributedWeights:
    """For subscribers of the publisher at ``port``."""
    options = {"secret": SECRET, **options}
    return DistributedWeights(spec, role="subscriber", port=port, **options)


class Versioned(nn.Module):
    """Its output is its version, by a parameter and by a buffer, which must agree."""

    def __init__(self, version: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1000,), float(version)))
        self.register_buffer("offset", torch.full((1000,), float(version)))

    def forward(self, batch: TensorDictBase) -> TensorDict:
        low, high = torch.cat([self.weight, self.offset]).aminmax()
        shown = torch.stack([low, high]).expand(*batch.batch_size, 2)
        return TensorDict({"y": shown.clone()}, batch.batch_size)


REQUEST = TensorDict({"x": torch.zeros(1)}, [])
REPLY = TensorDict({"y": torch.zeros(2)}, [])


# Roles of workers. The first argument is the worker's station.


def train(station: SimpleNamespace, *, size: int = 3, port: int = 0) -> int:
    """Become the publisher; the port."""
    station.transport = DistributedWeights(weights(0, size), port=port, secret=SECRET)
    station.publisher = station.transport.publisher()
    return int(station.transport.address.port)


def train_in_mesh(station: SimpleNamespace, port: int, version: float) -> None:
    """Be the learner, rank 1 of two, and publish a first version with this value."""
    mesh = two_ranks(1, port)
    station.transport = mesh.weight_transport(Versioned())
    station.publisher = station.transport.publisher()
    station.publisher.publish(Versioned(version))


def publish(station: SimpleNamespace, value: float, size: int = 3, **options: Any) -> int:
    """Publish weights of this value."""
    return int(station.publisher.publish(weights(value, size), **options))


def subscribers(station: SimpleNamespace, count: int) -> bool:
    """Whether so many are there, in the end."""
    return wait_until(lambda: station.publisher.subscribers == count, SECONDS)


def subscribe(station: SimpleNamespace, transport: DistributedWeights) -> None:
    """Become a subscriber."""
    station.subscriber = transport.subscriber()


def receive(station: SimpleNamespace, *, apply: bool = True) -> tuple[int, float]:
    """The newest version and its value."""
    update = station.subscriber.receive(SECONDS)
    found = update.version, value_of(update.weights)
    if apply:
        station.subscriber.applied(update)
        update.release()
    return found


def two_ranks(rank: int, port: int) -> meshinfer.Mesh:
    """A mesh of rank 0, which serves, and rank 1, which trains."""
    groups = {"server": 1, "learner": 1}
    return meshinfer.init_mesh(groups, rank=rank, world_size=2, host="127.0.0.1", port=port)
