"""Environments and policies for collectors, in threads and in processes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from support import PRELOADED
from tensordict import TensorDict, TensorDictBase

from meshinfer.collect import AsyncBatchedCollector, StepResult

SECONDS = 30.0
"""For what must happen, but whose speed no test asserts."""
THREADS, PROCESSES = "threading", "multiprocessing"

processes = get_context("forkserver")
processes.set_forkserver_preload(PRELOADED)


class Counter:
    """Shows its seed, its episode and the step within, and refuses any action but their sum."""

    num_envs = 1
    is_batched = False

    def __init__(
        self, length: int = 5, *, trouble: Callable[[str, int], None] | None = None
    ) -> None:
        self.length = length
        self.trouble = trouble or (lambda *_: None)
        self.steps = 0
        self.place = np.zeros(3, np.float32)
        self.observation_spec = TensorDict({"observation": torch.zeros(3)}, [])
        self.action_spec = TensorDict({"action": torch.zeros((), dtype=torch.int64)}, [])
        self.trouble("made", 0)

    def reset(self, seed: int | None = None) -> dict[str, Any]:
        self.trouble("reset", 0)
        self.place[:] = (-1 if seed is None else seed, 0, 0)
        return {"observation": self.place.copy()}

    def step(self, action: Any) -> StepResult:
        self.steps += 1
        self.trouble("step", self.steps)
        expected, found = int(self.place.sum()), int(action["action"])
        assert found == expected, f"expected action {expected}, found {found}"
        self.place[2] += 1
        shown = {"observation": self.place.copy()}
        reward = float(self.place[2])
        if self.place[2] < self.length:
            return StepResult(shown, reward, False, False, shown)
        self.place[1:] = (self.place[1] + 1, 0)
        terminated = self.place[1] % 2 == 1  # every other episode is cut
        after = {"observation": self.place.copy()}
        return StepResult(shown, reward, terminated, not terminated, after)

    def close(self) -> None:
        self.trouble("close", 0)


def as_long_as_threads(number: int | None = None) -> Counter:
    """Whose episodes have as many steps as torch has threads here; ``number`` of them, if given."""
    if number is not None:
        torch.set_num_threads(number)
    return Counter(torch.get_num_threads())


class Counters:
    """Several of them in a row; a row whose episode has ended is reset by the next step, which is no transition."""

    is_batched = True

    def __init__(self, lengths: tuple[int, ...] = (2, 3, 4, 5)) -> None:
        self.rows = [Counter(length) for length in lengths]
        self.num_envs = len(lengths)
        self.ended = np.zeros(self.num_envs, bool)
        self.after: list[Any] = [None] * self.num_envs
        size = [self.num_envs]
        self.observation_spec = TensorDict({"observation": torch.zeros(*size, 3)}, size)
        self.action_spec = TensorDict({"action": torch.zeros(size, dtype=torch.int64)}, size)

    def reset(self, seed: int | None = None) -> dict[str, Any]:
        first = [row.reset(None if seed is None else seed + i) for i, row in enumerate(self.rows)]
        return {"observation": np.stack([each["observation"] for each in first])}

    def step(self, action: Any) -> StepResult:
        stepped = ~self.ended
        results = []
        for i, row in enumerate(self.rows):
            if stepped[i]:
                results.append(row.step({"action": action["action"][i]}))
                self.after[i] = results[i].observation
            else:
                results.append(StepResult(self.after[i], 0.0, False, False, self.after[i]))
        self.ended = np.array([r.terminated or r.truncated for r in results])
        shown = {"observation": np.stack([r.next["observation"] for r in results])}
        columns = [
            np.array([getattr(r, n) for r in results])
            for n in ("reward", "terminated", "truncated")
        ]
        return StepResult(shown, *columns, shown, None if stepped.all() else stepped)

    def close(self) -> None:
        pass


class Sum(torch.nn.Module):
    """``action``: the sum of the observation. ``tag``: its one parameter."""

    def __init__(self, trouble_at: float | None = None) -> None:
        super().__init__()
        self.tag = torch.nn.Parameter(torch.zeros(()))
        self.trouble_at = trouble_at

    def forward(self, batch: TensorDictBase) -> TensorDict:
        seen = batch["observation"]
        if self.trouble_at is not None and (seen[:, 1] >= self.trouble_at).any():
            raise ArithmeticError("the policy has had enough")
        action = seen.sum(-1).long()
        return TensorDict({"action": action, "tag": self.tag.expand(len(seen))}, batch.batch_size)

    def like(self, tag: float) -> Sum:
        other = Sum()
        with torch.no_grad():
            other.tag.fill_(tag)
        return other


class Recurrent(torch.nn.Module):
    """Counts its own steps in ``hidden``, and returns the count where ``key`` says."""

    def __init__(self, key: Any) -> None:
        super().__init__()
        self.key = key

    def forward(self, batch: TensorDictBase) -> TensorDict:
        hidden = batch["hidden"]
        found = TensorDict({"action": batch["observation"].sum(-1).long()}, batch.batch_size)
        return found.set(self.key, hidden + 1)


thaw = threading.Event()
"""What a frozen environment waits for; in a process of its own, for ever."""


class Unpicklable(Exception):
    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.lock = threading.Lock()


def trouble(when: str, step: int, how: str, once: Path | None, what: str, now: int) -> None:
    """Raise, freeze, or end the process, when it is time; with a path, only the first time of all."""
    if (what, now) != (when, step):
        return
    if once is not None:
        try:
            once.touch(exist_ok=False)
        except FileExistsError:
            return
    if how == "raise":
        raise LookupError(f"no such thing in {when}")
    if how == "unpicklable":
        raise Unpicklable("cannot leave")
    if how == "exit":
        os._exit(7)
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "freeze":
        thaw.wait()


def troubled(
    when: str, how: str, *, step: int | None = None, once: Path | None = None
) -> Callable[[], Counter]:
    at = (12 if when == "step" else 0) if step is None else step
    return partial(Counter, trouble=partial(trouble, when, at, how, once))


def collector(**arguments: Any) -> AsyncBatchedCollector:
    given: dict[str, Any] = {
        "create_env_fn": [Counter, Counter],
        "policy": Sum(),
        "frames_per_batch": 20,
        "seed": 100,
        "start_method": "forkserver",
        **arguments,
    }
    return AsyncBatchedCollector(**given)


def by_env(batches: list[TensorDict]) -> dict[int, TensorDict]:
    """All transitions of each environment, in the order in which they were handed out."""
    whole = torch.cat(batches)
    envs = whole["env_index"]
    return {int(env): whole[envs == env] for env in envs.unique()}


def enough(batches: Iterable[TensorDict], rows: int, envs: int) -> dict[int, TensorDict]:
    """The transitions of each of so many environments, when all have made ``rows`` of them; none waits for another."""
    found, counts = [], torch.zeros(envs, dtype=torch.int64)
    for batch in batches:
        found.append(batch)
        counts += batch["env_index"].bincount(minlength=envs)
        if counts.min() >= rows:
            break
    return by_env(found)


def check(rows: TensorDict, length: int, seed: int) -> None:
    """Every transition of one :class:`Counter` from its first on, as it can only be."""
    count = len(rows)
    episode, step = torch.arange(count) // length, torch.arange(count) % length
    place = torch.stack([torch.full((count,), float(seed)), episode.float(), step.float()], -1)
    after = place + torch.tensor([0.0, 0.0, 1.0])
    done = (step == length - 1).unsqueeze(-1)
    cut = (episode % 2 == 1).unsqueeze(-1)
    following = rows["next"]
    expected = {
        "observation": place,
        "action": place.sum(-1).long(),
        "episode_id": episode,
        "step_index": step,
        ("next", "observation"): after,
        ("next", "reward"): after[:, 2:],
        ("next", "terminated"): done & ~cut,
        ("next", "truncated"): done & cut,
        ("next", "done"): done,
    }
    for key, value in expected.items():
        torch.testing.assert_close(rows[key], value, rtol=0, atol=0)
    assert following["reward"].dtype == torch.float32
