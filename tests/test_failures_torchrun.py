"""A whole job under torchrun that is interrupted, terminated, or loses a rank."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest
from failure_scripts import Program, pids_heard, torchrun
from support import wait_until

pytestmark = pytest.mark.slow

JOB = """
    mesh = init_mesh()
    say("pid", os.getpid())
    {first}
    transport = mesh.transport(request(0), reply())
    if mesh.role == "server":
        with InferenceServer(Doubler(), transport) as server:
            server.serve()
        say("server", "ended")
    else:
        with transport.client() as client:
            n = 0
            while True:
                ask(client, n)
                n += 1
                if n == 100:
                    say("served", mesh.rank)
                {each}
        say("left", mesh.rank)
    """
RANKS = 3
GOAL = 25.0
"""Torchrun kills what has not ended 30 s after it was told."""


def job(first: str = "pass", each: str = "pass") -> str:
    return JOB.format(first=first, each=each)


def wait_until_running(running: Program) -> list[psutil.Process]:
    running.hear("served ", RANKS - 1)
    return [psutil.Process(pid) for pid in pids_heard(running)]


def assert_all_gone(ranks: list[psutil.Process], since: float) -> None:
    assert wait_until(lambda: not any(alive(rank) for rank in ranks), GOAL)
    assert time.monotonic() - since < GOAL


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_ctrl_c_ends_every_rank(tmp_path: Path) -> None:
    with torchrun(tmp_path, job(), RANKS) as running:
        ranks = wait_until_running(running)
        began = time.monotonic()
        running.signal_group(signal.SIGINT)
        assert_all_gone(ranks, began)
        ending = running.ending()
        assert ending.code != 0
        assert "terminate called" not in ending.stderr


def test_sigterm_to_torchrun_runs_the_users_handler_in_every_rank(tmp_path: Path) -> None:
    mark = f"open(r'{tmp_path}/' + str(mesh.rank), 'w').close()"
    first = f"signal.signal(signal.SIGTERM, lambda *_: ({mark}, sys.exit(4)))"
    with torchrun(tmp_path, job(first), RANKS) as running:
        ranks = wait_until_running(running)
        began = time.monotonic()
        running.process.send_signal(signal.SIGTERM)
        assert_all_gone(ranks, began)
        ending = running.ending()
        assert ending.code != 0
        assert "terminate called" not in ending.stderr
        assert [rank for rank in range(RANKS) if (tmp_path / str(rank)).exists()] == [0, 1, 2]


def test_a_rank_that_raises_ends_the_job_with_its_own_traceback(tmp_path: Path) -> None:
    each = "if mesh.rank == 2 and n == 200: raise ValueError('from rank two')"
    with torchrun(tmp_path, job(each=each), RANKS) as running:
        ranks = wait_until_running(running)
        ending = running.ending()
        assert ending.code != 0
        assert "ValueError: from rank two" in ending.stderr
        assert "terminate called" not in ending.stderr
        assert wait_until(lambda: not any(alive(rank) for rank in ranks), GOAL)


def test_a_job_ends_by_itself_when_its_clients_have_left(tmp_path: Path) -> None:
    with torchrun(tmp_path, job(each="if n == 300: break"), RANKS) as running:
        ending = running.ending()
        assert ending.code == 0, ending.stderr
        assert sorted(running.hear("left ", RANKS - 1)) == ["1", "2"]
        assert running.hear("server ") == ["ended"]
        assert "[W" not in "".join(ending.complaints())
        assert "Traceback" not in ending.stderr
