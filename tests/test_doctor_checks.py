"""Single checks of the doctor where the whole of it is not needed: what they make of a host, and how they are run."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support import unused_port

import meshinfer
from meshinfer.doctor import launch, limits, network
from meshinfer.doctor.cgroups import ControlGroup, parse_cpus
from meshinfer.doctor.checks import CHECKS, Check, run_check
from meshinfer.doctor.command import main
from meshinfer.doctor.context import Context
from meshinfer.doctor.findings import Finding, Status, fail, info, ok
from meshinfer.doctor.report import as_text, exit_code
from meshinfer.doctor.roster import summary
from meshinfer.mesh import LaunchEnvironment

NOWHERE = ControlGroup(Path("/nowhere"), {})


def context(
    timeout: float = 10.0, nodes: int = 1, ranks: int = 2, rank: int = 0, **given: object
) -> Context:
    here = LaunchEnvironment.explicit(rank, ranks * nodes, local_world_size=ranks)
    return Context({}, timeout, here, **{"group": NOWHERE, **given})


def group(root: Path, files: dict[str, str], paths: dict[str, str]) -> ControlGroup:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return ControlGroup(root, paths)


# --- How checks are run -------------------------------------------------------------------------


def test_a_check_that_takes_too_long_is_given_up() -> None:
    release = threading.Event()
    findings, left_behind = run_check(
        Check("slow", lambda _: [info(str(release.wait()))]), context(timeout=0.2)
    )
    release.set()
    assert left_behind
    assert [(f.check, f.status) for f in findings] == [("slow", Status.FAIL)]
    assert "0.2 s" in findings[0].found


def test_a_check_that_raises_becomes_a_line() -> None:
    def broken(_: Context) -> Finding:
        raise KeyError("lost\nand found")

    (finding,), left_behind = run_check(Check("broken", broken), context())
    assert not left_behind
    assert finding.status is Status.FAIL
    assert "KeyError" in finding.found
    assert "\n" not in finding.found


def test_a_check_is_not_tried_after_one_that_it_needs() -> None:
    check = Check("second", lambda _: pytest.fail("was tried"), needs=("first",))
    failed = Finding(Status.FAIL, "", check="first")
    (finding,), _ = run_check(check, context(findings=[failed]))
    assert finding.status is Status.INFO


def test_checks_need_what_comes_before_them() -> None:
    names = [check.name for check in CHECKS]
    assert len(names) == len(set(names))
    for position, check in enumerate(CHECKS):
        assert set(check.needs) <= set(names[:position])


def test_a_line_of_the_report_is_one_line() -> None:
    lines = as_text(context(findings=[ok("a\nb"), fail("c", "d")])).splitlines()
    assert len(lines) == 5
    assert all(line.startswith("rank 0: ") for line in lines)
    assert exit_code([ok("a")]) == 0
    assert exit_code([ok("a"), fail("c", "d")]) == 1


# --- The command line ---------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", ["0", "-1", "nan", "inf", "soon"])
def test_a_senseless_timeout_is_wrong_usage(
    timeout: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main(["doctor", "--timeout", timeout])
    assert raised.value.code == 2
    assert timeout in capsys.readouterr().err


def test_usage_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "doctor" in capsys.readouterr().err
    for flag, text in (("--help", "doctor"), ("--version", meshinfer.__version__)):
        with pytest.raises(SystemExit) as raised:
            main([flag])
        assert raised.value.code == 0
        assert text in capsys.readouterr().out


# --- Names --------------------------------------------------------------------------------------


def test_a_host_name_that_is_loopback_matters_in_a_job_of_several_nodes_only() -> None:
    finding = network.host_name(context(nodes=2, hostname="localhost"))
    assert finding.status is Status.WARN
    assert "loopback" in finding.found
    assert "/etc/hosts" in finding.remedy
    assert network.host_name(context(nodes=1, hostname="localhost")).status is Status.OK


def test_a_host_name_that_does_not_resolve_is_no_traceback() -> None:
    finding = network.host_name(context(nodes=2, hostname="no such host"))
    assert finding.status is Status.WARN
    assert "does not resolve" in finding.found


def test_a_name_server_that_is_slow_for_torch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch asks for the name of the address in its IPv6 form; /etc/hosts answers only the other at once."""

    def look_up(address: tuple[str, int], flags: int) -> tuple[str, str]:
        time.sleep(0.2 if address[0] == "::ffff:127.0.0.1" else 0.0)
        return "localhost", "0"

    monkeypatch.setattr(network.socket, "getnameinfo", look_up)
    monkeypatch.setattr(network, "_SLOW_SECONDS", 0.2)
    finding = network.host_name(context(hostname="localhost"))
    assert finding.status is Status.WARN
    assert "every connection of torch" in finding.remedy


def test_a_store_at_loopback_fails_in_a_job_of_several_nodes() -> None:
    two = LaunchEnvironment.explicit(1, 2, local_world_size=1)
    here = replace(two, launcher="torchrun", store_address=("localhost", unused_port()))
    finding = network.job_store(Context({}, 1.0, here))
    assert finding.status is Status.FAIL
    assert "loopback" in finding.found
    assert "MASTER_ADDR" in finding.remedy


def test_secrets_are_not_shown() -> None:
    environ = {"MESHINFER_SECRET": "hush", "MESHINFER_NOTE": "a b\n", "MASTER_ADDR": "n0"}
    finding = launch.variables(Context(environ))
    assert "hush" not in str(finding)
    assert (
        finding.found == r"MASTER_ADDR=n0 MESHINFER_NOTE='a b\n' MESHINFER_SECRET=(set, not shown)"
    )


def test_a_batch_script_is_told_from_a_step() -> None:
    script = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}
    finding = launch.launcher(Context.here(10.0, script))
    assert finding.status is Status.WARN
    assert "srun" in finding.remedy


# --- Limits -------------------------------------------------------------------------------------


def test_processors_are_counted_within_quota_and_for_all_ranks(tmp_path: Path) -> None:
    files = {"a/b/cpu.max": "max 100000", "a/cpu.max": "50000 100000", "a/b/cpuset.cpus": "0-999"}
    limited = group(tmp_path, files, {"": "/a/b"})
    finding = limits.processors(context(ranks=1, group=limited))
    assert finding.status is Status.WARN
    assert finding.values["usable"] == 0.5
    assert finding.values["threads"] == torch.get_num_threads()


def test_a_rank_that_is_bound_to_processors_shares_them_with_nobody(tmp_path: Path) -> None:
    roomy = group(tmp_path, {"cpuset.cpus.effective": "0-999"}, {"": "/"})
    finding = limits.processors(context(ranks=1000, group=roomy))
    assert finding.status is Status.OK
    assert finding.values["bound"]
    assert limits.processors(context(ranks=1000)).status is Status.WARN


@pytest.mark.parametrize(
    ("files", "paths"),
    [
        ({"job/pids.max": "100", "job/pids.current": "95"}, {"": "/job/step"}),
        ({"pids/x/pids.max": "100", "pids/x/pids.current": "95"}, {"pids": "/x", "": "/"}),
        ({"pids.max": "100", "pids.current": "95"}, {"": "/not/mounted/here"}),
    ],
    ids=["version 2", "version 1", "container"],
)
def test_too_few_processes_in_the_control_group(
    tmp_path: Path, files: dict[str, str], paths: dict[str, str]
) -> None:
    finding = limits.processes(context(ranks=16, group=group(tmp_path, files, paths)))
    assert finding.status is Status.FAIL
    assert finding.values["room"] == 5


def test_little_memory_in_the_control_group(tmp_path: Path) -> None:
    files = {"memory.max": str(1 << 30), "memory.current": str((1 << 30) - 4096)}
    finding = limits.memory(context(group=group(tmp_path, files, {"": "/"})))
    assert finding.status is Status.WARN
    assert finding.values["control_group_room"] == 4096


def test_open_files_are_compared_with_the_size_of_the_world() -> None:
    assert limits.open_files(context(ranks=2)).status is Status.OK
    finding = limits.open_files(context(ranks=10_000_000))
    assert finding.status is Status.FAIL
    assert str(finding.values["needed"]) in finding.found
    finding = limits.open_files(context(ranks=10_000_000, rank=1))
    assert finding.status is Status.WARN  # it is a client here


def test_lists_of_processors() -> None:
    assert parse_cpus("0-2,7\n") == {0, 1, 2, 7}
    assert parse_cpus("") == frozenset()


# --- All ranks ----------------------------------------------------------------------------------


def test_rank_0_names_some_of_many_and_counts_the_rest() -> None:
    job = context(ranks=100)
    job.roster.paired.add(2)
    job.roster.verdicts[1] = {
        "host": "n0",
        "status": "ok",
        "failed": [],
        "torch": "1.0",
        "figures": dict.fromkeys(("connect_seconds", "pair_seconds", "round_trip_seconds"), 0.01),
    }
    pair, *others = summary(job)
    assert pair.status is Status.OK
    assert set(pair.values["ranks"]) == {"1"}
    named = [finding for finding in others if "has not reported" in finding.found]
    assert len(named) == 16
    assert "paired" in named[0].found
    assert "ranks 2-99" in others[16].found
    assert others[17].status is Status.WARN  # its torch
    assert others[18].values["missing"] == list(range(2, 100))
