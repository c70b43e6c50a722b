"""A policy on the GPU and clients in other processes: time per row and per batch, and where it goes."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from ..policy import make_policy
from ..workload import Workload
from .load import PIXELS, VECTORS, Load, Served, serving
from .part import Part
from .trace import traced

_SIZES, _QUICK_SIZES, _DRY_SIZES = (1, 8, 64, 256), (1, 64, 256), (1, 4)
_PROCESSES, _DRY_PROCESSES = 8, 2


def run(part: Part) -> None:
    """Every transport with vectors and pixels; the traced window is another one than that which is measured."""
    sizes = _DRY_SIZES if part.dry else _QUICK_SIZES if part.quick else _SIZES
    for workload in (PIXELS,) if part.dry and part.quick else (VECTORS, PIXELS):
        for transport in part.transports:
            for rows in sizes:
                part.row(**_measured(part, _load(part, transport, workload, rows)))


def _load(part: Part, transport: str, workload: Workload, rows: int) -> Load:
    """Large batches are asked for by as few processes as a machine has room for.

    Over shared memory each has many requests of one row in flight; elsewhere its requests have many rows. One row
    alone is asked for again when its answer is there.
    """
    processes = min(rows, _DRY_PROCESSES if part.dry else _PROCESSES)
    each = 1 if transport == "shared_memory" else rows // processes
    return Load(transport, workload, rows, each, processes, depth=1 if rows == 1 else 2)


def _measured(part: Part, load: Load) -> dict[str, Any]:
    seconds = 0.15 if part.dry else 0.5 if part.quick else 0.8
    with ExitStack() as stack:
        served = stack.enter_context(serving(load, make_policy(), part.device))
        served.crew.burst(seconds / 3)
        found = served.measure(seconds)
        split = _split(part, served, found)
    return {
        "transport": load.transport,
        "workload": load.workload.name,
        "rows": load.rows,
        "each": load.each,
        **found,
        **split,
    }


def _split(part: Part, served: Served, found: dict[str, float]) -> dict[str, float]:
    """Microseconds of a batch on the device, from a trace; the rest is all that they do not account for."""
    if not part.on_gpu:
        return {}
    seen, passes = traced(served, part.device, lambda: served.crew.burst(0.2))
    each = max(passes, 1)
    parts = {
        "copy_in_us": seen.copy_us["HtoD"] / each,
        "forward_us": seen.kernel_us / each,
        "copy_back_us": seen.copy_us["DtoH"] / each,
    }
    return {**parts, "rest_us": found["us_per_batch"] - sum(parts.values())}
