"""Splitting a world into named groups, and assigning clients to servers."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshinfer.errors import MeshError
from meshinfer.mesh.groups import PerNode, RankGroup, assign_clients, spell_ranks, split_world
from meshinfer.mesh.launcher import LaunchEnvironment


def split(
    world_size: int, groups: dict[Any, Any], *, per_node: int | None = None
) -> dict[str, tuple[int, ...]]:
    env = LaunchEnvironment.explicit(0, world_size, local_world_size=per_node)
    return {group.name: group.ranks for group in split_world(world_size, groups, env=env)}


def test_group_behaves_as_a_collection_of_ranks() -> None:
    group = RankGroup("env", (4, 1, 2))
    assert len(group) == 3
    assert list(group) == [4, 1, 2]
    assert 2 in group
    assert 0 not in group
    assert group.index(1) == 1
    assert str(group) == "env[4, 1-2]"


def test_index_of_a_rank_outside_the_group() -> None:
    with pytest.raises(MeshError, match=r"rank 0 is not in group 'env' \(ranks 1-3\)"):
        RankGroup("env", (1, 2, 3)).index(0)


def test_group_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        RankGroup("env", (1,)).name = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ({"server": 1, "env": 3}, {"server": (0,), "env": (1, 2, 3)}),
        ({"server": 1, "env": ...}, {"server": (0,), "env": (1, 2, 3)}),
        ({"env": ..., "server": 1}, {"env": (1, 2, 3), "server": (0,)}),
        ({"server": 2, "learner": 1, "env": ...}, {"server": (0, 1), "learner": (2,), "env": (3,)}),
        ({"server": [3, 1], "env": ...}, {"server": (3, 1), "env": (0, 2)}),
        ({"env": range(1, 4), "server": 1}, {"env": (1, 2, 3), "server": (0,)}),
        ({"server": 1, "env": [0, 1, 2]}, {"server": (3,), "env": (0, 1, 2)}),
        ({"server": PerNode(1), "env": ...}, {"server": (0,), "env": (1, 2, 3)}),
        ({"all": ...}, {"all": (0, 1, 2, 3)}),
    ],
)
def test_world_of_four(groups: dict[str, Any], expected: dict[str, tuple[int, ...]]) -> None:
    found = split(4, groups)
    assert found == expected
    assert list(found) == list(expected)


def test_per_node_takes_the_lowest_free_ranks_of_each_node() -> None:
    groups = {"learner": 1, "server": PerNode(2), "env": ...}
    assert split(8, groups, per_node=4) == {
        "learner": (0,),
        "server": (1, 2, 4, 5),
        "env": (3, 6, 7),
    }


def test_counts_take_what_per_node_left() -> None:
    groups = {"server": PerNode(1), "env": [1], "learner": 1, "rest": ...}
    assert split(6, groups, per_node=3) == {
        "server": (0, 3),
        "env": (1,),
        "learner": (2,),
        "rest": (4, 5),
    }


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ({"server": 1, "env": 4}, r"'env' asks for 4 .* world of 4 only 3 are left \(ranks 1-3\)"),
        ({"server": [4], "env": ...}, r"'server' lists rank 4, outside the world of 4 .*\(0-3\)"),
        ({"server": [-1], "env": ...}, "'server' lists rank -1, outside"),
        ({"a": [0, 1], "b": [1, 2], "c": ...}, "'a' and 'b' both claim rank 1 of the world of 4"),
        ({"a": [0, 2, 0], "b": ...}, "'a' lists rank 0 twice"),
        ({"a": [], "b": ...}, "'a' is empty"),
        ({"a": range(0), "b": ...}, "'a' is empty"),
        ({"a": 0, "b": ...}, "'a' asks for 0 ranks"),
        ({"a": -2, "b": ...}, "'a' asks for -2 ranks"),
        ({"a": True, "b": ...}, r"'a' is True \(bool\): expected a count"),
        ({"a": [True], "b": ...}, r"'a' lists True \(bool\)"),
        ({"a": ["0"], "b": ...}, r"'a' lists '0' \(str\)"),
        ({"a": "01", "b": ...}, r"'a' is '01' \(str\)"),
        ({"a": 1.0, "b": ...}, r"'a' is 1.0 \(float\)"),
        ({"a": {0, 1}, "b": ...}, r"'a' is .* \(set\)"),
        ({"a": None, "b": ...}, r"'a' is None \(NoneType\)"),
        ({"a": 1, "b": [3]}, r"no group takes ranks 1-2 of the world of 4: .*`\.\.\.`"),
        ({}, "no group takes ranks 0-3"),
        ({"a": ..., "b": ...}, r"'a', 'b' are all `\.\.\.`: only one"),
        ({"a": 3, "b": [3], "c": ...}, r"nothing is left for group 'c': b\[3\], a\[0-2\] take all"),
        ({"a": PerNode(5), "b": ...}, r"'a' asks for 5 ranks per node, but node 0 .* only 4 left"),
        ({"": ...}, "group name '' is not an identifier"),
        ({"env/0": ...}, "group name 'env/0' is not an identifier"),
        ({3: ...}, "group name 3 is not an identifier"),
    ],
)
def test_groups_that_do_not_fit(groups: dict[Any, Any], message: str) -> None:
    with pytest.raises(MeshError, match=message):
        split(4, groups)


def test_per_node_names_the_node_that_is_too_small() -> None:
    with pytest.raises(MeshError, match=r"node 1 of the world of 5 has only 1 left \(ranks 4\)"):
        split(5, {"server": PerNode(2), "env": ...}, per_node=4)


@pytest.mark.parametrize("count", [0, -1, True, 1.0])
def test_per_node_needs_a_positive_int(count: Any) -> None:
    with pytest.raises(MeshError, match="expected a positive int"):
        PerNode(count)


def test_world_size_that_is_not_the_launchers() -> None:
    env = LaunchEnvironment.explicit(0, 4)
    with pytest.raises(MeshError, match="world_size=5 is not that of the launcher: 4"):
        split_world(5, {"all": ...}, env=env)


@given(
    world_size=st.integers(1, 40),
    counts=st.lists(st.integers(1, 8), max_size=4),
    explicit=st.sets(st.integers(0, 39), min_size=1, max_size=6),
)
def test_every_rank_is_in_exactly_one_group_or_the_split_is_refused(
    world_size: int, counts: list[int], explicit: set[int]
) -> None:
    groups: dict[str, Any] = {f"g{i}": count for i, count in enumerate(counts)}
    groups |= {"picked": sorted(explicit), "rest": ...}
    fits = max(explicit) < world_size and sum(counts) + len(explicit) < world_size
    if not fits:
        with pytest.raises(MeshError):
            split(world_size, groups)
        return
    found = split(world_size, groups)
    assert sorted(rank for ranks in found.values() for rank in ranks) == list(range(world_size))
    assert [len(found[f"g{i}"]) for i in range(len(counts))] == counts
    assert set(found["picked"]) == explicit


@pytest.mark.parametrize(
    ("ranks", "spelled"),
    [((), "none"), ((3,), "3"), ((0, 1, 2, 7), "0-2, 7"), ((2, 1, 0), "2, 1, 0")],
)
def test_ranks_are_spelled_compactly(ranks: tuple[int, ...], spelled: str) -> None:
    assert spell_ranks(ranks) == spelled


def by_four(rank: int) -> int:
    return rank // 4


def test_clients_go_to_the_servers_of_their_node_in_turn() -> None:
    assigned = assign_clients([0, 1, 4], [2, 3, 5, 6, 7], by_four)
    assert assigned == {2: 0, 3: 1, 5: 2, 6: 2, 7: 2}


def test_clients_without_a_server_on_their_node_fill_up_the_least_loaded() -> None:
    assigned = assign_clients([0, 4], [1, 2, 3, 5, 8, 9, 10, 11], by_four)
    assert assigned == {1: 0, 2: 0, 3: 0, 5: 1, 8: 1, 9: 1, 10: 0, 11: 1}


def test_ties_go_to_the_server_named_first() -> None:
    assert assign_clients([4, 0], [8, 9], by_four) == {8: 0, 9: 1}


def test_same_node_wins_over_an_idle_server_elsewhere() -> None:
    assert assign_clients([0, 4], [1, 2, 3], by_four) == {1: 0, 2: 0, 3: 0}


def test_no_clients_need_no_server() -> None:
    assert assign_clients([], [], by_four) == {}


@pytest.mark.parametrize(
    ("servers", "clients", "message"),
    [
        ([], [1, 2, 3], "clients 1-3 have no server"),
        ([0, 0], [1], "server ranks come twice: 0;"),
        ([0], [2, 1, 2], "client ranks come twice: 2;"),
    ],
)
def test_assignments_that_cannot_work(servers: list[int], clients: list[int], message: str) -> None:
    with pytest.raises(MeshError, match=message):
        assign_clients(servers, clients, by_four)


@st.composite
def jobs(draw: st.DrawFn) -> tuple[list[int], list[int], dict[int, int]]:
    world_size = draw(st.integers(2, 40))
    ranks = draw(st.permutations(range(world_size)))
    num_servers = draw(st.integers(1, min(6, world_size - 1)))
    hosts = draw(st.lists(st.integers(0, 4), min_size=world_size, max_size=world_size))
    return ranks[:num_servers], ranks[num_servers:], dict(enumerate(hosts))


@given(job=jobs(), random=st.randoms(use_true_random=False))
def test_assignment_is_complete_local_even_and_independent_of_order(
    job: tuple[list[int], list[int], dict[int, int]], random: Any
) -> None:
    servers, clients, host = job
    assigned = assign_clients(servers, clients, host.__getitem__)
    assert list(assigned) == sorted(clients)

    shuffled = list(clients)
    random.shuffle(shuffled)
    assert assign_clients(servers, shuffled, host.__getitem__) == assigned

    hosts_with_server = {host[server] for server in servers}
    local = {c: s for c, s in assigned.items() if host[c] in hosts_with_server}
    assert all(host[client] == host[servers[position]] for client, position in local.items())

    local_loads = Counter(local.values())
    for node in hosts_with_server:
        loads = [local_loads[i] for i, server in enumerate(servers) if host[server] == node]
        assert max(loads) - min(loads) <= 1

    loads_of_all = Counter(assigned.values())
    least = min(loads_of_all[i] for i in range(len(servers)))
    for client in assigned.keys() - local.keys():
        assert loads_of_all[assigned[client]] <= least + 1
