"""What srun sets, as seen on a real cluster: places, nodes of unequal size, orders of ranks, heterogeneous steps."""

from __future__ import annotations

from typing import Any

import pytest

from meshinfer.errors import MeshError
from meshinfer.mesh.groups import PerNode, split_world
from meshinfer.mesh.launcher import LaunchEnvironment
from meshinfer.mesh.slurm import deal

Placed = list[list[int]]
"""The ranks of each node."""


@pytest.fixture(autouse=True)
def no_tool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")


def counted(counts: list[int]) -> str:
    return ",".join(map(str, counts))


def step(rank: int, placed: Placed, hosts: str | None = None, **more: str | None) -> dict[str, str]:
    """The variables of ``rank``, where nodes have the ranks ``placed``."""
    node = next(node for node, ranks in enumerate(placed) if rank in ranks)
    counts = counted([len(ranks) for ranks in placed])
    size = sum(map(len, placed))
    variables: dict[str, str | None] = {
        "SLURM_JOB_ID": "1500",
        "SLURM_STEP_ID": "0",
        "SLURM_CLUSTER_NAME": "c",
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(placed[node].index(rank)),
        "SLURM_NODEID": str(node),
        "SLURM_NTASKS": str(size),
        "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NUM_NODES": str(len(placed)),
        "SLURM_STEP_TASKS_PER_NODE": counts,
        "SLURM_STEP_NODELIST": hosts or f"n[0-{len(placed) - 1}]",
        "SLURM_GTIDS": counted(placed[node]),
        # of the job, which is larger
        "SLURM_JOB_NUM_NODES": "9",
        "SLURM_JOB_NODELIST": "m[1-9]",
        "SLURM_NTASKS_PER_NODE": "7",
        **more,
    }
    return {name: value for name, value in variables.items() if value is not None}


def places(placed: Placed, **more: Any) -> list[LaunchEnvironment]:
    """What every rank reads."""
    ranks = range(sum(map(len, placed)))
    return [LaunchEnvironment.from_environ(step(rank, placed, **more)) for rank in ranks]


def check(placed: Placed, found: list[LaunchEnvironment], host: str = "n0") -> None:
    """Every rank knows its place, and that of every other."""
    for each in found:
        own = placed[each.node_rank]
        assert each.rank in own
        assert (each.local_rank, each.local_world_size) == (own.index(each.rank), len(own))
        assert [each.node_of(rank) for rank in range(each.world_size)] == [
            next(node for node, ranks in enumerate(placed) if rank in ranks)
            for rank in range(each.world_size)
        ]
        assert (each.num_nodes, each.master_host) == (len(placed), host)
    assert len({each.identity for each in found}) == 1


def test_a_place_in_a_step() -> None:
    environ = step(2, [[0, 1], [2]], "n[08-09]", SLURM_RESTART_COUNT="2")
    found = LaunchEnvironment.from_environ(environ)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (2, 3, 0, 1)
    assert (found.node_rank, found.num_nodes, found.nodes) == (1, 2, (0, 0, 1))
    assert (found.launcher, found.job_id, found.restart_count) == ("slurm", "1500.0", 2)
    assert (found.store_address, found.master_host) == (None, "n08")


def test_one_node_is_reached_by_loopback() -> None:
    found = LaunchEnvironment.from_environ(step(1, [[0, 1]], "a-node-that-does-not-resolve"))
    assert (found.master_host, found.nodes, found.spans_hosts) == ("localhost", (), False)


@pytest.mark.parametrize(
    ("placed", "more"),
    [
        ([[0, 1], [2, 3]], {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}),
        ([[0, 1], [2, 3], [4]], {"SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}),
        ([[0, 1], [2, 3], [4]], {"SLURM_DISTRIBUTION": "block"}),
        ([[0, 1, 2], [3]], {"SLURM_DISTRIBUTION": "block:cyclic"}),
        ([[0], [1, 2]], {"SLURM_GTIDS": None}),
        ([[0, 2], [1, 3]], {"SLURM_DISTRIBUTION": "cyclic"}),
        ([[0, 2], [1]], {"SLURM_DISTRIBUTION": "cyclic"}),
        ([[0, 3, 5], [1], [2, 4]], {"SLURM_DISTRIBUTION": "cyclic:block,nopack"}),
        ([[0, 1, 4], [2], [3]], {"SLURM_DISTRIBUTION": "plane", "SLURM_DIST_PLANESIZE": "2"}),
        ([[0], [1]], {"SLURM_DISTRIBUTION": "cyclic"}),
    ],
)
def test_ranks_are_found_on_nodes(placed: Placed, more: dict[str, Any]) -> None:
    check(placed, places(placed, **more))


def test_nodes_of_different_sizes_have_groups_per_node() -> None:
    env = places([[0, 1, 2], [3, 4]])[4]
    split = split_world(5, {"server": PerNode(1), "env": ...}, env=env)
    assert [group.ranks for group in split] == [(0, 3), (1, 2, 4)]


@pytest.mark.parametrize(
    ("placed", "more"),
    [
        ([[1], [0, 2]], {"SLURM_DISTRIBUTION": "arbitrary"}),
        ([[0, 2], [1, 3]], {"SLURM_DISTRIBUTION": "block"}),
        ([[0, 2], [1, 3]], {}),
        ([[0, 1], [2, 3]], {"SLURM_DISTRIBUTION": "cyclic"}),
    ],
)
def test_an_order_that_slurm_does_not_tell_needs_another_one(
    placed: Placed, more: dict[str, str]
) -> None:
    found = LaunchEnvironment.from_environ(step(2, placed, **more))
    with pytest.raises(MeshError, match=r"which node hosts rank 1: SLURM .*-m block"):
        found.node_of(1)
    assert found.master_host is None


# One srun over several components: the node list and the counts are sorted by name, ranks and nodes are not.
HETEROGENEOUS = {
    "hosts": "n[0,2-3]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1(x2)",
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "n3",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "n[0,2]",
}


def test_a_heterogeneous_step_is_numbered_by_component() -> None:
    placed = [[0], [1, 2], [3]]  # n3, n0, n2
    check(placed, places(placed, **HETEROGENEOUS), host="n3")
    older = {name.replace("HET_GROUP", "PACK_GROUP"): v for name, v in HETEROGENEOUS.items()}
    check(placed, places(placed, **older), host="n3")


def test_a_heterogeneous_step_with_ranks_dealt_in_turn() -> None:
    placed = [[0], [1, 3], [2]]
    found = places(placed, **HETEROGENEOUS, SLURM_DISTRIBUTION="cyclic")
    for each in found[1:]:
        check(placed, [each], host="n3")
    # A component of one rank is cyclic in any case, and supposes that the others are as they are by default.
    check([[0], [1, 2], [3]], found[:1], host="n3")


def test_a_step_of_one_component() -> None:
    placed = [[0, 1], [2]]
    more = {**HETEROGENEOUS, "hosts": "n[0,2]", "SLURM_STEP_TASKS_PER_NODE": "2,1"}
    check(placed, places(placed, **more))


@pytest.mark.parametrize(
    ("counts", "plane", "nodes"),
    [
        ([2, 2, 1], 99, [0, 0, 1, 1, 2]),
        ([2, 2, 1], 1, [0, 1, 2, 0, 1]),
        ([3, 1, 1], 2, [0, 0, 1, 2, 0]),
        ([1], 1, [0]),
    ],
)
def test_dealing(counts: list[int], plane: int, nodes: list[int]) -> None:
    assert deal(counts, plane) == nodes


# --- Identity ------------------------------------------------------------------------------------


def test_every_attempt_step_and_job_has_an_identity_of_its_own() -> None:
    changes: list[dict[str, str | None]] = [
        {},
        {"SLURM_JOB_ID": "2500"},
        {"SLURM_STEP_ID": "1"},
        {"SLURM_RESTART_COUNT": "1"},
        {"SLURM_CLUSTER_NAME": "d"},
        {"SLURM_JOB_UID": "1234567"},
        {"MESHINFER_JOB_ID": "mine"},
    ]
    identities = {places([[0, 1]], **change)[0].identity for change in changes}
    assert len(identities) == len(changes)


# --- What is no step, and what does not fit ------------------------------------------------------


@pytest.mark.parametrize("step_id", [None, "4294967290", "4294967291", ""])
def test_a_batch_script_is_no_launcher(step_id: str | None) -> None:
    environ = step(0, [[0, 1]], SLURM_STEP_ID=step_id)
    with pytest.raises(
        MeshError, match=r"SLURM job 1500, but not a task.*start the ranks with srun"
    ):
        LaunchEnvironment.from_environ(environ)


def test_variables_of_the_step_from_which_a_job_was_submitted() -> None:
    environ = step(0, [[0, 1], [2]], SLURM_JOB_ID="29", SLURM_NTASKS="2")
    with pytest.raises(MeshError, match=r"SLURM_NTASKS=2 contradicts.*=3.*with srun"):
        LaunchEnvironment.from_environ(environ)


@pytest.mark.parametrize(
    "name", ["SLURM_JOB_ID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_NODELIST"]
)
def test_a_missing_variable_is_named(name: str) -> None:
    with pytest.raises(MeshError, match=rf"\b{name} is missing; start with .*srun"):
        LaunchEnvironment.from_environ(step(0, [[0], [1]], **{name: None}))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"SLURM_PROCID": "x"}, "^SLURM_PROCID='x' is not an integer"),
        ({"SLURM_PROCID": "3"}, "^SLURM_PROCID=3 is out of range: .* SLURM_STEP_NUM_TASKS=3"),
        ({"SLURM_NODEID": "2"}, "^SLURM_NODEID=2 is out of range: .* SLURM_STEP_NUM_NODES=2"),
        ({"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}, r"'2\(x2\)' .* do not give .*=3 tasks"),
        ({"SLURM_STEP_TASKS_PER_NODE": "two"}, "'two'.*expected a form such as"),
        ({"SLURM_STEP_NODELIST": "n[0-2]"}, r"n\[0-2\].* do not give .* on SLURM_STEP_NUM_NODES=2"),
        ({"SLURM_STEP_NODELIST": "n[0-"}, r"cannot expand the node list 'n\[0-'.*host="),
        ({"SLURM_STEP_NODELIST": "n0,n0"}, "do not give"),
        ({"SLURM_STEP_NUM_NODES": "0"}, "SLURM_STEP_NUM_NODES=0 is out of range"),
    ],
)
def test_what_does_not_fit_is_named(more: dict[str, str], message: str) -> None:
    with pytest.raises(MeshError, match=message):
        LaunchEnvironment.from_environ(step(0, [[0, 1], [2]], **more))
