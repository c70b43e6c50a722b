"""Ranks that ``srun`` started: what SLURM says of the step, and which node hosts which rank.

Only what belongs to the step counts. The variables of the job describe the allocation, of which a step may use a part,
and the bare script of a batch job has those alone: it is no launcher.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from meshinfer.errors import MeshError
from meshinfer.mesh.hostlist import expand_counts, hostnames
from meshinfer.mesh.variables import JOB_VARIABLE, integer, required

__all__ = ["NAMES", "UNKNOWN", "allocation", "deal", "in_step", "read"]

NAMES: Mapping[str, str] = {
    "rank": "SLURM_PROCID",
    "world_size": "SLURM_STEP_NUM_TASKS",
    "local_rank": "SLURM_LOCALID",
    "local_world_size": "SLURM_STEP_TASKS_PER_NODE",
    "node_rank": "SLURM_NODEID",
    "num_nodes": "SLURM_STEP_NUM_NODES",
    "job_id": "SLURM_JOB_ID",
    "restart_count": "SLURM_RESTART_COUNT",
}

UNKNOWN = -1
"""The node of a rank of which SLURM does not say where it runs."""

_STEP = "SLURM_STEP_ID"
_HOSTS = "SLURM_STEP_NODELIST"
_FIRST_SPECIAL_STEP = 0xFFFFFFF0  # the batch script, an interactive shell, the external step
_HET_NODES = ("SLURM_JOB_NODELIST_HET_GROUP_", "SLURM_JOB_NODELIST_PACK_GROUP_")


def in_step(environ: Mapping[str, str]) -> bool:
    """Whether ``srun`` started this process, or one that it comes from, as a task of a step."""
    step = environ.get(_STEP, "")
    return NAMES["rank"] in environ and step.isdecimal() and int(step) < _FIRST_SPECIAL_STEP


def allocation(environ: Mapping[str, str]) -> str | None:
    """The SLURM job that this process is in, as a task or not."""
    return environ.get(NAMES["job_id"]) or None


def read(environ: Mapping[str, str]) -> dict[str, Any]:
    """The fields of the launch environment.

    Raises:
        MeshError: a variable is missing, senseless, or belongs to another step than the rest.
    """
    _check_leaked(environ)
    job_id = f"{required(environ, NAMES['job_id'])}.{required(environ, _STEP)}"
    place = {field: integer(environ, NAMES[field]) for field in ("rank", "local_rank", "node_rank")}
    groups = _groups(environ, _tasks_by_host(environ))
    tasks = [(host, count) for group in groups for host, count in group.items()]
    place["world_size"] = sum(count for _, count in tasks)
    place["num_nodes"] = len(tasks)
    # out of range is told with the other fields
    place["local_world_size"] = tasks[min(place["node_rank"], len(tasks) - 1)][1]
    place["restart_count"] = integer(environ, NAMES["restart_count"], default=0)
    nodes = _nodes(environ, groups, place) if len(tasks) > 1 else ()
    return {
        **place,
        "job_id": job_id,
        "nodes": nodes,
        "master_host": tasks[0][0] if not nodes or nodes[0] == 0 else None,
        "identity": _identity(environ, job_id, place["restart_count"]),
    }


def deal(counts: Sequence[int], plane: int) -> list[int]:
    """The node of each rank when nodes take ``plane`` ranks each in turn until they have their ``counts``."""
    left, nodes = list(counts), []
    while any(left):
        for node, room in enumerate(left):
            taken = min(plane, room)
            nodes += [node] * taken
            left[node] -= taken
    return nodes


def _check_leaked(environ: Mapping[str, str]) -> None:
    """A job that was submitted from inside a step inherits the variables of that step."""
    tasks, of_step = environ.get("SLURM_NTASKS"), environ.get(NAMES["world_size"])
    if tasks is not None and of_step is not None and tasks != of_step:
        raise MeshError(
            f"SLURM_NTASKS={tasks} contradicts {NAMES['world_size']}={of_step}: the step's variables were inherited "
            "from another step, from which this job was submitted; start the ranks with srun"
        )


def _tasks_by_host(environ: Mapping[str, str]) -> dict[str, int]:
    """The tasks of each node by name, in the order of the step's node list."""
    world = integer(environ, NAMES["world_size"], at_least=1)
    nodes = integer(environ, NAMES["num_nodes"], at_least=1)
    if nodes == 1:
        return {"localhost": world}
    per_node = required(environ, NAMES["local_world_size"])
    counts, hosts = expand_counts(per_node), hostnames(required(environ, _HOSTS))
    if sum(counts) != world or not len(counts) == len(set(hosts)) == nodes or 0 in counts:
        raise MeshError(
            f"{NAMES['local_world_size']}={per_node!r} and {_HOSTS}={environ[_HOSTS]!r} do not give "
            f"{NAMES['world_size']}={world} tasks on {NAMES['num_nodes']}={nodes} nodes"
        )
    return dict(zip(hosts, counts, strict=True))


def _groups(environ: Mapping[str, str], counts: dict[str, int]) -> list[dict[str, int]]:
    """The tasks of each node by name, for each group of a heterogeneous step, as SLURM numbers the nodes.

    The node list of a step over several groups is sorted by name, while nodes and ranks are numbered group by group.
    """
    left, groups = dict(counts), []
    for listed in _het_node_lists(environ) if len(counts) > 1 else ():
        group = {name: left.pop(name) for name in hostnames(listed) if name in left}
        groups += [group] if group else []
    return [*groups, left] if left else groups


def _het_node_lists(environ: Mapping[str, str]) -> Iterator[str]:
    for number in range(integer(environ, "SLURM_HET_SIZE", default=0)):
        listed = [
            environ[name + str(number)] for name in _HET_NODES if name + str(number) in environ
        ]
        yield from listed[:1]


def _nodes(
    environ: Mapping[str, str], groups: list[dict[str, int]], place: Mapping[str, int]
) -> tuple[int, ...]:
    """The node of each rank, :data:`UNKNOWN` where SLURM does not tell, checked against this process's own place."""
    plane = _plane(environ, groups, place["node_rank"])
    nodes: list[int] = []
    first = 0
    for group in groups if plane else ():
        nodes += [first + node for node in deal([*group.values()], plane)]
        first += len(group)
    return tuple(nodes) if _fits(environ, nodes, place) else (UNKNOWN,) * place["world_size"]


def _plane(environ: Mapping[str, str], groups: list[dict[str, int]], node: int) -> int:
    """How many ranks a node takes at a time; 0 where SLURM does not say.

    Each component of a heterogeneous step speaks for itself, and one with a node for each of its tasks is cyclic by
    default, so that one says nothing of the others: they are supposed to have their default. Rank 0 and the others
    compare what they suppose when they meet.
    """
    block = sum(sum(group.values()) for group in groups)
    said = environ.get("SLURM_DISTRIBUTION", "block").split(":")[0].split(",")[0].lower()
    if said == "plane":
        return integer(environ, "SLURM_DIST_PLANESIZE", at_least=1)
    if said == "cyclic":
        own = _group_of(groups, node)
        return 1 if deal(own, 1) != deal(own, block) else block
    return block if said in ("block", "*", "") else 0


def _group_of(groups: list[dict[str, int]], node: int) -> list[int]:
    for group in groups:
        if node < len(group):
            return list(group.values())
        node -= len(group)
    return []


def _fits(environ: Mapping[str, str], nodes: Sequence[int], place: Mapping[str, int]) -> bool:
    own = [rank for rank, node in enumerate(nodes) if node == place["node_rank"]]
    listed = environ.get("SLURM_GTIDS")
    if listed is not None and listed.split(",") != [str(rank) for rank in own]:
        return False
    return place["local_rank"] < len(own) and own[place["local_rank"]] == place["rank"]


def _identity(environ: Mapping[str, str], job_id: str, restarts: int) -> str:
    user = environ.get("SLURM_JOB_UID", str(os.getuid()))
    parts = [environ.get("SLURM_CLUSTER_NAME", ""), job_id, str(restarts), user]
    return "/".join(["slurm", *parts, environ.get(JOB_VARIABLE, "")])
