"""mpirun, variables set by hand, monarch; and which of several launchers is meant."""

from __future__ import annotations

import os

import pytest

from meshinfer.errors import MeshError
from meshinfer.mesh.launcher import LaunchEnvironment, recognise

Variables = dict[str, str]

# Rank 3 of two nodes with two processes each.
HAND: Variables = {
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2",
    "MASTER_ADDR": "node-a",
    "MASTER_PORT": "29500",
}
TORCHRUN: Variables = {
    **HAND,
    "ROLE_NAME": "default",
    "TORCHELASTIC_RUN_ID": "job",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}
OPEN_MPI: Variables = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
    "PMIX_NAMESPACE": "896794625",
    "OMPI_MCA_orte_precondition_transports": "78461e6b86e527ec-5cbf197fe8489ecf",
}
HYDRA: Variables = {
    "PMI_RANK": "3",
    "PMI_SIZE": "4",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "2",
}
SRUN: Variables = {
    "SLURM_JOB_ID": "1500",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n0,n1",
    "SLURM_GTIDS": "2,3",
}
MONARCH: Variables = {"HYPERACTOR_MESH_BOOTSTRAP_MODE": "x"}
SPMD: Variables = {**MONARCH, **HAND, "ROLE_NAME": "rank"}


@pytest.mark.parametrize("variables", [HAND, OPEN_MPI, HYDRA, SRUN], ids=["env", "o", "h", "slurm"])
def test_the_place_of_a_rank(variables: Variables) -> None:
    found = LaunchEnvironment.from_environ(variables)
    assert (found.rank, found.world_size, found.local_rank, found.local_world_size) == (3, 4, 1, 2)
    assert (found.node_rank, found.num_nodes, found.spans_hosts) == (1, 2, True)
    assert [found.node_of(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert found.store_address is None
    assert found.identity
    assert found.restart_count == 0


def test_where_rank_zero_is() -> None:
    assert LaunchEnvironment.from_environ(HAND).master_host == "node-a"
    for variables in (OPEN_MPI, HYDRA):
        assert LaunchEnvironment.from_environ(variables).master_host is None
        told = {**variables, "MASTER_ADDR": "node-a"}
        assert LaunchEnvironment.from_environ(told).master_host == "node-a"
    one_node = {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}
    assert LaunchEnvironment.from_environ(one_node).master_host == "localhost"


def test_ranks_by_hand_are_on_one_node_unless_they_say_more() -> None:
    few = {name: HAND[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    found = LaunchEnvironment.from_environ(few)
    assert (found.local_rank, found.local_world_size, found.num_nodes) == (3, 4, 1)
    assert (found.launcher, found.job_id, found.master_host) == ("env", "node-a:29500", "node-a")
    sized = LaunchEnvironment.from_environ({**few, "LOCAL_WORLD_SIZE": "2"})
    assert (sized.local_rank, sized.node_rank, sized.num_nodes) == (1, 1, 2)


@pytest.mark.parametrize("more", [{"LOCAL_RANK": "1"}, {"GROUP_WORLD_SIZE": "2"}])
def test_ranks_by_hand_on_several_nodes_say_how_many(more: Variables) -> None:
    with pytest.raises(MeshError, match=r"LOCAL_WORLD_SIZE is missing.*ranks of this node"):
        LaunchEnvironment.from_environ({"RANK": "3", "WORLD_SIZE": "4", **more})


@pytest.mark.parametrize(
    ("variables", "missing"),
    [
        ({}, "RANK"),
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2"}, "RANK"),
        ({"RANK": "", "WORLD_SIZE": "2"}, "RANK"),
    ],
)
def test_what_is_missing_is_named(variables: Variables, missing: str) -> None:
    with pytest.raises(MeshError, match=rf"\b{missing} is missing; start with torchrun, srun or"):
        LaunchEnvironment.from_environ(variables)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({**HAND, "RANK": "4"}, "^RANK=4 is out of range: expected less than WORLD_SIZE=4"),
        ({**HYDRA, "PMI_RANK": "4"}, "^PMI_RANK=4 is out of range: expected less than PMI_SIZE=4"),
        ({**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "x"}, "^OMPI_COMM_WORLD_SIZE='x' is not an integer"),
        ({**HYDRA, "MPI_LOCALNRANKS": "0"}, "^MPI_LOCALNRANKS=0 is out of range"),
    ],
)
def test_what_does_not_fit_is_named(variables: Variables, message: str) -> None:
    with pytest.raises(MeshError, match=message):
        LaunchEnvironment.from_environ(variables)


def test_ranks_that_mpirun_deals_out_in_turn_have_no_known_node() -> None:
    by_node = {**OPEN_MPI, "OMPI_COMM_WORLD_RANK": "2"}  # the second rank of the first node
    with pytest.raises(MeshError, match="node by node"):
        LaunchEnvironment.from_environ(by_node).node_of(0)


def test_jobs_have_identities_of_their_own() -> None:
    for variables, changes in (
        (HAND, {"MASTER_PORT": "29501", "MESHINFER_JOB_ID": "mine"}),
        (OPEN_MPI, {"PMIX_NAMESPACE": "2", "MESHINFER_JOB_ID": "mine"}),
        (HYDRA, {"SLURM_JOB_ID": "7", "MESHINFER_JOB_ID": "mine"}),
    ):
        made = [variables, *({**variables, name: value} for name, value in changes.items())]
        assert len({LaunchEnvironment.from_environ(each).identity for each in made}) == len(made)
    # however a rank spells where it looks for rank 0
    other = LaunchEnvironment.from_environ({**HAND, "MASTER_ADDR": "10.0.0.1"})
    assert other.identity == LaunchEnvironment.from_environ(HAND).identity


# --- Which launcher is meant ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "launcher"),
    [
        (TORCHRUN, "torchrun"),
        ({**SRUN, **TORCHRUN}, "torchrun"),
        ({**OPEN_MPI, **TORCHRUN}, "torchrun"),
        # srun --mpi=pmi2 sets hydra's rank as well
        ({**SRUN, "PMI_RANK": "3", "PMI_SIZE": "4"}, "slurm"),
        # mpirun starts its daemons with srun
        ({**SRUN, **OPEN_MPI, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"}, "mpi"),
        ({**SRUN, **HYDRA}, "mpi"),
        # the script repeats what srun said, for its own process group
        ({**SRUN, "RANK": "3", "WORLD_SIZE": "4", "MASTER_ADDR": "n0"}, "slurm"),
        ({**OPEN_MPI, "RANK": "3", "WORLD_SIZE": "4"}, "mpi"),
        # srun starts one process on each node, which starts the ranks
        ({**SRUN, **HAND, "RANK": "3", "WORLD_SIZE": "8"}, "env"),
        (HAND, "env"),
        # a batch script
        ({"SLURM_JOB_ID": "1500", "SLURM_PROCID": "0", **HAND}, "env"),
        # monarch's SPMD actor, in processes that inherit from who started monarch
        (SPMD, "env"),
        ({**TORCHRUN, **SPMD}, "env"),
        ({**SRUN, **SPMD}, "env"),
        ({**OPEN_MPI, **SPMD}, "env"),
        # torchrun, started by a process of a monarch mesh
        ({**MONARCH, **TORCHRUN}, "torchrun"),
        ({**SRUN, **MONARCH, **HAND}, "env"),
        # a user's word
        ({**TORCHRUN, "MESHINFER_LAUNCHER": "env"}, "env"),
        ({**SRUN, **TORCHRUN, "MESHINFER_LAUNCHER": "slurm"}, "slurm"),
    ],
)
def test_the_innermost_launcher_is_meant(variables: Variables, launcher: str) -> None:
    assert recognise(variables) == launcher
    assert LaunchEnvironment.from_environ(variables).launcher == launcher


def test_ranks_that_contradict_each_other_need_a_word() -> None:
    variables = {**SRUN, "RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "n0"}
    with pytest.raises(MeshError, match=r"RANK=0 contradicts SLURM_PROCID=3.*MESHINFER_LAUNCHER"):
        recognise(variables)
    assert recognise({**variables, "MESHINFER_LAUNCHER": "slurm"}) == "slurm"


def test_a_launcher_that_is_none() -> None:
    with pytest.raises(MeshError, match="'mpirun' is no launcher; there are 'torchrun', 'slurm'"):
        recognise({**SRUN, "MESHINFER_LAUNCHER": "mpirun"})
    with pytest.raises(MeshError, match="SLURM_JOB_ID is missing"):
        LaunchEnvironment.from_environ({"MESHINFER_LAUNCHER": "slurm"})


@pytest.mark.parametrize("outer", [SRUN, OPEN_MPI, {}])
def test_a_process_of_a_monarch_mesh_has_no_place_of_its_host(outer: Variables) -> None:
    with pytest.raises(MeshError, match=r"monarch mesh has no RANK .*setup_torch_elastic_env"):
        recognise({**outer, **MONARCH})


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.startswith(("TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_")):
            monkeypatch.delenv(name)
    for name, value in HAND.items():
        monkeypatch.setenv(name, value)
    assert LaunchEnvironment.from_environ() == LaunchEnvironment.from_environ(HAND)
