"""What rank 0 says of all the other ranks, once they have reported or their time is over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import torch

from meshinfer.doctor.context import Context
from meshinfer.doctor.findings import Finding, Status, fail, ok, warn, worst
from meshinfer.doctor.network import pretty_seconds
from meshinfer.mesh.groups import spell_ranks

__all__ = ["SILENT", "summary", "verdict"]

SILENT = (
    "see whether it runs (it may be stopped, still importing, or cut off by a firewall) and what the launcher's log "
    "says of it; --timeout gives it longer"
)
_NAMED = 16
"""Ranks with a line of their own; more are counted."""


def verdict(context: Context) -> dict[str, Any]:
    """What a rank tells rank 0."""
    return {
        "host": context.hostname,
        "status": worst(context.findings).value,
        "failed": context.failed,
        "torch": str(torch.__version__),
        "figures": context.figures,
    }


def summary(context: Context) -> list[Finding]:
    """Of the pairs, of each rank that is missing or failed, and of all."""
    verdicts = context.roster.verdicts
    missing = [rank for rank in range(1, context.world_size) if rank not in verdicts]
    failed = {r: v for r, v in verdicts.items() if v["status"] == Status.FAIL.value}
    bad = [*_missing(context, missing), *_failed(failed)]
    named = list(islice(bad, _NAMED))
    if len(missing) + len(failed) > _NAMED:
        more = f"and more: ranks {spell_ranks(sorted([*missing, *failed]))} in all"
        named.append(fail(more, "see each one's own lines"))
    return [
        *_figures(verdicts),
        *named,
        *_other_torch(verdicts),
        _total(verdicts, missing, failed),
    ]


def _figures(verdicts: dict[int, dict[str, Any]]) -> Iterator[Finding]:
    measured = {rank: v["figures"] for rank, v in verdicts.items() if v["figures"]}
    if not measured:
        return
    parts = []
    for key, name in (
        ("connect_seconds", "connected in"),
        ("pair_seconds", "paired in"),
        ("round_trip_seconds", "round trip"),
    ):
        times = sorted(figures[key] for figures in measured.values())
        ends = dict.fromkeys(pretty_seconds(time) for time in (times[0], times[-1]))
        parts.append(f"{name} {' to '.join(ends)}")
    slowest = max(measured, key=lambda rank: float(measured[rank]["round_trip_seconds"]))
    text = f"pairs with {_ranks(measured)}: {', '.join(parts)}"
    text += f" (slowest rank {slowest})" if len(measured) > 1 else ""
    yield ok(text, ranks={str(rank): figures for rank, figures in measured.items()})


def _missing(context: Context, ranks: list[int]) -> Iterator[Finding]:
    seconds = context.timeout - context.left()
    for rank in ranks:
        how = "it paired, then fell silent" if rank in context.roster.paired else "it never came"
        yield fail(f"rank {rank} has not reported within {seconds:.0f} s: {how}", SILENT, rank=rank)


def _failed(verdicts: dict[int, dict[str, Any]]) -> Iterator[Finding]:
    for rank, its in verdicts.items():
        text = f"rank {rank} on {its['host']} failed: {', '.join(its['failed'])}"
        yield fail(text, "see the lines of that rank", rank=rank)


def _other_torch(verdicts: dict[int, dict[str, Any]]) -> Iterator[Finding]:
    ours = str(torch.__version__)
    others = {rank: v["torch"] for rank, v in verdicts.items() if v["torch"] != ours}
    if others:
        versions = ", ".join(sorted(set(others.values())))
        text = f"{_ranks(others)} have torch {versions}, rank 0 has {ours}"
        yield warn(text, "install one version on all hosts")


def _total(
    verdicts: dict[int, dict[str, Any]], missing: list[int], failed: dict[int, dict[str, Any]]
) -> Finding:
    counts = Counter(v["status"] for v in verdicts.values())
    hosts = len({v["host"] for v in verdicts.values()})
    parts = [f"{number} {status.upper()}" for status, number in sorted(counts.items())]
    parts += [f"{len(missing)} missing"] if missing else []
    total = len(verdicts) + len(missing)
    text = f"{total} other {'rank' if total == 1 else 'ranks'}: {', '.join(parts)}"
    text += f"; heard of on {hosts} {'host' if hosts == 1 else 'hosts'}" if hosts else ""
    values = {"missing": missing, "failed": sorted(failed), "hosts": hosts}
    if missing or failed:
        return fail(text, f"look at {_ranks([*missing, *failed])} first", **values)
    return ok(text, **values)


def _ranks(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {spell_ranks(numbers)}"
