"""``python -m meshinfer doctor`` as it is run: alone, under torchrun, and in jobs that something is wrong with."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby, zip_longest
from pathlib import Path
from typing import Any

from mesh_jobs import ROOT, Ended, Job, run
from support import deaf_port, wait_until
from warm import WarmProcess

from meshinfer.rendezvous import PrivateStore

DOCTOR = [sys.executable, "-m", "meshinfer", "doctor"]
RANK = str(ROOT / "tests" / "doctor_rank.py")
SECRET = "swordfish-8172"
AGENT = {
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
KEYS = {
    *("format", "status", "exit_code", "rank", "world_size", "local_rank", "node", "launcher"),
    *("host", "pid", "seconds", "findings"),
}
CHECKS = (
    *("versions", "packages", "launcher", "variables", "ranks", "open files", "processes"),
    *("memory", "shared memory", "processors", "gpus", "slurm", "host name", "job store"),
    *("interface", "pair"),
)


def handicapped(handicap: str, *arguments: str) -> list[str]:
    return [sys.executable, RANK, handicap, *arguments]


def reports(ended: Ended) -> dict[int | None, dict[str, Any]]:
    """By rank; each is one line."""
    found = [json.loads(line) for line in ended.stdout.splitlines()]
    assert all(set(report) == KEYS for report in found), str(ended)
    return {report["rank"]: report for report in found}


def findings(report: dict[str, Any], check: str) -> list[dict[str, Any]]:
    return [finding for finding in report["findings"] if finding["check"] == check]


def only(ended: Ended) -> dict[str, Any]:
    (report,) = reports(ended).values()
    assert report["exit_code"] == ended.code
    assert "Traceback" not in ended.stderr, str(ended)
    return report


@contextmanager
def ranks(
    folder: Path, *commands: list[str], world: int, changes: Sequence[dict[str, str]] = ()
) -> Iterator[tuple[PrivateStore, list[Job]]]:
    """Ranks as torchrun starts them, whose agent's store is ours; ``changes`` of each one's variables."""
    store = PrivateStore("127.0.0.1")
    with ExitStack() as stack:
        stack.callback(store.close)
        jobs = []
        for rank, (command, changed) in enumerate(zip_longest(commands, changes, fillvalue={})):
            variables = {**AGENT, "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"}
            variables |= {"WORLD_SIZE": f"{world}", "LOCAL_WORLD_SIZE": f"{world}"}
            variables |= {"MASTER_PORT": f"{store.port}", **changed}
            jobs.append(Job(list(command), folder / f"rank{rank}", variables, cold=False))
            stack.callback(jobs[-1].kill)
        yield store, jobs


# --- Where all is well --------------------------------------------------------------------------


def test_alone_it_tries_a_pair_within_its_process(tmp_path: Path) -> None:
    ended = run(tmp_path, DOCTOR, MESHINFER_SECRET=SECRET)
    assert ended.code == 0, str(ended)
    lines = ended.stdout.splitlines()
    assert [check for check in CHECKS if not any(f"  {check}  " in line for line in lines)] == []
    (pair,) = (line for line in lines if "  pair  " in line)
    assert pair.startswith("OK")
    assert "paired in" in pair
    assert "round trip" in pair
    assert "MESHINFER_SECRET=(set, not shown)" in ended.stdout
    assert SECRET not in ended.stdout + ended.stderr
    assert ended.stderr == ""


def test_under_torchrun_every_rank_reports_and_rank_0_sums_up(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*launcher, "--nproc-per-node=3", "-m", "meshinfer", "doctor", "--json"]
    ended = run(tmp_path, command, MESHINFER_SECRET=SECRET)
    assert ended.code == 0, str(ended)
    found = reports(ended)
    assert sorted(found) == [0, 1, 2]
    for rank, report in found.items():
        assert report["launcher"] == "torchrun"
        assert report["world_size"] == 3
        assert report["status"] in ("ok", "warn")
        checks = {finding["check"] for finding in report["findings"]}
        assert checks == {*CHECKS, *(["job"] if rank == 0 else [])}
        (store,) = findings(report, "job store")
        assert store["values"]["connect_seconds"] > 0
    for rank in (1, 2):
        (pair,) = findings(found[rank], "pair")
        assert pair["status"] == "ok"
        assert {"connect_seconds", "pair_seconds", "round_trip_seconds"} <= set(pair["values"])
    assert set(findings(found[0], "job")[0]["values"]["ranks"]) == {"1", "2"}
    assert SECRET not in ended.stdout + ended.stderr


def read_all(file: int) -> bytes:
    return b"".join(iter(lambda: os.read(file, 1 << 16), b""))


def is_served(store: PrivateStore) -> bool:
    keys = store.keys()
    return any(key.endswith("doctor/serving") for key in keys)


def test_reports_of_ranks_that_share_a_pipe_stay_in_one_piece(tmp_path: Path) -> None:
    (reader, writer), (ready, starting) = os.pipe(), os.pipe()
    with ExitStack() as stack:
        for file in (reader, ready):
            stack.callback(os.close, file)
        for letter in "abc":
            process = WarmProcess(
                [RANK, f"writing={letter}"],
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                cwd=tmp_path,
                files=[reader, writer, starting],
            )
            stack.callback(process.wait, 60.0)
        os.close(writer)
        os.close(starting)
        assert read_all(ready) == b"!!!"  # nobody reads what they write before all of them write
        text = read_all(reader).decode()
    assert sorted(letter for letter, _ in groupby(text)) == ["a", "b", "c"]


# --- Where something is wrong -------------------------------------------------------------------


def test_silent_ranks_are_named_and_the_others_finish(tmp_path: Path) -> None:
    timeout = "--json", "--timeout", "9"
    commands = [
        [*DOCTOR, *timeout],
        [*DOCTOR, *timeout],
        handicapped("stopped", *timeout),
        handicapped("stopped-later", *timeout),
    ]
    with ranks(tmp_path, *commands, world=5) as (_, jobs):  # rank 4 is never started
        server, client = (job.end() for job in jobs[:2])
    assert only(client)["exit_code"] == 0
    report = only(server)
    assert report["exit_code"] == 1
    pairs, *others = findings(report, "job")
    assert {*pairs["values"]["ranks"]} == {"1"}
    said = {f["values"].get("rank"): f["found"] for f in others}
    assert {*said} == {2, 3, 4, None}
    assert said[2].endswith("it never came")
    assert said[4].endswith("it never came")
    assert said[3].endswith("it paired, then fell silent")
    assert others[-1]["values"]["missing"] == [2, 3, 4]


def test_a_rank_with_another_secret_is_named_by_rank_0(tmp_path: Path) -> None:
    secrets = [{"MESHINFER_SECRET": word} for word in ("one", "two")]
    with ranks(tmp_path, DOCTOR, DOCTOR, world=2, changes=secrets) as (_, jobs):
        server, client = (job.end() for job in jobs)
    assert server.code == client.code == 1
    assert "FAIL  pair" in client.stdout
    assert "secret" in client.stdout
    assert "rank 1 on" in server.stdout
    assert "failed: pair" in server.stdout


def test_without_rank_0_the_others_say_so(tmp_path: Path) -> None:
    arguments = "--json", "--timeout", "4"
    with ranks(tmp_path, handicapped("stopped"), [*DOCTOR, *arguments], world=2) as (_, jobs):
        report = only(jobs[1].end())
    (pair,) = findings(report, "pair")
    assert pair["status"] == "fail"
    assert pair["found"].startswith("rank 0 has opened no server")


def test_a_signal_ends_the_check_but_not_the_report(tmp_path: Path) -> None:
    with ranks(tmp_path, [*DOCTOR, "--json"], world=2) as (store, (job,)):
        assert wait_until(lambda: is_served(store), 60.0)
        os.kill(job.process.pid, signal.SIGTERM)
        ended = job.end()
    report = only(ended)
    assert report["exit_code"] == 1
    ended_by, missing, _ = findings(report, "job")
    assert ended_by["found"] == "ended by SIGTERM"
    assert missing["values"] == {"rank": 1}


def test_a_store_that_nobody_hosts_is_a_failure_with_a_remedy(tmp_path: Path) -> None:
    command = [*DOCTOR, "--json", "--timeout", "2"]
    with deaf_port() as port:
        elsewhere = {"MASTER_PORT": f"{port}"}
        with ranks(tmp_path, command, world=2, changes=[elsewhere]) as (_, (job,)):
            report = only(job.end())
    (store,) = findings(report, "job store")
    assert store["status"] == "fail"
    assert "Connection refused" in store["found"]
    assert "firewall" in store["remedy"]
    assert findings(report, "pair")[0]["found"] == "not tried, see job store"


def test_too_few_descriptors_are_a_failure_with_the_number(tmp_path: Path) -> None:
    report = only(run(tmp_path, handicapped("files=40", "--json")))
    (files,) = findings(report, "open files")
    assert files["status"] == "fail"
    assert files["values"]["soft"] == 40 < files["values"]["needed"]
    assert f"ulimit -n {files['values']['ample']}" in files["remedy"]
    assert findings(report, "pair")[0]["found"] == "not tried, see open files"


def test_variables_that_are_half_set_are_a_failure_with_a_remedy(tmp_path: Path) -> None:
    report = only(run(tmp_path, [*DOCTOR, "--json"], RANK="1"))
    (launcher,) = findings(report, "launcher")
    assert launcher["status"] == "fail"
    assert "WORLD_SIZE is missing" in launcher["found"]
    assert "RANK=1" in launcher["found"]
    assert "torchrun" in launcher["remedy"]
    assert report["rank"] is None
    assert findings(report, "pair")[0]["status"] == "ok"
