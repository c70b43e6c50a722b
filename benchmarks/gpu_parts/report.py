"""Tables for people, and the goals that the parts' rows are held to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_PROVED = ("process_slot", "shared_memory")
_MIB = 1 << 20
_TITLES = {
    "trace": "trace: copies and waits of a pass, requests and replies of two leaves",
    "overhead": "overhead: a policy of a fixed time (10 ms, batches of 64; dry: less)",
    "nccl": "nccl: round trips of one observation, the memory of pairs, batches of both kinds",
    "staging": "staging: time of a batch and where it goes (us; copies and forward as the device has them)",
    "compiled": "compiled: a static batch",
    "conformance": "conformance: pytest -m gpu tests/gpu",
}


@dataclass
class Outcome:
    """How a part went: `ran`, `failed`, `impossible` here, `deadline`, `interrupted`, or `no time` to start it."""

    name: str
    status: str = "ran"
    seconds: float = 0.0
    reason: str | None = None
    rows: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def record(self) -> dict[str, Any]:
        found = {"status": self.status, "seconds": round(self.seconds, 1), "reason": self.reason}
        return {**found, "rows": self.rows, "notes": self.notes, "wrong": self.wrong}


@dataclass(frozen=True)
class Reached:
    """A goal, what was reached, and the limit; `None` where it was not measured."""

    goal: str
    value: float | None
    limit: float

    def verdict(self, dry: bool) -> str:
        if dry or self.value is None:
            return "not measured"
        return "met" if self.value <= self.limit else "NOT MET"


def goals(outcomes: Mapping[str, Outcome]) -> list[Reached]:
    """Those of the whole script; each limit is the most that may be."""
    return [*_traces(outcomes), *_overheads(outcomes), _ratio(outcomes)]


def _traces(outcomes: Mapping[str, Outcome]) -> Iterator[Reached]:
    columns = {
        "device_syncs": ("cudaDeviceSynchronize", 0.0),
        "to_device_per_pass": ("copies to the device in a pass", 1.0),
        "to_host_per_pass": ("copies back in a pass", 1.0),
        "pageable_copies": ("copies of memory that is not pinned", 0.0),
    }
    for transport in _PROVED:
        row = _row(outcomes, "trace", transport=transport)
        seen = bool(row.get("copies"))  # else the profiler saw nothing, and all numbers are 0
        for column, (what, limit) in columns.items():
            yield Reached(f"{transport}: {what}", row.get(column) if seen else None, limit)


def _overheads(outcomes: Mapping[str, Outcome]) -> Iterator[Reached]:
    for transport in (*_PROVED, "distributed"):
        row = _row(outcomes, "overhead", transport=transport)
        yield Reached(
            f"{transport}: share of a batch that is no forward", row.get("overhead"), 0.15
        )


def _ratio(outcomes: Mapping[str, Outcome]) -> Reached:
    row = _row(outcomes, "nccl", what="round trip", bytes=_MIB)
    return Reached("nccl, 1 MiB: round trip / raw send and receive", row.get("ratio"), 1.3)


def _row(outcomes: Mapping[str, Outcome], part: str, **wanted: Any) -> Mapping[str, Any]:
    rows = outcomes[part].rows if part in outcomes else []
    return next((r for r in rows if all(r.get(k) == v for k, v in wanted.items())), {})


def text(outcome: Outcome) -> str:
    """One part: title, table, notes, and what went wrong."""
    lines = [f"== {_TITLES.get(outcome.name, outcome.name)} ({outcome.seconds:.0f} s)"]
    if outcome.name == "versions":
        lines += [f"{key:24}{value}" for row in outcome.rows for key, value in row.items()]
    else:
        lines += [line for group in _alike(outcome.rows) for line in table(group)]
    lines += [f"NOTE {note}" for note in outcome.notes]
    if outcome.reason is not None:
        lines.append(f"{outcome.status.upper()}: {outcome.reason}")
    lines += [f"WRONG: {what}" for what in outcome.wrong]
    return "\n".join(lines)


def goal_lines(reached: Sequence[Reached], dry: bool) -> str:
    lines = ["== goals"]
    for goal in reached:
        value = "-" if goal.value is None else f"{goal.value:.3g}"
        lines.append(f"{goal.verdict(dry):14}{goal.goal}: {value} (at most {goal.limit:g})")
    return "\n".join(lines)


def _alike(rows: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Rows in groups of the same columns, in their order."""
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row), []).append(row)
    yield from groups.values()


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Columns as wide as they need to be; numbers to the right."""
    columns = [key for key in rows[0] if not isinstance(rows[0][key], dict)]
    shown = [columns, *([_cell(row[key]) for key in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    words = [isinstance(rows[0][key], str) for key in columns]
    return ["  ".join(map(_padded, row, widths, words)).rstrip() for row in shown]


def _padded(cell: str, width: int, word: bool) -> str:
    return cell.ljust(width) if word else cell.rjust(width)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return "" if value is None else str(value)
