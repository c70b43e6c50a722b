"""Clients of every habit, of which some are killed, stopped and replaced at random moments.

By hand, for as many seconds as wanted, each storm with a seed of its own::

    python tests/announced_storm.py 600
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import psutil
from announced_audit import auditing
from announced_mischief import Mischief
from announced_roles import (
    Doubler,
    Habits,
    await_stop,
    connect,
    freeze,
    hasten,
    leave,
    planes_of,
    serving,
    storm,
    thaw,
)
from failure_roles import SECONDS, Held, Worker, crew, port_of
from support import wait_until

STEADY = {
    1: Habits(threads=3),
    2: Habits(in_flight=2),
    3: Habits(impatient=0.3),
    4: Habits(),
}
DOOMED = {
    5: Habits(threads=2, lost=True),
    6: Habits(in_flight=2, lost=True),
    7: Habits(impatient=0.3, lost=True),
    8: Habits(lost=True),
}
ACTS = ("sending", "posting", "waiting")
LATE = {"delay": 0.02, "share": 0.1, "deaf": True}
ROW_SECONDS = 3.0
"""For rows of the doomed to arrive; the steady ones are never given up, however busy the machine is."""
LONGEST_STOP = 4.0


def weather(seconds: float, seed: int, directory: Path) -> Counter[str]:
    """What becomes of requests in one storm. The server in this process holds afterwards what it held before."""
    policy = Doubler(0.01, seed)
    lateness = Mischief(seed=seed, **LATE)
    with (
        auditing(directory) as report,
        serving(policy, lateness, timeout=SECONDS) as server,
    ):
        with crew(1) as (first,):
            first.call(connect, str(report), port_of(server), 9)
            first.call(leave)
        assert wait_until(lambda: server.stats().clients == 0, SECONDS)
        before = Held.by(server)
        found = _Storm(server, policy, str(report), seed).rage(seconds)
        assert wait_until(lambda: server.stats().clients == 0, SECONDS)
        assert wait_until(lambda: no_more(server, before), SECONDS), (before, Held.by(server))
    return found


def no_more(server: Any, before: Held) -> bool:
    """Whether the server holds nothing beyond that."""
    now = Held.by(server)
    return all(getattr(now, name) <= getattr(before, name) for name in vars(before))


class _Storm:
    def __init__(self, server: Any, policy: Doubler, report: str, seed: int) -> None:
        self._server, self._policy, self._report, self._seed = server, policy, report, seed
        self._random = Random(seed)
        self._workers: dict[int, Worker] = {}
        self._lives: Counter[int] = Counter()

    def rage(self, seconds: float) -> Counter[str]:
        with crew(0) as workers:
            habits = {**STEADY, **DOOMED}
            for who in habits:
                self._begin(who)
            workers.extend(self._workers.values())
            for who, habit in habits.items():
                self._workers[who].outcome(SECONDS).get()
                self._workers[who].begin(storm, self._seed, habit)
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                self._strike(workers)
            return self._calm(workers)

    def _begin(self, who: int) -> None:
        mischief = Mischief(seed=self._seed, **LATE)
        if who in DOOMED and self._random.random() < 0.5:
            at, skip = self._random.choice(ACTS), self._random.randint(1, 40)
            mischief = Mischief(at=at, what="stop", skip=skip, seed=self._seed, **LATE)
        self._start(who, mischief)

    def _start(self, who: int, mischief: Mischief) -> None:
        worker = self._workers[who] = Worker()
        self._lives[who] += 1
        options = {"rank": who, "timeout": SECONDS}
        worker.begin(connect, self._report, port_of(self._server), who, mischief, **options)

    def _strike(self, workers: list[Worker]) -> None:
        """Something befalls one of the doomed; the steady ones go on."""
        time.sleep(self._random.random() * 0.2)
        for plane in planes_of(self._server, *DOOMED):
            hasten(plane, ROW_SECONDS)
        who = self._random.choice(list(DOOMED))
        worker = self._workers[who]
        if self._random.random() < 0.3:
            freeze(worker.pid)
            time.sleep(self._random.choice((0.01, 0.3, LONGEST_STOP)) * self._random.random())
        if self._random.random() < 0.5:
            thaw(worker.pid)
        else:
            self._replace(who, workers)
        steady = self._random.choice(list(STEADY))
        if not self._policy.has_served(steady):
            raise AssertionError(f"client {steady} starves: {self._workers[steady].outcome(0.1)}")

    def _replace(self, who: int, workers: list[Worker]) -> None:
        """By one that lives, perhaps after one that dies while its channels are built."""
        self._bury(self._workers[who], workers)
        if self._random.random() < 0.3:
            self._start(who, Mischief(at="building", what="stop", skip=self._random.randrange(2)))
            workers.append(self._workers[who])
            await_stop(self._workers[who])
            self._bury(self._workers[who], workers)
        self._begin(who)
        new = self._workers[who]
        workers.append(new)
        new.outcome(SECONDS).get()
        new.begin(storm, self._seed + self._lives[who], DOOMED[who])

    def _bury(self, worker: Worker, workers: list[Worker]) -> None:
        worker.kill()
        workers.remove(worker)
        worker.close()

    def _calm(self, workers: list[Worker]) -> Counter[str]:
        """All go on, end their work and leave."""
        found: Counter[str] = Counter()
        for worker in workers:
            worker.tell()
        for who, worker in self._workers.items():
            outcome = _outcome_of(worker)
            assert outcome["reply"] > 0 or who in DOOMED, (who, outcome)
            found += outcome
        for worker in workers:
            worker.begin(leave)
        for worker in workers:
            _outcome_of(worker)
        return found + Counter({"lives": sum(self._lives.values())})


def _outcome_of(worker: Worker) -> Any:
    """What its role returned; one that stops itself meanwhile goes on."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        if psutil.Process(worker.pid).status() == psutil.STATUS_STOPPED:
            thaw(worker.pid)
        with suppress(AssertionError):  # not yet
            outcome = worker.outcome(0.1)
            break
    else:
        outcome = worker.outcome(0.1)
    return outcome.get()


if __name__ == "__main__":
    until = time.monotonic() + float(sys.argv[1])
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else int(time.time())
    while time.monotonic() < until:
        with tempfile.TemporaryDirectory() as directory:
            print("seed", seed, flush=True)
            print(dict(weather(8.0, seed, Path(directory))), flush=True)
        seed += 1
