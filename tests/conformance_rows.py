"""Which transports pass the conformance suite, made how, and with clients where."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from meshinfer import (
    DistributedTransport,
    MergedTransport,
    MPTransport,
    SlotTransport,
    ThreadingTransport,
)
from meshinfer.inference.monarch import MonarchTransport
from meshinfer.inference.shared import ProcessSlotTransport, SharedMemoryTransport
from meshinfer.testing import GlooRows

NUM_SLOTS = 48
"""More than the clients of any check, and fewer than the requests that one submits at once."""


def queue(request_spec: Any, response_spec: Any, timeout: float = 60.0) -> ThreadingTransport:
    return ThreadingTransport()


def slot(request_spec: Any, response_spec: Any, timeout: float = 60.0) -> SlotTransport:
    return SlotTransport(NUM_SLOTS, request_spec=request_spec, response_spec=response_spec)


def slot_without_specs(
    request_spec: Any, response_spec: Any, timeout: float = 60.0
) -> SlotTransport:
    return SlotTransport(NUM_SLOTS)


def process_queue(request_spec: Any, response_spec: Any, **options: Any) -> MPTransport:
    return MPTransport(**options)


def process_slot(request_spec: Any, response_spec: Any, **options: Any) -> ProcessSlotTransport:
    return ProcessSlotTransport(request_spec, response_spec, num_slots=NUM_SLOTS, **options)


def ray(request_spec: Any, response_spec: Any, **options: Any) -> Any:
    from meshinfer.inference.ray import RayTransport

    return RayTransport(**options)


def shared_memory(request_spec: Any, response_spec: Any, **options: Any) -> SharedMemoryTransport:
    return SharedMemoryTransport(request_spec, response_spec, num_slots=128, **options)


def monarch(request_spec: Any, response_spec: Any, **options: Any) -> MonarchTransport:
    return MonarchTransport(**options)


def announced(request_spec: Any, response_spec: Any, **options: Any) -> DistributedTransport:
    return DistributedTransport(request_spec, response_spec, backend=GlooRows(), **options)


class Alternating(MergedTransport):
    """Its clients come over one transport after the other, and so do the requests of any check."""

    def __init__(self, *transports: Any) -> None:
        super().__init__(transports)
        self._turns = itertools.cycle(transports)

    def client(self) -> Any:
        return next(self._turns).client()


def merged(request_spec: Any, response_spec: Any, **options: Any) -> Alternating:
    return Alternating(
        DistributedTransport(request_spec, response_spec, **options),
        shared_memory(request_spec, response_spec, **options),
    )


@dataclass(frozen=True)
class Row:
    """One transport under test.

    Args:
        name: of the row.
        kind: as in the compatibility table.
        factory: makes the transport.
        places: where its clients may be: ``"threads"``, or processes of a start method. In ``"threads-inline"`` who
            receives a request serves it too. ``"ray-..."`` wants a cluster of Ray, ``"monarch-..."`` monarch.
        lacks: capabilities of a harness that it does not have.
    """

    name: str
    kind: str
    factory: Callable[..., Any]
    places: tuple[str, ...]
    lacks: tuple[str, ...] = ()

    @property
    def capabilities(self) -> dict[str, bool]:
        """As a harness takes them."""
        return dict.fromkeys(self.lacks, False)


THREADS = ("threads",)
PROCESSES = ("threads", "forkserver", "spawn")
SAME_HOST = (*PROCESSES, "fork")
"""Not for stores and gloo: a thread of theirs may hold a lock of the C library, such as that of the resolver, while
another one forks, and the child then waits for it for ever."""

ROWS = (
    Row("queue", "queue", queue, THREADS, lacks=("fixed_layout",)),
    Row("slot", "slot", slot, THREADS),
    Row("slot-without-specs", "slot", slot_without_specs, THREADS, lacks=("fixed_layout",)),
    Row("process-queue", "queue", process_queue, SAME_HOST, lacks=("fixed_layout",)),
    Row(
        "process_slot",
        "process_slot",
        process_slot,
        SAME_HOST,
        lacks=("many_in_flight", "own_client"),
    ),
    Row("shared_memory", "shared_memory", shared_memory, SAME_HOST),
    Row(
        "distributed",
        "distributed",
        DistributedTransport,
        (*PROCESSES, "threads-inline", "ray-actors"),
    ),
    Row("distributed-announced", "distributed", announced, ("threads", "forkserver")),
    Row("merged", "distributed and shared_memory", merged, THREADS),
    Row("ray", "ray", ray, ("ray-threads", "ray-actors"), lacks=("fixed_layout",)),
    Row(
        "monarch",
        "monarch",
        monarch,
        ("monarch-threads", "monarch-actors"),
        lacks=("fixed_layout",),
    ),
)
