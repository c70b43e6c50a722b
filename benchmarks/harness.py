"""The rounds: entries of one comparison alternate, and a peer that fails leaves the others be."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from .contestant import Contestant, ContestantFailed
from .suites import Comparison, Entry

# A burst is judged by what its neighbours used, never by its own result.
_ATTEMPTS = 3
_QUIET_CORES = 0.2
_LOGGER = logging.getLogger("benchmarks.harness")


@dataclass
class Result:
    """What one entry gave: per-client cost on the server, and one measurement per round."""

    entry: Entry
    cost: dict[str, float] = field(default_factory=dict)
    rounds: dict[int, dict[str, float]] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    failure: str | None = None


@dataclass(frozen=True)
class Plan:
    """How long and how often; `interpreters` names the peers that need another Python."""

    rounds: int
    seconds: float
    python: str
    interpreters: Mapping[str, str]


def compare(comparison: Comparison, plan: Plan) -> list[Result]:
    """Start every entry, alternate their bursts for all rounds, and end them all.

    Those whose turn it is not are alive but have nothing to do.
    """
    results = [Result(entry) for entry in comparison.entries]
    with ExitStack() as stack:
        pairs = [(_enter(stack, result, plan), result) for result in results]
        for number in range(plan.rounds):
            # Each round starts with another peer, so that none always follows the same one.
            turn = number % len(pairs)
            for contestant, result in pairs[turn:] + pairs[:turn]:
                _guarded(contestant, result, lambda c, r, n=number: _burst(c, r, n, plan.seconds))
        for contestant, result in pairs:
            _guarded(contestant, result, lambda c, r: c.stop())
    return results


def _enter(stack: ExitStack, result: Result, plan: Plan) -> Contestant:
    python = plan.interpreters.get(result.entry.peer, plan.python)
    contestant = Contestant(result.entry, python)
    stack.callback(contestant.kill)
    _guarded(contestant, result, _start)
    return contestant


def _start(contestant: Contestant, result: Result) -> None:
    began = time.monotonic()
    result.cost = contestant.start()
    result.versions = contestant.versions
    _LOGGER.info("%s: up in %.1f s", result.entry.name, time.monotonic() - began)


def _burst(contestant: Contestant, result: Result, number: int, seconds: float) -> None:
    attempts: list[dict[str, float]] = []
    while len(attempts) < _ATTEMPTS and not any(map(_undisturbed, attempts)):
        attempts.append(contestant.measure(seconds))
    result.rounds[number] = min(attempts, key=lambda attempt: attempt["other_cores"])


def _undisturbed(attempt: dict[str, float]) -> bool:
    return attempt["other_cores"] <= _QUIET_CORES


def _guarded(
    contestant: Contestant, result: Result, step: Callable[[Contestant, Result], None]
) -> None:
    if result.failure is not None:
        return
    try:
        step(contestant, result)
    except ContestantFailed as exc:
        result.failure = str(exc)
        # At once: what is left of it must not disturb the others.
        contestant.kill()
        _LOGGER.error("%s: %s", result.entry.name, result.failure.partition("\n")[0])
