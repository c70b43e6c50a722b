"""Who started this process, what it was told, and its place in the job."""

from __future__ import annotations

from collections.abc import Iterable

from meshinfer.doctor.context import Context, marks_of_a_launcher
from meshinfer.doctor.findings import Finding, blame, fail, info, ok, warn
from meshinfer.errors import MeshError
from meshinfer.mesh import handset, mpi, slurm, torchrun
from meshinfer.mesh.groups import split_world

__all__ = ["launcher", "ranks", "variables"]

_GENERAL = (
    *("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "USE_LIBUV"),
    *(
        "SLURM_STEP_ID",
        "SLURM_STEP_NODELIST",
        "SLURM_DISTRIBUTION",
        "SLURM_GTIDS",
        "SLURM_CLUSTER_NAME",
    ),
    *("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME", "RES_OPTIONS"),
)
_PREFIXES = ("MESHINFER_", "TORCHELASTIC_", "LOCAL_", "GROUP_")
_HIDDEN = ("SECRET", "TOKEN", "PASSWORD", "CREDENTIAL", "KEY", "JWT")


def launcher(context: Context) -> Finding:
    """Which launcher was seen, or why what it set makes no sense."""
    here = context.environment
    if here is None:
        return _no_launcher(context)
    return ok(
        f"{here.launcher}, job {here.job_id!r}, restart {here.restart_count}",
        launcher=here.launcher,
        job_id=here.job_id,
        restart_count=here.restart_count,
    )


def _no_launcher(context: Context) -> Finding:
    marks = _spell(
        context, [n for n in marks_of_a_launcher(context.environ) if n in context.environ]
    )
    if marks:
        line = blame(MeshError(context.problem))
        found = f"{line.found} (set here: {' '.join(marks)})"
        return fail(found, f"{line.remedy}; or unset what is left over here")
    if slurm.allocation(context.environ):
        return warn(str(context.problem), "srun python -m meshinfer doctor")
    return info("none: no rank of a job, so what takes two ranks is tried within this process")


def variables(context: Context) -> Finding:
    """The variables that decide how the job runs, as far as they are set."""
    chosen = {name for name in context.environ if name.startswith(_PREFIXES)}
    chosen |= {*_GENERAL, *_launcher_variables(), *marks_of_a_launcher(context.environ)}
    names = sorted(chosen & set(context.environ))
    values = {name: _value(context, name) for name in names}
    return info(" ".join(_spell(context, names)) or "none of those that matter", **values)


def _launcher_variables() -> set[str]:
    tables = (torchrun.NAMES, slurm.NAMES, handset.NAMES, *mpi.NAMES)
    return {name for names in tables for name in names.values()}


def _spell(context: Context, names: Iterable[str]) -> list[str]:
    return [f"{name}={_value(context, name)}" for name in names]


def _value(context: Context, name: str) -> str:
    value = context.environ[name]
    if any(word in name for word in _HIDDEN):
        return "(set, not shown)"
    return value if value.isprintable() and value.isascii() and " " not in value else ascii(value)


def ranks(context: Context) -> Finding:
    """This rank's place, and its group by default."""
    here = context.environment
    if here is None:
        return info("a world of one")
    groups = split_world(here.world_size, context.groups, env=here)
    role = next(group.name for group in groups if here.rank in group)
    return ok(
        f"rank {here.rank} of {here.world_size}, local rank {here.local_rank} of {here.local_world_size}, node "
        f"{here.node_rank} of {here.num_nodes}; by default {', '.join(map(str, groups))}: this rank is {role!r}",
        role=role,
        groups={group.name: list(group.ranks) for group in groups},
    )
