"""Environments, policies and drivers of collectors that fail: who is told, how soon, and what is left."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from collector_roles import (
    PROCESSES,
    SECONDS,
    THREADS,
    Counter,
    Sum,
    check,
    collector,
    enough,
    processes,
    thaw,
    troubled,
)
from support import wait_until
from tensordict import TensorDict, TensorDictBase
from warm import WarmProcess

from meshinfer import ClosedError, EnvironmentFailedError, PeerLostError
from meshinfer.collect.crew import Crew

SECONDS_TO_LEARN = 30.0
"""Within which a driver must learn of a failure: processes are started meanwhile, on a machine that may be busy."""

DOING = {"made": "being made", "reset": "its first reset", "step": "a step"}
EXITED = "exited with code 7"
KILLED = "was killed by SIGKILL"


@pytest.fixture(scope="module", autouse=True)
def fork_server() -> None:
    """Ready, so that no test waits for it while a clock runs."""
    process = processes.Process(target=int)
    process.start()
    process.join()


@pytest.fixture
def late_is_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two environments the second is looked at until it is late; how the machine holds up another is no matter."""

    def is_late(crew: Crew, index: int, timeout: float, find: Any = Crew._is_late) -> bool:
        return index == 1 and not crew.restarts[1] and find(crew, index, timeout)

    monkeypatch.setattr(Crew, "_is_late", is_late)


def failure_of(**arguments: Any) -> tuple[EnvironmentFailedError, float]:
    """What a collector with a troubled second environment raises, and after how many seconds."""
    began = time.monotonic()
    with pytest.raises(EnvironmentFailedError) as caught:  # noqa: PT012, SIM117
        with collector(**arguments) as made:
            began = time.monotonic()
            for _ in made:
                continue
    return caught.value, time.monotonic() - began


@pytest.mark.parametrize("when", ["made", "reset", "step"])
@pytest.mark.parametrize("backend", [THREADS, PROCESSES])
def test_an_environment_that_raises(backend: str, when: str) -> None:
    error, seconds = failure_of(
        create_env_fn=[Counter, troubled(when, "raise")], env_backend=backend
    )
    assert seconds < SECONDS_TO_LEARN
    assert error.env_index == 1
    assert f"environment 1 failed during {DOING[when]}: " in str(error)
    assert "LookupError: no such thing in" in str(error)
    assert "in trouble\n" in error.traceback_text
    assert isinstance(error.__cause__, LookupError)


@pytest.mark.parametrize(("when", "how", "text"), [
    ("made", "exit", EXITED), ("reset", "kill", KILLED), ("step", "exit", EXITED), ("step", "kill", KILLED),
])  # fmt: skip
def test_an_environment_whose_process_dies(when: str, how: str, text: str) -> None:
    error, seconds = failure_of(create_env_fn=[Counter, troubled(when, how)], env_backend=PROCESSES)
    assert seconds < SECONDS_TO_LEARN
    assert (error.env_index, error.exitcode) == (1, 7 if how == "exit" else -signal.SIGKILL)
    assert f"environment 1 failed: its process {text}" in str(error)


@pytest.mark.parametrize("backend", [THREADS, PROCESSES])
def test_an_exception_that_cannot_be_sent(backend: str) -> None:
    error, _ = failure_of(
        create_env_fn=[Counter, troubled("step", "unpicklable")], env_backend=backend
    )
    assert "Unpicklable: cannot leave" in str(error)
    assert "in trouble\n" in error.traceback_text


@pytest.mark.usefixtures("late_is_the_second")
@pytest.mark.parametrize("when", ["reset", "step"])
def test_an_environment_that_freezes_in_its_process(when: str) -> None:
    error, seconds = failure_of(
        create_env_fn=[Counter, troubled(when, "freeze")], env_backend=PROCESSES, step_timeout=0.5
    )
    assert seconds < SECONDS_TO_LEARN
    assert error.env_index == 1
    text = (
        f"environment 1 failed during {DOING[when]}, which has taken longer than step_timeout=0.5 s"
    )
    assert str(error) == text


@pytest.mark.usefixtures("late_is_the_second")
@pytest.mark.parametrize("restart", [True, False])
def test_an_environment_that_freezes_in_its_thread(restart: bool) -> None:
    try:
        error, seconds = failure_of(
            create_env_fn=[Counter, troubled("step", "freeze")],
            restart_failed_envs=restart,
            step_timeout=0.5,
        )
    finally:
        thaw.set()
    assert wait_until(lambda: "meshinfer-env-1" not in thread_names(), SECONDS)
    thaw.clear()
    assert seconds < SECONDS_TO_LEARN
    assert error.env_index == 1
    assert "a step, which has taken longer than step_timeout=0.5 s; its thread cannot" in str(error)


def thread_names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]


def test_a_policy_that_takes_longer_than_a_step_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it computes, no environment is late, however often the collector looks."""
    passes = iter(range(3))  # the first pass is the collector's own
    computing = threading.Event()
    found: list[bool] = []
    policy = Sum()

    def slow(batch: TensorDictBase) -> TensorDict:
        if next(passes, 0) == 2:
            computing.set()
            wait_until(lambda: len(found) > 2, SECONDS)
            computing.clear()
        return policy(batch)

    def is_late(crew: Crew, index: int, timeout: float, find: Any = Crew._is_late) -> bool:
        if computing.is_set():
            found.append(find(crew, index, timeout))
        return False

    monkeypatch.setattr(Crew, "_is_late", is_late)
    with collector(create_env_fn=[Counter], policy=slow, step_timeout=0.1, total_frames=20) as made:
        assert [len(batch) for batch in made] == [20]
    assert len(found) > 2
    assert not any(found)


@pytest.mark.usefixtures("late_is_the_second")
@pytest.mark.parametrize("how", ["raise", "kill", "freeze"])
def test_an_environment_that_is_made_anew(how: str, tmp_path: Path) -> None:
    backend = THREADS if how == "raise" else PROCESSES
    once = troubled("step", how, once=tmp_path / "done")
    with collector(
        create_env_fn=[Counter, once],
        env_backend=backend,
        restart_failed_envs=True,
        step_timeout=0.5 if how == "freeze" else None,
    ) as made:
        rows = enough(made, 30, envs=2)
        assert made.stats().restarts == 1
    check(rows[0], length=5, seed=100)
    before, after = rows[1][:11], rows[1][11:]  # it failed in its twelfth step
    last = before[-1]
    assert last["next", "truncated"].item()
    assert last["next", "done"].item()
    assert not last["next", "terminated"].item()
    check(before[:10], length=5, seed=101)
    after["episode_id"] -= before["episode_id"][-1] + 1
    check(after, length=5, seed=103)


def test_an_environment_that_closes_slowly_may(tmp_path: Path) -> None:
    """One with processes of its own needs longer than others, and would leave them behind."""
    lingering = partial(Counter, trouble=partial(_linger, tmp_path))
    with collector(
        create_env_fn=[lingering], env_backend=PROCESSES, restart_failed_envs=True
    ) as made:
        for _ in made:
            if made.stats().restarts:
                break
        assert (tmp_path / "closed").exists()


def _linger(folder: Path, what: str, step: int) -> None:
    if (what, step) == ("step", 12) and not (folder / "raised").exists():
        (folder / "raised").touch()
        raise LookupError("once")
    if what == "close":
        time.sleep(1.5)
        (folder / "closed").touch()


def test_environments_that_fail_too_often() -> None:
    error, _ = failure_of(
        create_env_fn=[Counter, troubled("step", "raise", step=2)],
        restart_failed_envs=True,
        max_restarts=2,
    )
    assert "environment 1 failed" in str(error)


@pytest.mark.parametrize("policy", [THREADS, PROCESSES])
@pytest.mark.parametrize("envs", [THREADS, PROCESSES])
def test_a_policy_that_raises(envs: str, policy: str) -> None:
    with collector(policy=Sum(trouble_at=3), env_backend=envs, policy_backend=policy) as made:
        began = time.monotonic()
        with pytest.raises(ArithmeticError, match="the policy has had enough"):
            list(made)
        assert time.monotonic() - began < SECONDS_TO_LEARN


def test_a_policy_that_raises_at_once_and_one_that_cannot_be_made() -> None:
    with pytest.raises(ArithmeticError):
        collector(policy=Sum(trouble_at=-1))
    with pytest.raises(LookupError):
        collector(policy=None, policy_factory=partial(_refuse, "no policy"))


def _refuse(text: str) -> None:
    raise LookupError(text)


@pytest.mark.parametrize("envs", [THREADS, PROCESSES])
def test_a_server_that_is_killed(envs: str) -> None:
    with collector(env_backend=envs, policy_backend=PROCESSES) as made:
        batches = iter(made)
        next(batches)
        os.kill(made.server.pid, signal.SIGKILL)  # type: ignore[attr-defined]
        began = time.monotonic()
        with pytest.raises(PeerLostError, match=r"has died|SIGKILL|has ended"):
            list(batches)
        assert time.monotonic() - began < SECONDS_TO_LEARN
        with pytest.raises(ClosedError, match="did not tell before what it had served"):
            made.stats()


def test_an_observation_that_breaks_its_spec() -> None:
    error, _ = failure_of(create_env_fn=[Counter, partial(Drifting)])
    assert error.env_index == 1
    assert "observation" in error.message


class Drifting(Counter):
    def reset(self, seed: int | None = None) -> dict[str, Any]:
        return {"observation": super().reset(seed)["observation"].astype("float64")}


@pytest.mark.parametrize("envs", [THREADS, PROCESSES])
def test_nothing_is_left_of_a_collector_that_was_forgotten(envs: str) -> None:
    made = collector(env_backend=envs, policy_backend=PROCESSES)
    next(iter(made))
    del made
    gc.collect()  # the fixture of all tests looks for what is left


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_an_exception_in_the_loop_ends_everything(error: Any) -> None:
    with pytest.raises(error):  # noqa: PT012, SIM117
        with collector(env_backend=PROCESSES, policy_backend=PROCESSES) as made:
            for _ in made:
                raise error


def test_an_interrupt_while_it_waits() -> None:
    envs = [partial(Counter, trouble=partial(_interrupt, os.getpid()))]
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012, SIM117
        with collector(create_env_fn=envs, env_backend=PROCESSES) as made:
            for _ in made:
                continue


def _interrupt(pid: int, what: str, step: int) -> None:
    if what == "step" and step % 30 == 0:  # again, if the first is lost in a finalizer
        os.kill(pid, signal.SIGINT)
        time.sleep(1.0)


DRIVER = """
import os, sys
sys.path[:0] = sys.argv[1:2]
from collector_roles import collector
if __name__ == "__main__":
    made = collector(env_backend="multiprocessing", policy_backend="multiprocessing", start_method="fork")
    batches = iter(made)
    next(batches)
    print("going", flush=True)
    if sys.argv[2] == "interrupt":
        sys.exit(3)
    for _ in batches:
        pass
"""


@pytest.mark.parametrize("how", ["kill", "interrupt"])
def test_a_driver_that_ends_takes_everything_with_it(how: str, tmp_path: Path) -> None:
    script = tmp_path / "driver.py"
    script.write_text(DRIVER)
    ours, theirs = os.pipe()
    with open(ours) as output, open(os.devnull) as nothing:
        driver = WarmProcess(
            [str(script), str(Path(__file__).parent), how],
            env=dict(os.environ),
            cwd=tmp_path,
            files=[nothing.fileno(), theirs, 2],
        )
        os.close(theirs)
        assert output.readline() == "going\n"
        family = psutil.Process(driver.pid).children(recursive=True) if how == "kill" else []
        if how == "kill":
            assert len(family) == 3
            os.kill(driver.pid, signal.SIGKILL)
        assert driver.wait(SECONDS) == (-signal.SIGKILL if how == "kill" else 3)
        assert output.readline() == ""  # nobody has it open any more
    gone = wait_until(lambda: not any(each.is_running() for each in family), SECONDS_TO_LEARN)
    assert gone
