"""The command line: `python -m benchmarks [distributed | local | actors | collector | weights] [options]`.

`python -m benchmarks gpu` is `python -m benchmarks.gpu`, which has options of its own.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import gpu, machine, report, torchrl_env
from .contestant import REPOSITORY
from .harness import Plan, Result, compare
from .peers import IN_ACTORS, IN_COLLECTORS, IN_RAY
from .suites import SUITES, Comparison, Entry, Suite

_LOGGER = logging.getLogger("benchmarks")
_QUICK_ROUNDS, _QUICK_SECONDS = 3, 0.4
# Many short bursts, not few long ones: other work on the machine comes in spells of seconds.
_ROUNDS, _SECONDS = 9, 0.6


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one suite, or each, print table and goals, write JSON; 1 if anything failed to run."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["gpu"]:
        return gpu.main(given[1:])
    options = _options(given)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    # As an exception, so that a terminated run still ends the processes that it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    return max(_measure(name, options) for name in options.suites)


def _measure(name: str, options: argparse.Namespace) -> int:
    suite = SUITES[name]
    context: dict[str, Any] = {"suite": name, **machine.describe()}
    notes: list[str] = []
    comparisons = _chosen(suite, options, notes)
    began = time.monotonic()
    results = _run(comparisons, _plan(options))
    context.update(seconds=round(time.monotonic() - began), notes=notes)
    report.write_json(options.json or _default_path(name, options.quick), suite, results, context)
    print(_text(suite, results, context), flush=True)
    return _status(suite, results, options.check)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    add = parser.add_argument
    add("suite", nargs="?", choices=SUITES, help="default: each of them, one after the other")
    add("--rounds", type=int, help=f"bursts per peer; medians are taken (default {_ROUNDS})")
    add("--seconds", type=float, help=f"length of one burst (default {_SECONDS})")
    add("--quick", action="store_true", help="few short rounds, few clients")
    add("--peers", help="only these peers, separated by commas")
    add("--only", default="", help="only the comparisons whose name contains this")
    add("--torchrl-python", type=Path, default=REPOSITORY / ".venv-torchrl" / "bin" / "python")
    add("--no-torchrl", action="store_true", help="leave TorchRL out, and say so")
    add(
        "--json",
        type=Path,
        help="where the record goes (default benchmarks/results/SUITE[-quick].json)",
    )
    add("--check", action="store_true", help="exit with 1 unless every goal is met")
    return parser


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.rounds is not None and options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    if options.seconds is not None and not options.seconds > 0:
        parser.error(f"--seconds must be above 0, got {options.seconds}")
    options.suites = list(SUITES) if options.suite is None else [options.suite]
    if options.json is not None and len(options.suites) > 1:
        parser.error(f"--json is one record: name the suite, one of {', '.join(SUITES)}")
    comparisons = [c for name in options.suites for c in SUITES[name].comparisons]
    if not any(options.only in comparison.name for comparison in comparisons):
        names = "; ".join(comparison.name for comparison in comparisons)
        parser.error(f"--only {options.only!r} is in no comparison's name; there are: {names}")
    known = {entry.peer for comparison in comparisons for entry in comparison.entries}
    options.peers = known if options.peers is None else set(options.peers.split(","))
    if unknown := options.peers - known:
        parser.error(f"--peers: unknown {sorted(unknown)}; known are {sorted(known)}")
    return options


def _default_path(suite: str, quick: bool) -> Path:
    # A quick run must not overwrite the record of a whole one.
    name = f"{suite}-quick.json" if quick else f"{suite}.json"
    return REPOSITORY / "benchmarks" / "results" / name


def _plan(options: argparse.Namespace) -> Plan:
    rounds, seconds = (_QUICK_ROUNDS, _QUICK_SECONDS) if options.quick else (_ROUNDS, _SECONDS)
    return Plan(
        rounds=rounds if options.rounds is None else options.rounds,
        seconds=seconds if options.seconds is None else options.seconds,
        python=sys.executable,
        # Not resolved: a virtual environment's python is a link whose place is its meaning.
        interpreters={"torchrl": str(options.torchrl_python.absolute())},
    )


def _chosen(suite: Suite, options: argparse.Namespace, notes: list[str]) -> list[Comparison]:
    """The comparisons asked for, without the entries that are not to run or cannot."""
    wanted = [c for c in suite.comparisons if options.only in c.name]
    if options.quick:
        wanted = [c for c in wanted if c.quick]
        notes.append("quick: few short rounds, and not every comparison")
    entries = {e for c in wanted for e in c.entries if e.peer in options.peers}
    entries -= _without("ray", "meshinfer[ray]", IN_RAY, entries, notes)
    entries -= _without("gymnasium", "meshinfer[examples]", IN_COLLECTORS, entries, notes)
    entries -= _without_torchrl(entries, options, notes)
    kept = [replace(c, entries=tuple(e for e in c.entries if e in entries)) for c in wanted]
    return [comparison for comparison in kept if comparison.entries]


def _without(
    package: str, extra: str, transports: Sequence[str], entries: set[Entry], notes: list[str]
) -> set[Entry]:
    """Those over `transports` if they do not run for want of a package."""
    need = {entry for entry in entries if entry.transport in transports}
    if not need or importlib.util.find_spec(package) is not None:
        return set()
    notes.append(f"{package} was left out: it is not installed; pip install '{extra}'")
    return need


def _without_torchrl(
    entries: set[Entry], options: argparse.Namespace, notes: list[str]
) -> set[Entry]:
    """Those that do not run for want of TorchRL."""
    rivals = {entry for entry in entries if entry.peer == "torchrl"}
    if not rivals:
        return set()
    if options.no_torchrl:
        notes.append("TorchRL was left out (--no-torchrl)")
        return rivals
    python = options.torchrl_python.absolute()
    in_actors = any(entry.transport in IN_ACTORS for entry in rivals)
    collects = any(entry.transport in IN_COLLECTORS for entry in rivals)
    shared = (*torchrl_env.LAUNCHERS * in_actors, *torchrl_env.ENVIRONMENTS * collects)
    try:
        torchrl_env.ensure(python, shared)
        if in_actors:
            notes.append(torchrl_env.try_monarch(python))
    except torchrl_env.EnvironmentFailed as exc:
        notes.append(f"TorchRL was left out: {exc}")
        return rivals
    return set()


def _run(comparisons: list[Comparison], plan: Plan) -> dict[Entry, Result]:
    results: dict[Entry, Result] = {}
    for comparison in comparisons:
        _LOGGER.info("-- %s", comparison.name)
        results.update((result.entry, result) for result in compare(comparison, plan))
    return results


def _text(suite: Suite, results: dict[Entry, Result], context: dict[str, Any]) -> str:
    """What a person reads: the table, the goals, and what did not run."""
    head = f"{context['cpu']}, {context['cores']} cores; {context['seconds']} s in all"
    parts = [
        head,
        report.table(suite, results),
        report.methods(suite, results),
        report.goals(suite, results),
        "\n".join(f"NOTE {note}" for note in context["notes"]),
        report.failures(results),
    ]
    return "\n\n".join(part for part in parts if part)


def _status(suite: Suite, results: dict[Entry, Result], check: bool) -> int:
    if any(result.failure for result in results.values()):
        return 1
    verdicts = [report.verdict(goal, results) for goal in suite.goals]
    return int(check and verdicts != ["met"] * len(verdicts))


if __name__ == "__main__":
    sys.exit(main())
