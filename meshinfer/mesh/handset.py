"""Ranks whose variables a user has set by hand, or monarch's SPMD actor has: those that ``env://`` reads too."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from meshinfer.errors import MeshError
from meshinfer.mesh.variables import JOB_VARIABLE, ceil_div, integer

__all__ = ["NAMES", "present", "read"]

NAMES: Mapping[str, str] = {
    "rank": "RANK",
    "world_size": "WORLD_SIZE",
    "local_rank": "LOCAL_RANK",
    "local_world_size": "LOCAL_WORLD_SIZE",
    "node_rank": "GROUP_RANK",
    "num_nodes": "GROUP_WORLD_SIZE",
    "store_host": "MASTER_ADDR",
    "store_port": "MASTER_PORT",
}


def present(environ: Mapping[str, str]) -> bool:
    """Whether rank and world size are there."""
    return NAMES["rank"] in environ and NAMES["world_size"] in environ


def read(environ: Mapping[str, str]) -> dict[str, Any]:
    """The fields of the launch environment; :class:`MeshError` for a variable that is senseless.

    Without LOCAL_WORLD_SIZE all ranks are supposed to be on one node.
    """
    rank = integer(environ, NAMES["rank"])
    world_size = integer(environ, NAMES["world_size"], at_least=1)
    _check_local_size(environ, rank)
    per_node = integer(environ, NAMES["local_world_size"], default=world_size, at_least=1)
    host, port = environ.get(NAMES["store_host"], ""), environ.get(NAMES["store_port"], "")
    name = environ.get(JOB_VARIABLE, "")
    return {
        "rank": rank,
        "world_size": world_size,
        "local_rank": integer(environ, NAMES["local_rank"], default=rank % per_node),
        "local_world_size": per_node,
        "node_rank": integer(environ, NAMES["node_rank"], default=rank // per_node),
        "num_nodes": integer(environ, NAMES["num_nodes"], default=ceil_div(world_size, per_node)),
        "job_id": name or f"{host}:{port}",
        "restart_count": 0,
        "master_host": host or None,
        # not the address: ranks may spell it differently, and it is where they look for rank 0 anyhow
        "identity": "/".join(["env", port, str(os.getuid()), name]),
    }


def _check_local_size(environ: Mapping[str, str], rank: int) -> None:
    """A rank that says which of its node it is, and not one of how many, may have several nodes around it."""
    size = NAMES["local_world_size"]
    if size in environ:
        return
    local_rank = integer(environ, NAMES["local_rank"], default=rank)
    nodes = integer(environ, NAMES["num_nodes"], default=1, at_least=1)
    if local_rank != rank or nodes > 1:
        raise MeshError(
            f"the environment variable {size} is missing, and {NAMES['rank']}={rank}, {NAMES['local_rank']}="
            f"{local_rank} and {nodes} node(s) do not fit one node: set {size} to the ranks of this node"
        )
