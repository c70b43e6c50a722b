"""Ranks that a torchrun agent started."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from meshinfer.mesh.variables import JOB_VARIABLE, ceil_div, integer, required

__all__ = ["MARKERS", "NAMES", "read"]

NAMES: Mapping[str, str] = {
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
}

MARKERS = (NAMES["job_id"], NAMES["restart_count"], NAMES["hosts_store"])
"""Any of these gives torchrun away."""


def read(environ: Mapping[str, str]) -> dict[str, Any]:
    """The fields of the launch environment; :class:`MeshError` for a variable that is missing or senseless."""
    rank = integer(environ, NAMES["rank"])
    world_size = integer(environ, NAMES["world_size"], at_least=1)
    local_world_size = integer(environ, NAMES["local_world_size"], at_least=1)
    nodes = ceil_div(world_size, local_world_size)
    store_address = _agent_store(environ)
    host = None if store_address else environ.get(NAMES["store_host"]) or None
    return {
        "rank": rank,
        "world_size": world_size,
        "local_rank": integer(environ, NAMES["local_rank"]),
        "local_world_size": local_world_size,
        "node_rank": integer(environ, NAMES["node_rank"], default=rank // local_world_size),
        "num_nodes": integer(environ, NAMES["num_nodes"], default=nodes),
        "job_id": required(environ, NAMES["job_id"]),
        "restart_count": integer(environ, NAMES["restart_count"]),
        "store_address": store_address,
        "master_host": host,
        "identity": _identity(environ) if host else "",
    }


def _agent_store(environ: Mapping[str, str]) -> tuple[str, int] | None:
    # torch compares with this exact spelling when it decides whether rank 0 has to open a store.
    if required(environ, NAMES["hosts_store"]) != "True":
        return None
    port = integer(environ, NAMES["store_port"], at_least=1, at_most=("65535", 65535))
    return required(environ, NAMES["store_host"]), port


def _identity(environ: Mapping[str, str]) -> str:
    """Where rank 0's own process hosts the store of the user's group: the port is another one after a restart."""
    job = [environ.get(NAMES[field], "") for field in ("job_id", "store_port")]
    return "/".join(["torchrun", str(os.getuid()), *job, environ.get(JOB_VARIABLE, "")])
