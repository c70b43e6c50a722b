"""Ranks that ``mpirun`` started: that of Open MPI, or hydra, which MPICH and Intel MPI have.

Neither says on which nodes the ranks are. Ranks are supposed to be numbered node by node, the default of both; where
this process's own place shows something else, whoever asks for a node gets an error.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from meshinfer.mesh.ancestry import ancestor_named
from meshinfer.mesh.variables import JOB_VARIABLE, Names, ceil_div, check_place, integer

__all__ = ["NAMES", "present", "rank_names", "read"]

_OPEN_MPI: Names = {
    "rank": "OMPI_COMM_WORLD_RANK",
    "world_size": "OMPI_COMM_WORLD_SIZE",
    "local_rank": "OMPI_COMM_WORLD_LOCAL_RANK",
    "local_world_size": "OMPI_COMM_WORLD_LOCAL_SIZE",
    "job_id": "PMIX_NAMESPACE",
    "store_host": "MASTER_ADDR",
}
_HYDRA: Names = {
    "rank": "PMI_RANK",
    "world_size": "PMI_SIZE",
    "local_rank": "MPI_LOCALRANKID",
    "local_world_size": "MPI_LOCALNRANKS",
    "store_host": "MASTER_ADDR",
}
NAMES: tuple[Names, ...] = (_OPEN_MPI, _HYDRA)

_JOBS = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID")
"""What the batch systems around hydra call the job."""


def present(environ: Mapping[str, str]) -> bool:
    """Whether ``mpirun`` started this process, or one that it comes from.

    ``srun --mpi=pmi2`` sets hydra's rank too, but not the local one.
    """
    return any(names["rank"] in environ and names["local_rank"] in environ for names in NAMES)


def rank_names(environ: Mapping[str, str]) -> Names:
    """The variables of the implementation that is there."""
    return _OPEN_MPI if _OPEN_MPI["rank"] in environ else _HYDRA


def read(environ: Mapping[str, str]) -> dict[str, Any]:
    """The fields of the launch environment; :class:`MeshError` for a variable that is missing or senseless."""
    names = rank_names(environ)
    fields = ("rank", "world_size", "local_rank", "local_world_size")
    place = {field: integer(environ, names[field], at_least="size" in field) for field in fields}
    place["restart_count"] = 0
    per_node = place["local_world_size"]
    place["num_nodes"] = ceil_div(place["world_size"], per_node)
    place["node_rank"] = place["rank"] // per_node
    check_place(place, names)
    one_node = place["num_nodes"] == 1
    return {
        **place,
        "job_id": environ.get(JOB_VARIABLE) or environ.get(_OPEN_MPI["job_id"], ""),
        "master_host": "localhost" if one_node else environ.get(names["store_host"]) or None,
        "identity": _identity(environ, names, one_node),
    }


def _identity(environ: Mapping[str, str], names: Names, one_node: bool) -> str:
    # Open MPI passes only its own variables to other nodes, hydra passes all.
    variables = [names["job_id"]] if "job_id" in names else [*_JOBS, "MASTER_PORT"]
    if names is _OPEN_MPI:
        variables += ["OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_precondition_transports"]
    parts = [environ.get(name, "") for name in (*variables, JOB_VARIABLE)]
    if names is _HYDRA and one_node:
        parts.append(str(ancestor_named("hydra_pmi_proxy")))
    return "/".join(["mpi", str(os.getuid()), *parts])
