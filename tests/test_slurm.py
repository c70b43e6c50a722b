"""What ``launch/slurm`` holds, on a real SLURM cluster of four nodes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import psutil
import pytest
from cluster import Slurm, SlurmEnd, SlurmJob, cold_python
from mesh_jobs import ROOT, reported
from support import wait_until

pytestmark = pytest.mark.slow

SECONDS = 60.0
LAUNCH = ROOT / "launch" / "slurm"
EXAMPLE = str(ROOT / "examples" / "serve_cartpole.py")
RANKS = str(ROOT / "tests" / "node_ranks.py")
TWO_RANKS = ("--nodes=2", "--ntasks-per-node=1")
RAW = ("terminate called", "what():", "libtorch", "GLIBC", "core dumped")
"""Words of messages that tell nothing to somebody who has not written them."""


def completed(job: SlurmJob) -> SlurmEnd:
    ended = job.end()
    assert (ended.state, ended.code) == ("COMPLETED", 0), str(ended)
    assert "Traceback" not in ended.text, str(ended)
    return ended


# --- The files, with the example as it is ---------------------------------------------------------


def assert_example(ended: SlurmEnd, logs: dict[int, str], ranks: int = 4) -> None:
    """``logs`` holds the file of each rank."""
    assert f"rank 0 served {20 * (ranks - 1)} requests" in ended.logs[logs[0]], str(ended)
    for rank in range(1, ranks):
        assert re.search(rf"rank {rank}: 160 steps", ended.logs[logs[rank]]), str(ended)


def test_srun_and_torchrun_on_two_nodes(slurm: Slurm, warm: dict[str, str], tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    script = str(LAUNCH / "torchrun.sbatch")
    job = slurm.submit(tmp_path, script, EXAMPLE, "--steps=20", variables=warm)
    ended = completed(job)
    first, second = (f"meshinfer_{job.id}_n{node}.out" for node in (0, 1))
    text = ended.logs[first] + ended.logs[second]
    assert "[rank 0] rank 0 served 60 requests" in text, str(ended)
    for rank in (1, 2, 3):
        assert f"[rank {rank}] rank {rank}: 160 steps" in text, str(ended)


def test_a_killed_rank_comes_back_under_srun_and_torchrun(
    slurm: Slurm, warm: dict[str, str], tmp_path: Path
) -> None:
    """Rank 0 is on the first node or the second; one of them is killed, and its node's torchrun stays."""
    script = str(LAUNCH / "torchrun.sbatch")
    variables = {**warm, "RANKS_PER_NODE": "1", "RESTARTS": "1"}
    completed(slurm.submit(tmp_path, script, RANKS, "restarting", "1", variables=variables))
    seen = reported(tmp_path)
    assert seen["rank1-0"]["said"] == [100.0] * 5
    assert seen["rank1-1"]["said"] == [200.0] * 5
    assert seen["served-1"]["requests"] == 5


@pytest.mark.parametrize("nodes", [2, 4])
def test_srun_ranks(slurm: Slurm, warm: dict[str, str], tmp_path: Path, nodes: int) -> None:
    pytest.importorskip("gymnasium")
    size = (f"--nodes={nodes}", f"--ntasks-per-node={4 // nodes}")
    script = str(LAUNCH / "ranks.sbatch")
    job = slurm.submit(tmp_path, *size, script, EXAMPLE, "--steps=20", variables=warm)
    assert_example(completed(job), {rank: f"meshinfer_{job.id}_{rank}.out" for rank in range(4)})


def test_a_server_node_and_env_nodes(slurm: Slurm, warm: dict[str, str], tmp_path: Path) -> None:
    """The server's node comes last in SLURM's list of the step's nodes."""
    pytest.importorskip("gymnasium")
    where = ("--nodelist=n3", ":", "--nodelist=n0")
    script = str(LAUNCH / "server_and_envs.sbatch")
    job = slurm.submit(tmp_path, *where, script, EXAMPLE, "--steps=20", variables=warm)
    logs = {rank: f"meshinfer_{job.id}_{rank}.out" for rank in range(3)}
    assert_example(completed(job), logs, ranks=3)


# --- How jobs end ---------------------------------------------------------------------------------


def test_scancel_ends_every_process(slurm: Slurm, tmp_path: Path) -> None:
    script = str(LAUNCH / "ranks.sbatch")
    job = slurm.submit(tmp_path, *TWO_RANKS, script, RANKS, "ending", variables=cold_python())
    assert wait_until(lambda: len(reported(tmp_path)) == 2, SECONDS), job.end(1)
    ranks = job.processes()
    assert sum(RANKS in rank.cmdline() for rank in ranks) >= 2
    job.cancel()
    ended = job.end()
    assert (ended.state, ended.signal) == ("CANCELLED", 15), str(ended)
    assert not [word for word in RAW if word in ended.text], str(ended)
    assert f"JOB {job.id} ON n0 CANCELLED" in ended.text, str(ended)
    assert wait_until(lambda: not any(map(psutil.Process.is_running, ranks)), SECONDS)
    assert wait_until(lambda: not job.processes(), SECONDS)


@pytest.mark.parametrize(
    ("victim", "how", "told"),
    [
        (1, "3", "n1: task 1: Exited with exit code 3"),
        (0, "killed", "n0: task 0: Killed"),
    ],
)
def test_a_rank_that_fails_ends_the_job(
    slurm: Slurm, warm: dict[str, str], tmp_path: Path, victim: int, how: str, told: str
) -> None:
    script = str(LAUNCH / "ranks.sbatch")
    command = (script, RANKS, "ending", str(victim), how)
    job = slurm.submit(tmp_path, *TWO_RANKS, *command, variables=warm)
    ended = job.end()
    assert ended.state == "FAILED", str(ended)
    assert ended.code != 0
    assert told in ended.logs[f"meshinfer_{job.id}.out"], str(ended)
    assert not [word for word in RAW if word in ended.text], str(ended)
    assert wait_until(lambda: not job.processes(), SECONDS)


# --- Who finds whom -------------------------------------------------------------------------------


def test_two_jobs_on_the_same_nodes_never_meet(
    slurm: Slurm, warm: dict[str, str], tmp_path: Path
) -> None:
    script = str(LAUNCH / "ranks.sbatch")
    where = ("--nodelist=n0,n1", *TWO_RANKS, script)
    jobs = [
        slurm.submit(
            tmp_path, *where, RANKS, "served", constant, f"-{constant}", "2", variables=warm
        )
        for constant in ("1", "2")
    ]
    for job in jobs:
        completed(job)
    seen = reported(tmp_path)
    for constant in (1, 2):
        assert seen[f"rank1-{constant}"]["said"] == [float(constant)] * 20
        assert seen[f"server-{constant}"]["requests"] == 25
        assert seen[f"up-{constant}"]["host"] == "n0"


def test_two_steps_at_once_within_a_larger_job(
    slurm: Slurm, warm: dict[str, str], tmp_path: Path
) -> None:
    """Steps of three and two tasks on two of four nodes, both with rank 0 on the same node."""
    script = tmp_path / "steps.sbatch"
    step = "srun --overlap --nodelist=n2,n3 --nodes=2 --output=%x_%j_%s_%t.out"
    script.write_text(
        f"""#!/bin/bash
        {step} --ntasks=3 python "$@" 1 -1 2 & first=$!
        {step} --ntasks=2 python "$@" 2 -2 2 & second=$!
        wait $first && wait $second
        """.replace("        ", "")
    )
    size = ("--nodes=4", "--ntasks-per-node=2", "--output=%x_%j.out")
    completed(slurm.submit(tmp_path, *size, str(script), RANKS, "served", variables=warm))
    seen = reported(tmp_path)
    assert {label for label in seen if label.startswith("rank")} == {
        "rank1-1",
        "rank2-1",
        "rank1-2",
    }
    assert all(seen[rank]["said"] == [1.0] * 20 for rank in ("rank1-1", "rank2-1"))
    assert seen["rank1-2"]["said"] == [2.0] * 20
    assert seen["up-1"]["host"] == seen["up-2"]["host"] == "n2"
    assert "rank 0 of 3 is 'server'" in seen["up-1"]["text"]
    assert "node 1 of 2" in seen["rank2-1"]["text"]
    assert "rank 1 of 2 is 'env'; server[0], env[1]; node 1 of 2" in seen["rank1-2"]["text"]


@pytest.mark.parametrize("order", ["before", "after"])
def test_own_group_at_a_port_of_its_own(
    slurm: Slurm, warm: dict[str, str], tmp_path: Path, order: str
) -> None:
    script = str(LAUNCH / "ranks.sbatch")
    where = ("--nodelist=n0,n1", *TWO_RANKS, script)
    completed(slurm.submit(tmp_path, *where, RANKS, "own_group", order, "29500", variables=warm))
    seen = reported(tmp_path)
    assert seen["rank0"]["launcher"] == seen["rank1"]["launcher"] == "slurm"
    assert seen["rank0"]["sum"] == seen["rank1"]["sum"] == 1.0
    assert seen["rank1"]["said"] == seen["rank1"]["again"] == [100.0] * 5


def test_the_doctor_says_that_a_job_would_work(
    slurm: Slurm, warm: dict[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "doctor.sh"
    command = "srun --output=doctor_%t.json --error=doctor_%t.err python -m meshinfer doctor --json --timeout 30"
    script.write_text(f"#!/bin/sh\n{command}\n")
    completed(slurm.submit(tmp_path, *TWO_RANKS, str(script), variables=warm))
    reports = [json.loads((tmp_path / f"doctor_{rank}.json").read_text()) for rank in (0, 1)]
    for rank, report in enumerate(reports):
        assert (report["rank"], report["world_size"]) == (rank, 2)
        assert (report["launcher"], report["exit_code"]) == ("slurm", 0), report
