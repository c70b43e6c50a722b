"""Which peers meet over which workload, and the goals that their numbers are held to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from .peers import IN_COLLECTORS, IN_WEIGHTS, MONARCH_DISTRIBUTED, RAY_DISTRIBUTED
from .peers.collecting import FRAMES_PER_BATCH
from .workload import (
    CARTPOLES,
    EIGHT_LEAVES,
    MANY_PIXELS,
    OFTEN,
    ONE_LEAF,
    PIXELS,
    PIXELS_4,
    QUIET,
    SELDOM,
    UPDATES,
    VECTOR_1,
    VECTOR_4,
    VECTOR_8,
    VECTOR_16,
    VECTOR_64,
    Workload,
)


@dataclass(frozen=True)
class Entry:
    """One peer, over one of its transports, under one workload.

    What a raw peer has is no transport: it is the floor of the one that is named.
    """

    peer: str
    workload: Workload
    transport: str = "distributed"

    @property
    def name(self) -> str:
        return f"{self.peer}, {self.transport}, {self.workload.name}"


@dataclass(frozen=True)
class Comparison:
    """Entries whose bursts alternate, so that a slow minute of the machine hits all of them."""

    name: str
    entries: tuple[Entry, ...]
    quick: bool = True


@dataclass(frozen=True)
class Goal:
    """A limit on a metric of `subject`, or on its ratio to that of `base` if there is one.

    With `beyond`, only what `subject` takes more than that entry counts, and what `base` takes more than `base_beyond`.
    """

    text: str
    metric: str
    subject: Entry
    sense: Literal["at most", "at least"]
    limit: float
    base: Entry | None = None
    beyond: Entry | None = None
    base_beyond: Entry | None = None

    def met(self, reached: float) -> bool:
        return reached <= self.limit if self.sense == "at most" else reached >= self.limit


@dataclass(frozen=True)
class Suite:
    """What one subcommand runs; the table's ratios are those of `subject` to its transport's floor and to TorchRL."""

    subject: str
    floors: Mapping[str, str]
    comparisons: tuple[Comparison, ...]
    goals: tuple[Goal, ...]
    unit: str = "req"
    methods: Mapping[str, str] = field(default_factory=dict)


_RIVAL, _OURS = "torchrl", "meshinfer"


def _distributed() -> Suite:
    def meeting(workload: Workload, *peers: str, quick: bool = True) -> Comparison:
        return Comparison(workload.name, tuple(Entry(peer, workload) for peer in peers), quick)

    raw = "raw_gloo"
    one, four, sixteen = (Entry(_OURS, load) for load in (VECTOR_1, VECTOR_4, VECTOR_16))
    one_leaf, eight_leaves = Entry(_OURS, ONE_LEAF), Entry(_OURS, EIGHT_LEAVES)
    pixels = Entry(_OURS, PIXELS)
    four_rows = 4 * (VECTOR_16.request_bytes + VECTOR_16.reply_bytes) / 1024
    kib = "server KiB per client (4 rows + 1 MiB)"
    return Suite(
        subject=_OURS,
        floors={"distributed": raw},
        comparisons=(
            meeting(VECTOR_1, raw, _RIVAL, _OURS),
            Comparison("leaves", (one_leaf, eight_leaves)),
            meeting(PIXELS, raw, _OURS),
            meeting(VECTOR_4, _RIVAL, _OURS, quick=False),
            meeting(VECTOR_16, _RIVAL, _OURS, quick=False),
        ),
        goals=(
            _p50("1 client: p50 / raw gloo", one, 2.0, Entry(raw, VECTOR_1)),
            _p50("1 client: p50 / TorchRL", one, 1 / 3, _rival(one)),
            _rate("4 clients: req/s / TorchRL", four, 8, _rival(four)),
            _rate("16 clients: req/s / TorchRL", sixteen, 10, _rival(sixteen)),
            _p50("8 leaves of 16: p50 / 1 leaf of 128", eight_leaves, 1.3, one_leaf),
            _p50("pixels: p50 / raw gloo, same bytes", pixels, 1.5, Entry(raw, PIXELS)),
            Goal("server threads per client", "threads", sixteen, "at most", 3),
            Goal("server descriptors per client", "descriptors", sixteen, "at most", 4),
            Goal(kib, "memory_kib", sixteen, "at most", four_rows + 1024),
        ),
    )


def _local() -> Suite:
    def slot(peer: str, *workloads: Workload) -> list[Entry]:
        return [Entry(peer, workload, "process_slot") for workload in workloads]

    one, four, sixteen, many = slot(_OURS, VECTOR_1, VECTOR_4, VECTOR_16, VECTOR_64)
    pixels, many_pixels = slot(_OURS, PIXELS, MANY_PIXELS)
    raw, raw_pixels, raw_many = slot("raw_slot", VECTOR_1, PIXELS, MANY_PIXELS)
    shared_one, shared_four = (Entry(_OURS, load, "shared_memory") for load in (VECTOR_1, VECTOR_4))
    thread, threads = (Entry(_OURS, load, "slot") for load in (VECTOR_1, VECTOR_8))
    queue = Entry(_OURS, VECTOR_4, "queue")
    many_clients = (_rival(sixteen), sixteen, _rival(many), many)
    single = (
        *(raw, _rival(one), one, shared_one),
        *(raw_pixels, _rival(pixels), pixels, raw_many, many_pixels),
    )
    return Suite(
        subject=_OURS,
        floors={"process_slot": "raw_slot"},
        comparisons=(
            Comparison("1 client: process_slot, shared_memory, pixels", single, quick=False),
            Comparison("process_slot, 4 clients", (_rival(four), four)),
            Comparison("process_slot, 16 and 64 clients", many_clients, quick=False),
            Comparison("shared_memory, 4 clients", (_rival(shared_four), shared_four), quick=False),
            Comparison("slot, 8 threads", (_rival(threads), threads)),
            Comparison("slot, 1 thread", (_rival(thread), thread), quick=False),
            Comparison("queue, 4 clients", (_rival(queue), queue)),
        ),
        goals=(
            _p50("process_slot, 1 client: p50 / TorchRL", one, 1 / 3, _rival(one)),
            _rate("process_slot, 4 clients: req/s / TorchRL", four, 4, _rival(four)),
            _rate("process_slot, 16 clients: req/s / TorchRL", sixteen, 7, _rival(sixteen)),
            _rate("process_slot, 64 clients: req/s / 16 clients", many, 1, sixteen),
            _rate("shared_memory, 4 clients: req/s / TorchRL", shared_four, 6, _rival(shared_four)),
            _p50("shared_memory, 1 client: p50 / process_slot", shared_one, 1.3, one),
            _rate("slot, 8 threads: req/s / TorchRL", threads, 2, _rival(threads)),
            _overhead("slot, 1 thread", thread),
            _overhead("slot, 8 threads", threads),
            _rate("queue, 4 clients: req/s / TorchRL", queue, 3, _rival(queue)),
            _p50("process_slot, pixels: p50 / vector", pixels, 1.1, one),
            _copies((many_pixels, pixels), (raw_many, raw_pixels)),
        ),
    )


def _actors() -> Suite:
    loads = (VECTOR_1, VECTOR_4, PIXELS, PIXELS_4)
    floors = {"monarch": "raw_channel", MONARCH_DISTRIBUTED: "raw_gloo"}

    def between(library: str, workload: Workload, *rows: tuple[str, str]) -> Comparison:
        entries = tuple(Entry(peer, workload, transport) for transport, peer in rows)
        quick = workload in (VECTOR_1, VECTOR_4)
        return Comparison(f"{library}: {workload.name}", entries, quick)

    in_monarch = (
        *(("monarch", peer) for peer in ("raw_channel", "raw_endpoint", _OURS)),
        *((MONARCH_DISTRIBUTED, peer) for peer in ("raw_gloo", _OURS)),
    )
    in_ray = (("ray", _RIVAL), ("ray", _OURS), (RAY_DISTRIBUTED, _OURS))
    one, four = (Entry(_OURS, load, "monarch") for load in (VECTOR_1, VECTOR_4))
    ours = [Entry(_OURS, load, "ray") for load in loads]
    return Suite(
        subject=_OURS,
        floors=floors,
        comparisons=(
            *(between("monarch", load, *in_monarch) for load in loads),
            *(between("ray", load, *in_ray) for load in loads),
        ),
        goals=(
            _p50("monarch, 1 client: p50 / bare Channel", one, 1.5, _floor(one, floors)),
            Goal("monarch, 4 clients: req/s", "rate", four, "at least", 1500),
            *(_rate(f"ray, {e.workload.name}: req/s / TorchRL", e, 2, _rival(e)) for e in ours),
        ),
    )


def _collector() -> Suite:
    ours = [Entry(_OURS, CARTPOLES, where) for where in IN_COLLECTORS]
    return Suite(
        subject=_OURS,
        floors={},
        comparisons=tuple(Comparison(f"collector, {e.transport}", (_rival(e), e)) for e in ours),
        goals=tuple(_rate(f"{e.transport}: frames/s / TorchRL", e, 3, _rival(e)) for e in ours),
        unit="frames",
        methods={
            "transport": "where the environments step and the policy computes",
            "p50, p95, p99": f"what a batch of {FRAMES_PER_BATCH} frames takes",
        },
    )


def _weights() -> Suite:
    floors = dict.fromkeys(IN_WEIGHTS, "raw_copy")
    shared, distributed = (Entry(_OURS, UPDATES, transport) for transport in IN_WEIGHTS)
    quiet, seldom, often = (Entry(_OURS, load, "shared_memory") for load in (QUIET, SELDOM, OFTEN))
    copy = _floor(shared, floors)
    return Suite(
        subject=_OURS,
        floors=floors,
        comparisons=(
            Comparison("updates", (copy, _rival(shared), shared, distributed)),
            Comparison("serving meanwhile", (quiet, seldom, often)),
        ),
        goals=(
            _p50("shared_memory: update of 100 MB / a copy of it", shared, 2.0, copy),
            *(
                Goal(f"{each.workload.name}: p99 / no update", "p99_us", each, "at most", 2, quiet)
                for each in (seldom, often)
            ),
        ),
        methods={
            "update": "from publishing to the server's word that it serves what was published; req/s are updates/s",
            "p50/raw": "an update over a copy of the same tensors within one process",
        },
    )


def _floor(entry: Entry, floors: Mapping[str, str]) -> Entry:
    return replace(entry, peer=floors[entry.transport])


def _rival(entry: Entry) -> Entry:
    return replace(entry, peer=_RIVAL)


def _p50(text: str, subject: Entry, limit: float, base: Entry) -> Goal:
    return Goal(text, "p50_us", subject, "at most", limit, base)


def _rate(text: str, subject: Entry, limit: float, base: Entry) -> Goal:
    return Goal(text, "rate", subject, "at least", limit, base)


def _overhead(text: str, subject: Entry) -> Goal:
    return Goal(f"{text}: us per request beyond the forward", "overhead_us", subject, "at most", 50)


def _copies(ours: tuple[Entry, Entry], raw: tuple[Entry, Entry]) -> Goal:
    # In the difference of two sizes only the bytes count. One more copy would make it 1.5.
    text = "process_slot: p50 for each further byte / one raw copy in and one out"
    return Goal(text, "p50_us", ours[0], "at most", 1.25, raw[0], ours[1], raw[1])


SUITES: Mapping[str, Suite] = {
    "distributed": _distributed(),
    "local": _local(),
    "actors": _actors(),
    "collector": _collector(),
    "weights": _weights(),
}
