"""Which peers meet over which workload, and the goals that their numbers are held to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .workload import EIGHT_LEAVES, ONE_LEAF, PIXELS, VECTOR_1, VECTOR_4, VECTOR_16, Workload


@dataclass(frozen=True)
class Entry:
    """One peer under one workload."""

    peer: str
    workload: Workload


@dataclass(frozen=True)
class Comparison:
    """Entries whose bursts alternate, so that a slow minute of the machine hits all of them."""

    name: str
    entries: tuple[Entry, ...]
    quick: bool = True


@dataclass(frozen=True)
class Goal:
    """A limit on a metric of `subject`, or on its ratio to that of `base` if there is one."""

    text: str
    metric: str
    subject: Entry
    sense: Literal["at most", "at least"]
    limit: float
    base: Entry | None = None

    def met(self, reached: float) -> bool:
        return reached <= self.limit if self.sense == "at most" else reached >= self.limit


@dataclass(frozen=True)
class Suite:
    """What one subcommand runs; `subject` is the peer that the ratios of the table are about."""

    subject: str
    comparisons: tuple[Comparison, ...]
    goals: tuple[Goal, ...]


def _meeting(workload: Workload, *peers: str, quick: bool = True) -> Comparison:
    return Comparison(workload.name, tuple(Entry(peer, workload) for peer in peers), quick)


_RAW, _RIVAL, _OURS = "raw_gloo", "torchrl", "meshinfer"
_ONE, _FOUR, _SIXTEEN = (Entry(_OURS, load) for load in (VECTOR_1, VECTOR_4, VECTOR_16))
_ROW_BYTES = VECTOR_16.request_bytes + VECTOR_16.reply_bytes

_DISTRIBUTED = Suite(
    subject=_OURS,
    comparisons=(
        _meeting(VECTOR_1, _RAW, _RIVAL, _OURS),
        Comparison("leaves", (Entry(_OURS, ONE_LEAF), Entry(_OURS, EIGHT_LEAVES))),
        _meeting(PIXELS, _RAW, _OURS),
        _meeting(VECTOR_4, _RIVAL, _OURS, quick=False),
        _meeting(VECTOR_16, _RIVAL, _OURS, quick=False),
    ),
    goals=(
        Goal("1 client: p50 / raw gloo", "p50_us", _ONE, "at most", 2.0, Entry(_RAW, VECTOR_1)),
        Goal("1 client: p50 / TorchRL", "p50_us", _ONE, "at most", 1 / 3, Entry(_RIVAL, VECTOR_1)),
        Goal("4 clients: req/s / TorchRL", "rate", _FOUR, "at least", 8, Entry(_RIVAL, VECTOR_4)),
        Goal(
            "16 clients: req/s / TorchRL",
            "rate",
            _SIXTEEN,
            "at least",
            10,
            Entry(_RIVAL, VECTOR_16),
        ),
        Goal(
            "8 leaves of 16: p50 / 1 leaf of 128",
            "p50_us",
            Entry(_OURS, EIGHT_LEAVES),
            "at most",
            1.3,
            Entry(_OURS, ONE_LEAF),
        ),
        Goal(
            "pixels: p50 / raw gloo, same bytes",
            "p50_us",
            Entry(_OURS, PIXELS),
            "at most",
            1.5,
            Entry(_RAW, PIXELS),
        ),
        Goal("server threads per client", "threads", _SIXTEEN, "at most", 3),
        Goal("server descriptors per client", "descriptors", _SIXTEEN, "at most", 4),
        Goal(
            "server KiB per client (4 rows + 1 MiB)",
            "memory_kib",
            _SIXTEEN,
            "at most",
            4 * _ROW_BYTES / 1024 + 1024,
        ),
    ),
)

SUITES: Mapping[str, Suite] = {"distributed": _DISTRIBUTED}
