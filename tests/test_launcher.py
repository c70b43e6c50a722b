"""The launcher's environment: what torchrun sets, what can be wrong with it, explicit values."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mesh_jobs
import pytest

from meshinfer.errors import MeshError
from meshinfer.mesh.launcher import LaunchEnvironment

# Rank 5 of two nodes with four processes each.
TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job-7",
    "TORCHELASTIC_RESTART_COUNT": "3",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}


def torchrun(**changes: str | None) -> dict[str, str]:
    changed: Mapping[str, str | None] = {**TORCHRUN, **changes}
    return {name: value for name, value in changed.items() if value is not None}


def test_torchrun_variables_are_read() -> None:
    assert LaunchEnvironment.from_environ(TORCHRUN) == LaunchEnvironment(
        rank=5,
        world_size=8,
        local_rank=1,
        local_world_size=4,
        node_rank=1,
        num_nodes=2,
        launcher="torchrun",
        job_id="job-7",
        restart_count=3,
        store_address=("node-a", 29500),
    )


def test_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    assert LaunchEnvironment.from_environ() == LaunchEnvironment.from_environ(TORCHRUN)


def test_environment_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        LaunchEnvironment.explicit(0, 1).rank = 1  # type: ignore[misc]


@pytest.mark.parametrize("name", sorted(TORCHRUN.keys() - {"GROUP_RANK", "GROUP_WORLD_SIZE"}))
@pytest.mark.parametrize("value", [None, ""])
def test_missing_variable_is_named_with_the_remedy(name: str, value: str | None) -> None:
    with pytest.raises(MeshError, match=rf"\b{name} is missing") as caught:
        LaunchEnvironment.from_environ(torchrun(**{name: value}))
    assert "start with torchrun, srun or mpirun, or pass rank= and world_size=" in str(caught.value)


def test_no_launcher_at_all_names_rank() -> None:
    with pytest.raises(MeshError, match=r"\bRANK is missing; start with torchrun"):
        LaunchEnvironment.from_environ({})


def test_rank_without_world_size_names_world_size() -> None:
    with pytest.raises(MeshError, match="WORLD_SIZE is missing"):
        LaunchEnvironment.from_environ({"RANK": "0"})


@pytest.mark.parametrize(
    "name",
    [
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "MASTER_PORT",
        "TORCHELASTIC_RESTART_COUNT",
    ],
)
@pytest.mark.parametrize("value", ["two", "1.5", "0x2"])
def test_value_that_is_no_integer_is_named(name: str, value: str) -> None:
    with pytest.raises(MeshError, match=rf"^{name}='{value}' is not an integer"):
        LaunchEnvironment.from_environ(torchrun(**{name: value}))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("RANK", "8", "less than WORLD_SIZE=8"),
        ("RANK", "-1", "at least 0"),
        ("WORLD_SIZE", "0", "at least 1"),
        ("LOCAL_RANK", "4", "less than LOCAL_WORLD_SIZE=4"),
        ("LOCAL_RANK", "-1", "at least 0"),
        ("LOCAL_WORLD_SIZE", "0", "at least 1"),
        ("LOCAL_WORLD_SIZE", "9", "at most WORLD_SIZE=8"),
        ("GROUP_RANK", "2", "less than GROUP_WORLD_SIZE=2"),
        ("GROUP_WORLD_SIZE", "0", "at least 1"),
        ("GROUP_WORLD_SIZE", "9", "at most WORLD_SIZE=8"),
        ("MASTER_PORT", "0", "at least 1"),
        ("MASTER_PORT", "65536", "at most 65535"),
        ("TORCHELASTIC_RESTART_COUNT", "-1", "at least 0"),
    ],
)
def test_value_out_of_range_is_named_with_its_bound(name: str, value: str, expected: str) -> None:
    with pytest.raises(MeshError, match=rf"^{name}={value} is out of range: expected {expected}$"):
        LaunchEnvironment.from_environ(torchrun(**{name: value}))


def test_single_node_that_does_not_hold_the_world_is_contradictory() -> None:
    environ = torchrun(GROUP_RANK="0", GROUP_WORLD_SIZE="1")
    with pytest.raises(MeshError, match=r"LOCAL_WORLD_SIZE=4 .* contradicts WORLD_SIZE=8"):
        LaunchEnvironment.from_environ(environ)


@pytest.mark.parametrize("value", ["False", "true", "1"])
def test_store_that_the_agent_does_not_host_is_not_used(value: str) -> None:
    environ = torchrun(TORCHELASTIC_USE_AGENT_STORE=value, MASTER_ADDR=None, MASTER_PORT=None)
    found = LaunchEnvironment.from_environ(environ)
    assert (found.store_address, found.master_host, found.identity) == (None, None, "")


def test_rank_zero_hosts_the_store_where_the_agent_does_not() -> None:
    found = LaunchEnvironment.from_environ(torchrun(TORCHELASTIC_USE_AGENT_STORE="False"))
    again = LaunchEnvironment.from_environ(
        torchrun(TORCHELASTIC_USE_AGENT_STORE="False", MASTER_PORT="29501")
    )
    assert found.store_address is None
    assert found.master_host == "node-a"
    assert found.identity
    assert found.identity != again.identity, "the agents choose another port at a restart"


def test_nodes_are_derived_where_the_launcher_does_not_count_them() -> None:
    found = LaunchEnvironment.from_environ(torchrun(GROUP_RANK=None, GROUP_WORLD_SIZE=None))
    assert (found.node_rank, found.num_nodes) == (1, 2)


def test_nodes_of_equal_size() -> None:
    found = LaunchEnvironment.from_environ(TORCHRUN)
    assert [found.node_of(rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert found.spans_hosts


@pytest.mark.parametrize("rank", [-1, 8, True])
def test_node_of_a_rank_outside_the_world(rank: int) -> None:
    with pytest.raises(MeshError, match=f"rank={rank}"):
        LaunchEnvironment.from_environ(TORCHRUN).node_of(rank)


@pytest.mark.parametrize(
    "changes",
    [
        {"LOCAL_WORLD_SIZE": "3", "GROUP_WORLD_SIZE": "3"},
        {"LOCAL_WORLD_SIZE": "2"},
        {"GROUP_RANK": "0"},
        {"LOCAL_RANK": "2"},
    ],
)
def test_nodes_that_differ_in_size_cannot_be_told(changes: dict[str, str]) -> None:
    found = LaunchEnvironment.from_environ(torchrun(**changes))
    with pytest.raises(MeshError, match="cannot tell which node hosts rank 0: RANK=5"):
        found.node_of(0)


def test_explicit_values_default_to_one_node() -> None:
    found = LaunchEnvironment.explicit(2, 3)
    assert found == LaunchEnvironment(2, 3, 2, 3, 0, 1, "explicit", "", 0, None)
    assert not found.spans_hosts
    assert {found.node_of(rank) for rank in range(3)} == {0}


def test_explicit_values_on_nodes_of_which_the_last_is_smaller() -> None:
    found = LaunchEnvironment.explicit(4, 5, local_world_size=2, job_id="j", restart_count=1)
    assert found == LaunchEnvironment(4, 5, 0, 2, 2, 3, "explicit", "j", 1, None)
    assert [found.node_of(rank) for rank in range(5)] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"rank": 3}, "rank=3 is out of range: expected less than world_size=3"),
        ({"rank": -1}, "rank=-1 is out of range"),
        ({"rank": True}, "rank=True is not an int"),
        ({"rank": "0"}, "rank='0' is not an int"),
        ({"world_size": 0}, "world_size=0 is out of range"),
        ({"local_world_size": 0}, "local_world_size=0 is out of range"),
        ({"local_world_size": 4}, "local_world_size=4 .* at most world_size=3"),
        ({"local_rank": 3}, "local_rank=3 .* less than local_world_size=3"),
        ({"local_rank": 1}, "local_rank=1 does not belong to rank=0"),
        ({"local_rank": 0.0}, "local_rank=0.0 is not an int"),
        ({"restart_count": -1}, "restart_count=-1 is out of range"),
    ],
)
def test_wrong_explicit_value_is_named(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(MeshError, match=f"^{named}"):
        LaunchEnvironment.explicit(**{"rank": 0, "world_size": 3, **arguments})


RANK_PROGRAM = """
import dataclasses, datetime, json, pathlib, sys
from torch.distributed import TCPStore
from meshinfer.mesh.launcher import LaunchEnvironment

env = LaunchEnvironment.from_environ()
store = TCPStore(*env.store_address, is_master=False, timeout=datetime.timedelta(seconds=30))
store.set(f"greeting/{env.rank}", str(env.rank))
heard = int(store.get(f"greeting/{1 - env.rank}"))
report = {**dataclasses.asdict(env), "heard": heard}
pathlib.Path(sys.argv[1], f"{env.rank}.json").write_text(json.dumps(report))
"""


def test_every_rank_of_a_real_torchrun_reads_its_place_and_reaches_the_store(
    tmp_path: Path,
) -> None:
    program = tmp_path / "rank_program.py"
    program.write_text(RANK_PROGRAM)
    ended = mesh_jobs.run(tmp_path / "job", mesh_jobs.torchrun(2, str(program), str(tmp_path)))
    assert ended.code == 0, str(ended)

    reports = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    host, port = reports[0]["store_address"]
    assert host
    assert port > 0
    job_id = reports[0]["job_id"]
    assert job_id
    for rank, report in enumerate(reports):
        assert report == {
            "rank": rank,
            "world_size": 2,
            "local_rank": rank,
            "local_world_size": 2,
            "node_rank": 0,
            "num_nodes": 1,
            "launcher": "torchrun",
            "job_id": job_id,
            "restart_count": 0,
            "store_address": [host, port],
            "nodes": [],
            "master_host": None,
            "identity": "",
            "heard": 1 - rank,
        }
