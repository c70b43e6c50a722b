"""What a profiler saw of a server's passes: copies, waits and kernels, and how many of each."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..workload import Leaf, Workload
from .load import Load, Served, serving

if TYPE_CHECKING:
    import torch

    from .part import Part

TWO_LEAVES = Workload(
    "2 leaves each way",
    (Leaf("observation", (64,)), Leaf("goal", (16,))),
    reply=(Leaf("action", (2,)), Leaf("value", (1,))),
)
"""More than one tensor each way, so that a copy for each would show."""

_RECORD = "cudaEventRecord"  # also cudaEventRecordWithFlags


@dataclass
class Seen:
    """Events of one trace, durations in microseconds."""

    copies: Counter[str] = field(default_factory=Counter)
    """By direction and memory, as the profiler names them: ``"HtoD (Pinned -> Device)"``."""
    copy_us: Counter[str] = field(default_factory=Counter)
    """By direction."""
    kernels: int = 0
    kernel_us: float = 0.0
    calls: Counter[str] = field(default_factory=Counter)
    """Waits and event records between the first copy to the device and the last one back."""

    def count(self, direction: str, memory: str = "") -> int:
        return sum(n for name, n in self.copies.items() if direction in name and memory in name)


def read_trace(events: Iterable[Mapping[str, Any]]) -> Seen:
    """Count the events of a chrome trace (``ph``, ``cat``, ``name``, ``ts``, ``dur``; times in us).

    The profiler itself waits for the whole device when it starts and when it stops: only calls between the first copy
    to the device and the end of the last one back count.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    seen, spans = Seen(), []
    for event in complete:
        kind, name, duration = event.get("cat"), str(event["name"]), float(event.get("dur", 0.0))
        if kind == "gpu_memcpy":
            what = name.removeprefix("Memcpy ")
            seen.copies[what] += 1
            seen.copy_us[what.partition(" ")[0]] += duration  # type: ignore[assignment]
            spans.append((float(event["ts"]), float(event["ts"]) + duration))
        elif kind == "kernel":
            seen.kernels += 1
            seen.kernel_us += duration
    if spans:
        first, last = min(begin for begin, _ in spans), max(end for _, end in spans)
        seen.calls.update(
            _call_name(str(event["name"]))
            for event in complete
            if event.get("cat") in ("cuda_runtime", "cuda_driver")
            and first <= float(event["ts"]) <= last
        )
    return seen


def _call_name(name: str) -> str:
    return _RECORD if name.startswith(_RECORD) else name


def traced(served: Served, device: torch.device, work: Callable[[], None]) -> tuple[Seen, int]:
    """Run `work` under the profiler until its last request is answered; what was seen, and how many passes it took."""
    from torch.profiler import ProfilerActivity, profile

    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    served.settle()
    with profile(activities=activities) as profiler:
        served.server.stats(reset=True)
        work()
        passes = served.settle().batches
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        return read_trace(json.loads(path.read_text())["traceEvents"]), passes


def run(part: Part) -> None:
    """Every transport of one host under the profiler; the copies and waits of each pass."""
    small = part.dry
    processes, rows = (2, 4) if small else (8, 64)
    for transport in part.transports:
        load = Load(transport, TWO_LEAVES, rows, processes=processes)
        with ExitStack() as stack:
            served = stack.enter_context(serving(load, _two_heads(), part.device))
            work = _bursts(served, 0.1 if small else 0.3)
            seen, passes = traced(served, part.device, work)
        row = trace_row(transport, seen, passes)
        part.row(**row)
        if part.on_gpu and (wrong := objections(row)):
            part.wrong(f"{transport}: {'; '.join(wrong)}")


def trace_row(transport: str, seen: Seen, passes: int) -> dict[str, Any]:
    each = max(passes, 1)
    return {
        "transport": transport,
        "passes": passes,
        "to_device_per_pass": seen.count("HtoD") / each,
        "to_host_per_pass": seen.count("DtoH") / each,
        "pageable_copies": seen.count("", "Pageable"),
        "device_syncs": seen.calls["cudaDeviceSynchronize"],
        "stream_syncs": seen.calls["cudaStreamSynchronize"],
        "event_waits_per_pass": seen.calls["cudaEventSynchronize"] / each,
        "event_records_per_pass": seen.calls[_RECORD] / each,
        "kernels_per_pass": seen.kernels / each,
        "copies": dict(seen.copies),
    }


def objections(row: Mapping[str, Any]) -> list[str]:
    """What a pass must not do, in words; empty if all is well."""
    if not row["kernels_per_pass"] and not row["copies"]:
        return ["the profiler saw nothing that the GPU did"]
    found = []
    if row["device_syncs"]:
        found.append(f"{row['device_syncs']} calls of cudaDeviceSynchronize")
    for key, what in (("to_device_per_pass", "to the device"), ("to_host_per_pass", "back")):
        if row[key] != 1:
            found.append(f"{row[key]:.2f} copies {what} in each pass, expected 1")
    if row["pageable_copies"]:
        found.append(f"{row['pageable_copies']} copies from or to memory that is not pinned")
    return found


def _bursts(served: Served, seconds: float) -> Callable[[], None]:
    return lambda: served.crew.burst(seconds)


def _two_heads() -> Any:
    from ..policy import FirstFourMLP, make_policy

    class TwoHeads(FirstFourMLP):
        """The benchmarks' policy, and a value."""

        def forward(self, first: Any, *others: Any) -> Any:
            action = super().forward(first)
            return action, action.sum(-1, keepdim=True)

    return make_policy(TwoHeads)
