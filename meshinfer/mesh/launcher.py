"""What the launcher told this process, read once into a frozen object.

To add a launcher: name it in :data:`Launcher`, write a module with its variables (error messages read that table too)
and a reader, and put both into ``_VARIABLES`` and ``_READERS``; :func:`recognise` says when it is meant.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from meshinfer.errors import MeshError
from meshinfer.mesh import handset, mpi, slurm, torchrun
from meshinfer.mesh.variables import (
    REMEDY,
    Names,
    ceil_div,
    check_int,
    check_place,
)

__all__ = ["LaunchEnvironment", "Launcher", "recognise"]

Launcher = Literal["torchrun", "slurm", "mpi", "env", "explicit"]
"""Who started the processes: a torchrun agent, ``srun``, ``mpirun``, a user or monarch who set RANK and the like; or
``explicit``, the caller gave the ranks itself."""

LAUNCHER_VARIABLE = "MESHINFER_LAUNCHER"
"""Which launcher's variables to believe where several have left theirs."""

_VARIABLES: Mapping[Launcher, Names] = {
    "torchrun": torchrun.NAMES,
    "slurm": slurm.NAMES,
    "mpi": {},  # the two implementations differ, and the reader checks
    "env": handset.NAMES,
    "explicit": {},
}

_READERS: Mapping[Launcher, Callable[[Mapping[str, str]], dict[str, Any]]] = {
    "torchrun": torchrun.read,
    "slurm": slurm.read,
    "mpi": mpi.read,
    "env": handset.read,
}


@dataclass(frozen=True)
class LaunchEnvironment:
    """One process's place in the job.

    Args:
        rank: this process among all of the job, ``0 <= rank < world_size``.
        world_size: how many processes the job has.
        local_rank: this process among those of its node, ``0 <= local_rank < local_world_size``.
        local_world_size: how many processes this node has.
        node_rank: this node among all nodes, ``0 <= node_rank < num_nodes``.
        num_nodes: how many nodes the job has; under torchrun, how many agents.
        launcher: who started the processes.
        job_id: the launcher's name for the job. Not unique: torchrun calls a job on several nodes
            ``"none"`` unless it is given ``--rdzv-id``. Under SLURM job and step, as ``"1500.0"``.
        restart_count: how often *this node's* agent restarted its processes because one of them
            failed. Nodes of one job can disagree: after a failure on one node torchrun restarts the
            others without counting. Under SLURM how often the job was requeued.
        store_address: host and port of the store that the launcher hosts, or ``None`` where it
            hosts none (then the port in ``MASTER_PORT`` is left to the user's own process group).
        nodes: the node of each rank where the launcher tells, -1 where it tells of others only; empty where nodes are
            supposed to be equal, with ranks numbered node by node.
        master_host: name or address of the host of rank 0, where the job's store is when no launcher hosts one;
            ``None`` where nothing tells.
        identity: what sets the job apart from all others on its hosts; empty where a launcher hosts the store, or
            nothing tells.

    Raises:
        MeshError: a number is not an int or out of range, or the numbers contradict each other.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    launcher: Launcher
    job_id: str
    restart_count: int
    store_address: tuple[str, int] | None = None
    nodes: tuple[int, ...] = ()
    master_host: str | None = None
    identity: str = ""

    def __post_init__(self) -> None:
        check_place(vars(self), _VARIABLES[self.launcher])
        if self.nodes and len(self.nodes) != self.world_size:
            raise MeshError(
                f"nodes has {len(self.nodes)} entries, expected {self._spell('world_size')}"
            )

    @classmethod
    def from_environ(cls, environ: Mapping[str, str] | None = None) -> LaunchEnvironment:
        """Read the variables that the launcher set.

        Args:
            environ: the variables; ``None`` means ``os.environ`` as it is now.

        Raises:
            MeshError: no launcher is recognised, a variable is missing, is not an integer or is out
                of range.
        """
        environ = os.environ if environ is None else environ
        launcher = recognise(environ)
        return cls(launcher=launcher, **_READERS[launcher](environ))

    @classmethod
    def explicit(
        cls,
        rank: int,
        world_size: int,
        *,
        local_rank: int | None = None,
        local_world_size: int | None = None,
        job_id: str = "",
        restart_count: int = 0,
    ) -> LaunchEnvironment:
        """Describe a process that no supported launcher started.

        Ranks must be numbered node by node.

        Args:
            rank: this process among all of the job.
            world_size: how many processes the job has.
            local_rank: this process among those of its node; ``None`` means
                ``rank % local_world_size``.
            local_world_size: processes per node, the same number on every rank (the last node may
                have fewer); ``None`` means that all processes share one node.
            job_id: a name that keeps this job apart from others that use the same store.
            restart_count: a number that is higher each time the job is started again under the same
                ``job_id``.

        Raises:
            MeshError: a number is not an int or out of range, or ``local_rank`` does not belong to
                ``rank``.
        """
        per_node = world_size if local_world_size is None else local_world_size
        check_int("rank", rank)
        check_int("world_size", world_size, at_least=1)
        check_int("local_world_size", per_node, at_least=1)
        found = cls(
            rank=rank,
            world_size=world_size,
            local_rank=rank % per_node if local_rank is None else local_rank,
            local_world_size=per_node,
            node_rank=rank // per_node,
            num_nodes=ceil_div(world_size, per_node),
            launcher="explicit",
            job_id=job_id,
            restart_count=restart_count,
            store_address=None,
        )
        if found.local_rank != rank % per_node:
            raise MeshError(
                f"local_rank={local_rank} does not belong to rank={rank} with "
                f"local_world_size={per_node}: expected {rank % per_node}, as ranks are numbered "
                "node by node; pass local_world_size= as processes per node"
            )
        return found

    @property
    def spans_hosts(self) -> bool:
        """Whether the job has several nodes, so that loopback cannot reach every rank."""
        return self.num_nodes > 1

    def node_of(self, rank: int) -> int:
        """Return the node, ``0 <= node < num_nodes``, that hosts ``rank``.

        SLURM tells the size of every node and how it deals the ranks out. The others tell a process
        about its own node only; the answer, ``rank // local_world_size``, supposes that every node
        has as many processes as this one, numbered node by node, which is how torchrun numbers them.

        Raises:
            MeshError: ``rank`` is outside the world, or it cannot be told: this process's own place
                shows that nodes differ in size, or SLURM does not say how it deals the ranks out.
        """
        check_int("rank", rank, below=("world_size", self.world_size))
        if self.num_nodes == 1:
            return 0
        if self.nodes:
            return self._node_by_name(rank)
        if not self._nodes_look_equal():
            raise MeshError(
                f"cannot tell which node hosts rank {rank}: {self._spell('rank')} with "
                f"{self._spell('local_world_size')} is on node {self.node_rank} of "
                f"{self.num_nodes} in a world of {self.world_size}, so nodes differ in size, or are not "
                "numbered one after the other; start as many processes on every node, node by node"
            )
        return rank // self.local_world_size

    def _node_by_name(self, rank: int) -> int:
        if self.nodes[rank] < 0:
            raise MeshError(
                f"cannot tell which node hosts rank {rank}: SLURM does not say how it deals ranks to the "
                f"{self.num_nodes} nodes of step {self.job_id}; start with srun -m block"
            )
        return self.nodes[rank]

    def _nodes_look_equal(self) -> bool:
        nodes = ceil_div(self.world_size, self.local_world_size)
        # The last node of an explicit world may be smaller; torchrun reports each node's own size,
        # so there it differs.
        exact = self.launcher == "explicit" or self.world_size % self.local_world_size == 0
        here = divmod(self.rank, self.local_world_size) == (self.node_rank, self.local_rank)
        return exact and nodes == self.num_nodes and here

    def _label(self, field: str) -> str:
        return _VARIABLES[self.launcher].get(field, field)

    def _spell(self, field: str) -> str:
        return f"{self._label(field)}={getattr(self, field)}"


def recognise(environ: Mapping[str, str]) -> Launcher:
    """The innermost launcher: one that was started by another one sees the variables of both.

    Those of torchrun come first, then RANK and WORLD_SIZE where they describe another world than ``mpirun`` or ``srun``
    around them, then ``mpirun``, then ``srun``. Monarch's SPMD actor changes RANK and the like alone, in processes that
    inherit everything else from who started monarch; there only RANK and the like count. ``MESHINFER_LAUNCHER`` decides
    where all this is not enough.

    Raises:
        MeshError: there is none, or what two of them say does not fit.
    """
    chosen = environ.get(LAUNCHER_VARIABLE)
    if chosen:
        return _chosen(chosen)
    by_hand, in_monarch = handset.present(environ), "HYPERACTOR_MESH_BOOTSTRAP_MODE" in environ
    if by_hand and in_monarch and environ.get("ROLE_NAME") == "rank":  # torchrun names another role
        return "env"
    if any(marker in environ for marker in torchrun.MARKERS):
        return "torchrun"
    around = None if in_monarch else _around(environ)
    if around is None and not by_hand:
        raise _nobody(environ, in_monarch)
    if around is None or (by_hand and not _same_world(environ, *around)):
        return "env"
    return around[0]


def _around(environ: Mapping[str, str]) -> tuple[Launcher, Names] | None:
    if mpi.present(environ):
        return "mpi", mpi.rank_names(environ)
    return ("slurm", slurm.NAMES) if slurm.in_step(environ) else None


def _same_world(environ: Mapping[str, str], launcher: Launcher, names: Names) -> bool:
    """Whether RANK and WORLD_SIZE repeat what the launcher says; every rank of a job answers alike, or raises."""
    mine = handset.NAMES
    if environ[mine["world_size"]] != environ.get(names["world_size"]):
        return False
    if environ[mine["rank"]] != environ.get(names["rank"]):
        raise MeshError(
            f"{mine['rank']}={environ[mine['rank']]} contradicts {names['rank']}={environ.get(names['rank'])} in the "
            f"same world of {environ[mine['world_size']]} ranks; set {LAUNCHER_VARIABLE} to 'env' or {launcher!r} on "
            "every rank to say which is meant"
        )
    return True


def _chosen(name: str) -> Launcher:
    for launcher in _READERS:
        if launcher == name:
            return launcher
    known = ", ".join(map(repr, _READERS))
    raise MeshError(f"{LAUNCHER_VARIABLE}={name!r} is no launcher; there are {known}")


def _nobody(environ: Mapping[str, str], in_monarch: bool) -> MeshError:
    job = slurm.allocation(environ)
    if in_monarch:
        return MeshError(
            "this process of a monarch mesh has no RANK and WORLD_SIZE of its own, and what other launchers have set "
            "belongs to its host; call monarch.spmd.setup_torch_elastic_env, or pass rank= and world_size= to init_mesh"
        )
    if job is not None and "WORLD_SIZE" not in environ:
        return MeshError(
            f"this process is in the SLURM job {job}, but not a task of a step: a batch script or an interactive "
            "shell; start the ranks with srun, or with torchrun on each node"
        )
    name = "WORLD_SIZE" if "RANK" in environ else "RANK"
    return MeshError(f"the environment variable {name} is missing; {REMEDY}")
