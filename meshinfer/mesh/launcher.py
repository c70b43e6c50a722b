"""What the launcher told this process, read once into a frozen object.

To add a launcher: name it in :data:`Launcher`, list its variables in ``_VARIABLES`` (error messages
read that table too), write a reader, and put the reader with the variables that give the launcher
away into ``_READERS``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from meshinfer.errors import MeshError

__all__ = ["LaunchEnvironment", "Launcher"]

Launcher = Literal["torchrun", "explicit"]
"""Who started the processes; ``explicit`` means that the caller gave the ranks itself."""

_REMEDY = "start with torchrun, or pass rank= and world_size= to init_mesh"

_VARIABLES: Mapping[Launcher, Mapping[str, str]] = {
    "torchrun": {
        "rank": "RANK",
        "world_size": "WORLD_SIZE",
        "local_rank": "LOCAL_RANK",
        "local_world_size": "LOCAL_WORLD_SIZE",
        "node_rank": "GROUP_RANK",
        "num_nodes": "GROUP_WORLD_SIZE",
        "job_id": "TORCHELASTIC_RUN_ID",
        "restart_count": "TORCHELASTIC_RESTART_COUNT",
        "store_host": "MASTER_ADDR",
        "store_port": "MASTER_PORT",
        "hosts_store": "TORCHELASTIC_USE_AGENT_STORE",
    },
    "explicit": {},
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
            ``"none"`` unless it is given ``--rdzv-id``.
        restart_count: how often *this node's* agent restarted its processes because one of them
            failed. Nodes of one job can disagree: after a failure on one node torchrun restarts the
            others without counting.
        store_address: host and port of the store that the launcher hosts, or ``None`` where it
            hosts none (then the port in ``MASTER_PORT`` is left to the user's own process group).

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
    store_address: tuple[str, int] | None

    def __post_init__(self) -> None:
        self._check("world_size", at_least=1)
        self._check("rank", below="world_size")
        self._check("local_world_size", at_least=1, at_most="world_size")
        self._check("local_rank", below="local_world_size")
        self._check("num_nodes", at_least=1, at_most="world_size")
        self._check("node_rank", below="num_nodes")
        self._check("restart_count")
        if self.num_nodes == 1 and self.local_world_size != self.world_size:
            raise MeshError(
                f"{self._spell('local_world_size')} on a single node contradicts "
                f"{self._spell('world_size')}: they must be equal; {_REMEDY}"
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
        for markers, read in _READERS:
            if any(marker in environ for marker in markers):
                return read(environ)
        for name in ("RANK", "WORLD_SIZE"):
            _required(environ, name)
        raise MeshError(
            "RANK and WORLD_SIZE are set, but no launcher store was found (no TORCHELASTIC_* "
            "variable): pass rank= and world_size= to init_mesh together with host= and port=, or "
            "start with torchrun"
        )

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
        _check_int("rank", rank)
        _check_int("world_size", world_size, at_least=1)
        _check_int("local_world_size", per_node, at_least=1)
        found = cls(
            rank=rank,
            world_size=world_size,
            local_rank=rank % per_node if local_rank is None else local_rank,
            local_world_size=per_node,
            node_rank=rank // per_node,
            num_nodes=_ceil_div(world_size, per_node),
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

        A launcher tells a process about its own node only. The answer,
        ``rank // local_world_size``, supposes that every node has as many processes as this one,
        numbered node by node, which is how torchrun numbers them.

        Raises:
            MeshError: ``rank`` is outside the world, or this process's own place shows that nodes
                differ in size.
        """
        _check_int("rank", rank, below=("world_size", self.world_size))
        if self.num_nodes == 1:
            return 0
        if not self._nodes_look_equal():
            raise MeshError(
                f"cannot tell which node hosts rank {rank}: {self._spell('rank')} with "
                f"{self._spell('local_world_size')} is on node {self.node_rank} of "
                f"{self.num_nodes} in a world of {self.world_size}, so nodes differ in size; start "
                "as many processes on every node"
            )
        return rank // self.local_world_size

    def _nodes_look_equal(self) -> bool:
        nodes = _ceil_div(self.world_size, self.local_world_size)
        # The last node of an explicit world may be smaller; torchrun reports each node's own size,
        # so there it differs.
        exact = self.launcher == "explicit" or self.world_size % self.local_world_size == 0
        here = self.rank // self.local_world_size
        return exact and nodes == self.num_nodes and here == self.node_rank

    def _check(
        self,
        field: str,
        *,
        at_least: int = 0,
        below: str | None = None,
        at_most: str | None = None,
    ) -> None:
        _check_int(
            self._label(field),
            getattr(self, field),
            at_least=at_least,
            below=None if below is None else (self._label(below), getattr(self, below)),
            at_most=None if at_most is None else (self._label(at_most), getattr(self, at_most)),
        )

    def _label(self, field: str) -> str:
        return _VARIABLES[self.launcher].get(field, field)

    def _spell(self, field: str) -> str:
        return f"{self._label(field)}={getattr(self, field)}"


def _read_torchrun(environ: Mapping[str, str]) -> LaunchEnvironment:
    names = _VARIABLES["torchrun"]
    rank = _integer(environ, names["rank"])
    world_size = _integer(environ, names["world_size"], at_least=1)
    local_world_size = _integer(environ, names["local_world_size"], at_least=1)
    return LaunchEnvironment(
        rank=rank,
        world_size=world_size,
        local_rank=_integer(environ, names["local_rank"]),
        local_world_size=local_world_size,
        node_rank=_integer(environ, names["node_rank"], default=rank // local_world_size),
        num_nodes=_integer(
            environ, names["num_nodes"], default=_ceil_div(world_size, local_world_size)
        ),
        launcher="torchrun",
        job_id=_required(environ, names["job_id"]),
        restart_count=_integer(environ, names["restart_count"]),
        store_address=_agent_store(environ),
    )


def _agent_store(environ: Mapping[str, str]) -> tuple[str, int] | None:
    names = _VARIABLES["torchrun"]
    # torch compares with this exact spelling when it decides whether rank 0 has to open a store.
    if _required(environ, names["hosts_store"]) != "True":
        return None
    host, port = names["store_host"], names["store_port"]
    return _required(environ, host), _integer(environ, port, at_least=1, at_most=("65535", 65535))


_READERS: tuple[tuple[tuple[str, ...], Callable[[Mapping[str, str]], LaunchEnvironment]], ...] = (
    (
        ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"),
        _read_torchrun,
    ),
)
"""Innermost launcher first: torchrun inside a cluster's job sees the cluster's variables too."""


def _required(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "")
    if not value:
        raise MeshError(f"the environment variable {name} is missing; {_REMEDY}")
    return value


def _integer(
    environ: Mapping[str, str],
    name: str,
    *,
    default: int | None = None,
    at_least: int = 0,
    at_most: tuple[str, int] | None = None,
) -> int:
    if default is not None and name not in environ:
        return default
    text = _required(environ, name)
    try:
        value = int(text)
    except ValueError as exc:
        raise MeshError(f"{name}={text!r} is not an integer; {_REMEDY}") from exc
    _check_int(name, value, at_least=at_least, at_most=at_most)
    return value


def _check_int(
    label: str,
    value: object,
    *,
    at_least: int = 0,
    below: tuple[str, int] | None = None,
    at_most: tuple[str, int] | None = None,
) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise MeshError(f"{label}={value!r} is not an int")
    if value < at_least:
        raise MeshError(f"{label}={value} is out of range: expected at least {at_least}")
    if below is not None and value >= below[1]:
        raise MeshError(f"{label}={value} is out of range: expected less than {_bound(below)}")
    if at_most is not None and value > at_most[1]:
        raise MeshError(f"{label}={value} is out of range: expected at most {_bound(at_most)}")


def _bound(bound: tuple[str, int]) -> str:
    label, value = bound
    return label if label == str(value) else f"{label}={value}"


def _ceil_div(numerator: int, denominator: int) -> int:
    return -(-numerator // denominator)
