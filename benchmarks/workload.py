"""What a client sends, as plain data: importable by an interpreter that has no meshinfer."""

from __future__ import annotations

import math
from dataclasses import dataclass

_ITEM_BYTES = {"float32": 4, "int64": 8, "uint8": 1}


@dataclass(frozen=True)
class Leaf:
    """One tensor of a request or a reply, `dtype` being the name of a torch dtype."""

    key: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * _ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class Workload:
    """A number of clients, each with one request in flight at a time.

    The policy has `weight_bytes` of weights besides its own. In a burst of at least `burst_seconds` they are published
    `publishes` times a second, or else the requests themselves are: each publishes, and waits until that is served.
    """

    name: str
    request: tuple[Leaf, ...]
    clients: int = 1
    reply: tuple[Leaf, ...] = (Leaf("action", (2,)),)
    weight_bytes: int = 0
    publishes: float = 0.0
    burst_seconds: float = 0.0

    @property
    def request_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.request)

    @property
    def reply_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in self.reply)


_VECTOR = (Leaf("observation", (4,)),)

VECTOR_1 = Workload("vector, 1 client", _VECTOR)
VECTOR_4 = Workload("vector, 4 clients", _VECTOR, clients=4)
VECTOR_8 = Workload("vector, 8 clients", _VECTOR, clients=8)
VECTOR_16 = Workload("vector, 16 clients", _VECTOR, clients=16)
VECTOR_64 = Workload("vector, 64 clients", _VECTOR, clients=64)
ONE_LEAF = Workload("1 leaf of 128", (Leaf("leaf_0", (128,)),))
EIGHT_LEAVES = Workload("8 leaves of 16", tuple(Leaf(f"leaf_{i}", (16,)) for i in range(8)))
_PIXELS = (Leaf("pixels", (4, 84, 84), "uint8"),)
PIXELS = Workload("pixels, 1 client", _PIXELS)
PIXELS_4 = Workload("pixels, 4 clients", _PIXELS, clients=4)
MANY_PIXELS = Workload("pixels x16, 1 client", (Leaf("pixels", (64, 84, 84), "uint8"),))
CARTPOLES = Workload("8 CartPoles", _VECTOR, 8, (Leaf("action", (), "int64"),))
UPDATES = Workload("update of 100 MB", _VECTOR, weight_bytes=100_000_000)
QUIET, SELDOM, OFTEN = (
    Workload(name, _VECTOR, weight_bytes=100_000_000, publishes=publishes, burst_seconds=3.0)
    for name, publishes in (
        ("100 MB, no update", 0.0),
        ("100 MB, 1 update/s", 1.0),
        ("100 MB, 10 updates/s", 10.0),
    )
)

WORKLOADS = {
    load.name: load
    for load in (
        *(VECTOR_1, VECTOR_4, VECTOR_8, VECTOR_16, VECTOR_64, CARTPOLES),
        *(ONE_LEAF, EIGHT_LEAVES, PIXELS, PIXELS_4, MANY_PIXELS),
        *(UPDATES, QUIET, SELDOM, OFTEN),
    )
}
