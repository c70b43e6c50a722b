"""Medians over rounds, ratios between peers, and the table, goals and JSON made of them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from .harness import Result
from .suites import Entry, Goal, Suite

Results = Mapping[Entry, Result]

SPREAD_METHOD = "the slowest round's p50 over the fastest's"
OTHER_METHOD = (
    "processor cores that unrelated processes used during a round, median; the rows of a run "
    "where it is not near 0 are not to be trusted"
)
MEMORY_METHOD = (
    "growth of the server's resident set from 1 connected and warmed-up client to all of them, "
    "divided by the number of clients added"
)
OVERHEAD_METHOD = (
    "where server and clients are threads of one process: 1 / (req/s), or p50 with one client, less the time per row "
    "of a bare forward pass over one row for each client"
)
_COUNT_METHOD = "server process at all clients minus at none, divided by their number"
_COST_DIGITS = {"threads": 1, "descriptors": 1, "memory_kib": 0}
_HEADINGS = (
    *("transport", "workload", "peer", "req/s", "p50 us", "p95 us", "p99 us", "overhead us"),
    *("requests", "spread", "other", "p50/raw", "p50/TorchRL", "req/s/TorchRL"),
    *("thr/cl", "fd/cl", "KiB/cl"),
)


def median(result: Result, metric: str) -> float | None:
    """The metric's median over the rounds, or its one value if it is a per-client cost."""
    if metric in _COST_DIGITS:
        return result.cost.get(metric)
    values = [round_[metric] for round_ in result.rounds.values() if metric in round_]
    return statistics.median(values) if values else None


def ratio(subject: Result, base: Result | None, metric: str) -> float | None:
    """The median of the per-round ratios, so that the machine's slow minutes cancel out."""
    if base is None:
        return None
    shared = subject.rounds.keys() & base.rounds.keys()
    values = [subject.rounds[n][metric] / base.rounds[n][metric] for n in shared]
    return statistics.median(values) if values else None


def excess(larger: Result | None, smaller: Result | None, metric: str) -> float | None:
    """The median of the per-round differences."""
    if larger is None or smaller is None:
        return None
    shared = larger.rounds.keys() & smaller.rounds.keys()
    values = [larger.rounds[n][metric] - smaller.rounds[n][metric] for n in shared]
    return statistics.median(values) if values else None


def reached(goal: Goal, results: Results) -> float | None:
    """What the goal's metric came to, or None if it was not measured."""
    subject = results.get(goal.subject)
    if subject is None:
        return None
    if goal.base is None:
        return median(subject, goal.metric)
    base = results.get(goal.base)
    if goal.beyond is None or goal.base_beyond is None:
        return ratio(subject, base, goal.metric)
    more = excess(subject, results.get(goal.beyond), goal.metric)
    base_more = excess(base, results.get(goal.base_beyond), goal.metric)
    return more / base_more if more is not None and base_more else None


def verdict(goal: Goal, results: Results) -> str:
    value = reached(goal, results)
    if value is None:
        return "not measured"
    return "met" if goal.met(value) else "NOT MET"


def table(suite: Suite, results: Results) -> str:
    """One line per entry, without the columns that say nothing; ratios on the subject's lines only."""
    rows = [_row(suite, results, result) for result in results.values()]
    headings = [heading.replace("req/s", f"{suite.unit}/s") for heading in _HEADINGS]
    told = [column for column in range(len(headings)) if any(row[column] for row in rows)]
    shown = [[row[column] for column in told] for row in (headings, *rows)]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return "\n".join(_aligned(row, widths) for row in shown)


def methods(suite: Suite, results: Results) -> str:
    """What the columns mean that do not say so."""
    told = {**suite.methods, "spread": SPREAD_METHOD, "other": OTHER_METHOD}
    if any(median(result, "overhead_us") is not None for result in results.values()):
        told["overhead"] = OVERHEAD_METHOD
    if any(median(result, "memory_kib") is not None for result in results.values()):
        told["KiB/cl"] = MEMORY_METHOD
    return "\n".join(f"{column}: {method}." for column, method in told.items())


def goals(suite: Suite, results: Results) -> str:
    """One line per goal: verdict, what it is, reached, limit."""
    return "\n".join(_goal_line(goal, results) for goal in suite.goals)


def failures(results: Results) -> str:
    """What went wrong, with the peer's own words."""
    failed = [result for result in results.values() if result.failure]
    return "\n".join(f"FAILED {r.entry.name}: {r.failure}" for r in failed)


def write_json(path: Path, suite: Suite, results: Results, context: dict[str, Any]) -> None:
    """Everything the table says, each round by itself, and where it was measured."""
    document = {
        **context,
        "methods": {
            "threads, descriptors": _COUNT_METHOD,
            "memory_kib": MEMORY_METHOD,
            "other_cores": OTHER_METHOD,
            "overhead_us": OVERHEAD_METHOD,
        },
        "results": [_result_record(result) for result in results.values()],
        "goals": [_goal_record(goal, results) for goal in suite.goals],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=2) + "\n")


def _row(suite: Suite, results: Results, result: Result) -> tuple[str, ...]:
    entry, rounds = result.entry, result.rounds.values()
    names = (entry.transport, entry.workload.name, entry.peer)
    if not rounds:
        return (*names, "failed", *[""] * (len(_HEADINGS) - len(names) - 1))
    p50s = [round_["p50_us"] for round_ in rounds]
    return (
        *names,
        *[_number(median(result, m), 0) for m in ("rate", "p50_us", "p95_us", "p99_us")],
        _number(median(result, "overhead_us"), 0),
        str(sum(int(round_["requests"]) for round_ in rounds)),
        f"{max(p50s) / min(p50s):.1f}x",
        _number(median(result, "other_cores"), 2),
        *_ratios(suite, results, entry),
        *[_number(result.cost.get(key), digits) for key, digits in _COST_DIGITS.items()],
    )


def _ratios(suite: Suite, results: Results, entry: Entry) -> Iterable[str]:
    if entry.peer != suite.subject:
        return ("", "", "")
    floor = suite.floors.get(entry.transport)
    raw = None if floor is None else results.get(replace(entry, peer=floor))
    rival = results.get(replace(entry, peer="torchrl"))
    pairs = ((raw, "p50_us"), (rival, "p50_us"), (rival, "rate"))
    return [_number(ratio(results[entry], base, metric), 2) for base, metric in pairs]


def _aligned(row: list[str], widths: list[int]) -> str:
    left = [cell.ljust(width) for cell, width in zip(row[:3], widths[:3], strict=True)]
    right = [cell.rjust(width) for cell, width in zip(row[3:], widths[3:], strict=True)]
    return "  ".join([*left, *right]).rstrip()


def _goal_line(goal: Goal, results: Results) -> str:
    value = _number(reached(goal, results), 2) or "-"
    return f"{verdict(goal, results):12}  {goal.text}: {value} ({goal.sense} {goal.limit:.2f})"


def _goal_record(goal: Goal, results: Results) -> dict[str, Any]:
    return {
        "goal": f"{goal.text} {goal.sense} {goal.limit:.2f}",
        "reached": reached(goal, results),
        "verdict": verdict(goal, results),
    }


def _result_record(result: Result) -> dict[str, Any]:
    metrics = ("rate", "p50_us", "p95_us", "p99_us", "overhead_us", "other_cores")
    return {
        "peer": result.entry.peer,
        "transport": result.entry.transport,
        "workload": asdict(result.entry.workload),
        "median": {metric: median(result, metric) for metric in metrics},
        "rounds": list(result.rounds.values()),
        "per_client": result.cost,
        "versions": result.versions,
        "failure": result.failure,
    }


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
