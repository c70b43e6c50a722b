"""Jobs without a launcher's store, by srun, by hand and by mpirun: whose port is whose, and who finds whom."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
import warm
from mesh_jobs import RESULTS_VARIABLE, ROOT, Job, environment, plain, reported
from support import unavailable, unused_port, wait_until

Variables = dict[str, str]
RANKS = ROOT / "tests" / "launch_ranks.py"


def by_hand(rank: int, size: int, port: int, **more: str) -> Variables:
    """As a user sets them, and as ``env://`` reads them."""
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return {"RANK": str(rank), "WORLD_SIZE": str(size), **where, **more}


def by_srun(rank: int, size: int, job: int, **more: str) -> Variables:
    """As ``srun`` sets them on one node."""
    return {
        "SLURM_JOB_ID": str(job),
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0",
        "SLURM_NTASKS": str(size),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": str(size),
        "SLURM_STEP_NODELIST": "n0",
        **more,
    }


def scenario(*arguments: str) -> list[str]:
    return [sys.executable, str(RANKS), *arguments]


@contextmanager
def started(
    folder: Path, command: Callable[[int], Sequence[str]], *ranks: Variables
) -> Iterator[list[Job]]:
    """A process for each rank's variables; all are gone afterwards. They report into one folder."""
    shared = {RESULTS_VARIABLE: str(folder)}
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        jobs = []
        for rank, variables in enumerate(ranks):
            own = folder / f"rank{rank}.{len(list(folder.iterdir()))}"
            jobs.append(Job(command(rank), own, {**shared, **variables}, False))
            stack.callback(jobs[-1].kill)
        yield jobs


def succeeded(jobs: Sequence[Job]) -> None:
    for job in jobs:
        ended = job.end()
        assert ended.code == 0, str(ended)
        assert "Traceback" not in ended.stderr, str(ended)


def reported_soon(folder: Path, label: str) -> bool:
    return wait_until((folder / f"{label}.json").exists, 50)


# --- The user's own process group and MASTER_PORT ------------------------------------------------


@pytest.mark.parametrize("order", ["own_group_first", "own_group_last"])
@pytest.mark.parametrize("launcher", ["env", "slurm"])
def test_master_port_belongs_to_the_users_group(tmp_path: Path, launcher: str, order: str) -> None:
    port = unused_port()
    ranks = [by_hand(rank, 3, port) for rank in range(3)]
    if launcher == "slurm":
        ranks = [{**each, **by_srun(rank, 3, 77)} for rank, each in enumerate(ranks)]
    with started(tmp_path, lambda _: plain(order), *ranks) as jobs:
        succeeded(jobs)
    seen = reported(tmp_path)
    assert [seen[f"rank{rank}"]["sum"] for rank in range(3)] == [3.0] * 3
    for rank in (1, 2):
        assert seen[f"rank{rank}"]["first"] == seen[f"rank{rank}"]["second"] == [100.0] * 5


# --- Two jobs ------------------------------------------------------------------------------------


def test_jobs_of_one_host_see_only_themselves(tmp_path: Path) -> None:
    jobs = {1500: "1", 2500: "2", 12345: "3", 22345: "4"}
    with ExitStack() as stack:
        running = {
            job: stack.enter_context(
                started(
                    tmp_path / str(job),
                    lambda _, value=value: plain("constant", value),  # type: ignore[misc]
                    *(by_srun(rank, 2, job) for rank in range(2)),
                )
            )
            for job, value in jobs.items()
        }
        for job, value in jobs.items():
            succeeded(running[job])
            assert reported(tmp_path / str(job))["rank1"]["said"] == [float(value)] * 200


def test_a_second_job_with_the_same_address_and_port_is_told(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    port = unused_port()
    with started(first, lambda _: plain("constant", "1"), by_hand(0, 2, port)) as serving:
        wait_until_listening(serving[0])
        with started(second, lambda _: plain("constant", "2"), by_hand(0, 2, port)) as late:
            ended = late[0].end()
        assert ended.code == 1
        assert "MeshError: process " in ended.stderr
        assert "another MASTER_PORT, or set MESHINFER_JOB_ID" in ended.stderr
        named = [by_hand(rank, 2, port, MESHINFER_JOB_ID="second") for rank in range(2)]
        with started(second, lambda _: plain("constant", "2"), *named) as apart:
            succeeded(apart)
        assert reported(second)["rank1"]["said"] == [2.0] * 200
        with started(first, lambda _: plain("constant", "1"), by_hand(1, 2, port)) as client:
            succeeded([*client, *serving])
        assert reported(first)["rank1"]["said"] == [1.0] * 200


def wait_until_listening(job: Job) -> None:
    process = psutil.Process(job.process.pid)
    ports = range(61000, 65536)

    def lit() -> bool:
        return any(found.laddr.port in ports for found in process.net_connections("tcp"))

    assert wait_until(lit, 50), "rank 0 has no beacon"


def test_a_requeued_job_does_not_see_what_is_left_of_it(tmp_path: Path) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    with started(before, lambda _: plain("constant", "1"), by_srun(0, 2, 42)) as left:
        wait_until_listening(left[0])
        again = [by_srun(rank, 2, 42, SLURM_RESTART_COUNT="1") for rank in range(2)]
        with started(after, lambda _: plain("constant", "2"), *again) as jobs:
            succeeded(jobs)
    assert reported(after)["rank1"]["said"] == [2.0] * 200


# --- Rank 0 goes, and comes back -----------------------------------------------------------------


def test_clients_are_told_at_once_that_rank_zero_has_ended(tmp_path: Path) -> None:
    port = unused_port()
    ranks = [by_hand(rank, 2, port) for rank in range(2)]
    with started(tmp_path, lambda _: scenario("first_to_go"), *ranks) as jobs:
        succeeded(jobs)
    seen = reported(tmp_path)
    for name, request in seen["client"].items():
        # only the client that was there heard the server's goodbye
        told = "ServerClosedError" if name in ("first", "again") else "PeerLostError"
        assert request["error"] == told, seen["client"]
        assert request["seconds"] < 30, request  # its transport has 60 s
    assert seen["closed"]["seconds"] < 30


def test_rank_zero_is_found_again_when_it_was_restarted_alone(tmp_path: Path) -> None:
    port = unused_port()
    zero, one = by_hand(0, 2, port), by_hand(1, 2, port)
    with (
        started(tmp_path, lambda _: scenario("coming_back", "1"), zero) as (server,),
        started(tmp_path, lambda _: scenario("coming_back", "1"), one) as (client,),
    ):
        assert reported_soon(tmp_path, "asked"), str(client.end(0.1))
        server.process.send_signal(signal.SIGKILL)
        assert reported_soon(tmp_path, "lost")
        with started(tmp_path, lambda _: scenario("coming_back", "2"), zero) as again:
            succeeded([client, *again])
    found = reported(tmp_path)["found"]
    assert found["said"] == [200.0] * 5
    assert set(found["errors"]) <= {"PeerLostError", "ServerClosedError"}


def test_meshes_and_children_of_rank_zero_share_its_store(tmp_path: Path) -> None:
    with started(tmp_path, lambda _: scenario("family"), by_hand(0, 2, unused_port())) as jobs:
        succeeded(jobs)
    seen = reported(tmp_path)
    assert seen["child"]["said"] == [100.0] * 5
    assert seen["server"]["requests"] == 5
    assert seen["parent"]["code"] == 0
    assert seen["third"]["hosts"] is True


# --- mpirun --------------------------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["openmpi", "mpich"])
def test_the_example_runs_under_mpirun(tmp_path: Path, implementation: str) -> None:
    mpirun = shutil.which(f"mpirun.{implementation}")
    if mpirun is None:
        unavailable(f"needs mpirun of {implementation}")
    flags = ["--allow-run-as-root", "--oversubscribe"] if implementation == "openmpi" else []
    python = warm.python_command(tmp_path)
    example = [str(ROOT / "examples" / "serve_cartpole.py"), "--steps", "20"]
    ended = run_in_place(tmp_path, [mpirun, *flags, "-np", "3", python, *example])
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "rank 0 served 40 requests" in ended.stdout
    assert {line[:6] for line in ended.stdout.splitlines()} == {"rank 0", "rank 1", "rank 2"}
    assert "Traceback" not in ended.stderr


def run_in_place(folder: Path, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    variables = {warm.VARIABLE: str(warm.address())}
    return subprocess.run(
        command, env=environment(folder, variables), capture_output=True, text=True, timeout=100
    )
