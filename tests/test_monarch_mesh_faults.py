"""Ranks of a monarch mesh that die, programs that go on, and meshes that are closed at a bad moment."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest
from failure_scripts import ROOT, Program, environment
from monarch_noise import complaints
from support import wait_until
from warm import python_command

from meshinfer import MeshError
from meshinfer.mesh.monarch import MonarchMesh, RankFailure
from meshinfer.mesh.monarch.wiring import ServerPlace, open_posted

pytestmark = pytest.mark.slow

SECONDS = 60.0
SCRIPTS = str(ROOT / "tests" / "monarch_mesh_scripts.py")


@pytest.fixture
def roles(monarch: None) -> ModuleType:
    import monarch_mesh_roles

    return monarch_mesh_roles


def test_ranks_that_die_are_reported_and_replaced(roles: ModuleType, tmp_path: Path) -> None:
    heard: list[RankFailure] = []

    def replace(failure: RankFailure) -> None:
        if failure.group == "env" and failure.actor is None:
            mesh.respawn(failure.group, failure.rank)
        heard.append(failure)

    specs = {"request_spec": roles.request(0.0), "response_spec": roles.response()}
    with MonarchMesh(groups={"server": 1, "env": 2}, on_failure=replace) as mesh:
        gloo = mesh.serve(roles.Scale, "distributed", name="gloo", **specs)
        messages = mesh.serve(roles.Scale, "monarch", name="messages")
        envs = mesh.spawn("env", "envs", roles.Env, gloo, messages)
        others = mesh.spawn("env", "others", roles.Env, gloo, messages)

        def ask(rank: int) -> list[float]:
            asked = [envs[rank].ask.call_one(4.0, which) for which in (0, 1)]
            return [future.get(timeout=SECONDS)[0] for future in asked]

        assert ask(0) == ask(1) == [8.0, 8.0]

        # An env rank
        dead = mesh.pids("env")[1]
        os.kill(dead, signal.SIGKILL)
        failure = mesh.next_failure(SECONDS)
        assert (failure.group, failure.rank, failure.pid) == ("env", 1, dead)
        assert failure.actor is None
        assert "sig=9" in failure.cause or "has ended" in failure.cause
        assert ask(0) == [8.0, 8.0]
        assert wait_until(lambda: heard == mesh.failures == [failure], SECONDS)
        assert mesh.pids("env")[1] != dead
        assert ask(1) == [8.0, 8.0]

        # The server's rank, under both transports
        waiting = [
            actors[0].ask_until_error.call_one(which, str(tmp_path / f"{which}"))
            for which, actors in enumerate((envs, others))
        ]
        assert wait_until(lambda: len(list(tmp_path.glob("*.asking"))) == 2, SECONDS)
        os.kill(mesh.pids("server")[0], signal.SIGKILL)
        assert [future.get(timeout=SECONDS) for future in waiting] == ["PeerLostError"] * 2
        assert mesh.next_failure(SECONDS).group == "server"
        assert not gloo.is_alive
        assert not messages.is_alive
        (health,) = gloo.health()
        assert "died" in str(health.error) or "ended" in str(health.error)
        gloo.start()  # the process is replaced, and serves whatever it served
        assert messages.is_alive
        assert ask(0) == ask(1) == [8.0, 8.0]

        # An actor, but not its process
        failing = others[1].fail.call_one()
        with pytest.raises(Exception, match="SystemExit"):
            failing.get(timeout=SECONDS)
        failure = mesh.next_failure(SECONDS)
        assert (failure.group, failure.rank, failure.actor) == ("env", 1, "others")
        assert ask(1) == [8.0, 8.0]

        # The end comes while ranks ask
        for which, actors in enumerate((envs, others)):
            actors[0].ask_until_error.call_one(which, str(tmp_path / f"end{which}"))
        assert wait_until(lambda: len(list(tmp_path.glob("end*.asking"))) == 2, SECONDS)
    for which in (0, 1):
        assert (tmp_path / f"end{which}").read_text() == "ServerClosedError"


@contextmanager
def program(folder: Path, *command: str, cold: bool = False) -> Iterator[Program]:
    """Not ``cold``, monarch's processes are forked as well."""
    forked = {} if cold else {"PYTHON_EXEC": python_command(folder)}
    running = Program([*command], {**environment(), **forked}, cold=cold)
    try:
        yield running
    finally:
        running.close()


def test_a_program_survives_its_ranks(tmp_path: Path) -> None:
    """Dead ranks, a fault of somebody else's that its own hook takes, and late faults after the end."""
    with program(tmp_path, "-W", "error", SCRIPTS, "survive", str(tmp_path)) as running:
        ending = running.ending(120.0)
    assert ending.code == 0, ending.stderr
    said = [line.strip() for line in running.lines]
    assert said == ["lost env 1", "lost server 0", "hook: elsewhere", "closed", "survived"]
    assert complaints(ending.complaints()) == []


def test_ctrl_c_ends_every_rank(tmp_path: Path) -> None:
    with program(tmp_path, "-W", "error", SCRIPTS, "wait", cold=True) as running:
        (pids,) = running.hear("pids ", timeout=120.0)
        ranks = [psutil.Process(int(pid)) for pid in pids.split()]
        running.signal_group(signal.SIGINT)
        ending = running.ending(SECONDS)
        assert ending.code in (1, 130, -signal.SIGINT), ending.stderr
        assert wait_until(lambda: not any(rank.is_running() for rank in ranks), SECONDS)
        assert "terminate called" not in ending.stderr
        assert "panicked" not in ending.stderr


def test_a_server_that_other_hosts_cannot_reach(roles: ModuleType) -> None:
    options: dict[str, Any] = {
        "request_spec": roles.request(0.0),
        "response_spec": roles.response(),
    }
    place = ServerPlace("node7", "127.0.0.1", spans_hosts=True, expected_ranks=())
    with pytest.raises(MeshError, match=r"node7.*loopback address 127.0.0.1.*interface="):
        open_posted(pickle.dumps(options), None, place)


# --- What is there to copy, and scripts as they are -----------------------------------------------


def test_this_host(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    example = str(ROOT / "launch" / "monarch" / "this_host.py")
    with program(tmp_path, "-W", "error", example, "20") as running:
        ending = running.ending(120.0)
    assert ending.code == 0, ending.stderr
    assert complaints(ending.complaints()) == []
    said = "".join(running.lines)
    for rank in range(3):
        assert f"env {rank} on " in said
    assert said.count("160 steps") == 3
    assert "server 0 served 60 requests" in said


def test_a_script_of_ranks_under_monarch_under_torchrun(tmp_path: Path) -> None:
    """What torchrun tells the controller is not true of the ranks that monarch starts."""
    pytest.importorskip("gymnasium")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    with program(tmp_path, *torchrun, SCRIPTS, "spmd") as running:
        ending = running.ending(120.0)
    assert ending.code == 0, ending.stderr
    said = "".join(running.lines)
    assert "rank 0 served 20 requests" in said
    assert "rank 1: 160 steps" in said
