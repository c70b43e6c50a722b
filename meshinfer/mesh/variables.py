"""Variables of a launcher, read and checked: every error names the variable, what it is and what was expected."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshinfer.errors import MeshError

__all__ = ["JOB_VARIABLE", "REMEDY", "Names", "ceil_div", "check_int", "check_place", "integer"]

JOB_VARIABLE = "MESHINFER_JOB_ID"
"""A user's name for the job, which sets it apart from one that has the same variables otherwise."""

REMEDY = "start with torchrun, srun or mpirun, or pass rank= and world_size= to init_mesh"

Names = Mapping[str, str]
"""For each field of the launch environment the variable that it comes from."""


def required(environ: Mapping[str, str], name: str, remedy: str = REMEDY) -> str:
    """The variable; :class:`MeshError` when it is missing or empty."""
    value = environ.get(name, "")
    if not value:
        raise MeshError(f"the environment variable {name} is missing; {remedy}")
    return value


def integer(
    environ: Mapping[str, str],
    name: str,
    *,
    default: int | None = None,
    at_least: int = 0,
    at_most: tuple[str, int] | None = None,
) -> int:
    """The variable as a number; :class:`MeshError` when it is missing, no integer or out of range."""
    if default is not None and name not in environ:
        return default
    text = required(environ, name)
    try:
        value = int(text)
    except ValueError as exc:
        raise MeshError(f"{name}={text!r} is not an integer; {REMEDY}") from exc
    check_int(name, value, at_least=at_least, at_most=at_most)
    return value


def check_int(
    label: str,
    value: object,
    *,
    at_least: int = 0,
    below: tuple[str, int] | None = None,
    at_most: tuple[str, int] | None = None,
) -> None:
    """Raise :class:`MeshError` unless ``value`` is an int within the bounds, each a name and a number."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise MeshError(f"{label}={value!r} is not an int")
    if value < at_least:
        raise MeshError(f"{label}={value} is out of range: expected at least {at_least}")
    if below is not None and value >= below[1]:
        raise MeshError(f"{label}={value} is out of range: expected less than {_bound(below)}")
    if at_most is not None and value > at_most[1]:
        raise MeshError(f"{label}={value} is out of range: expected at most {_bound(at_most)}")


def check_place(place: Mapping[str, Any], names: Names) -> None:
    """Raise :class:`MeshError` unless the numbers of a process's place in its job fit each other.

    Args:
        place: the fields of the launch environment.
        names: what to call them.
    """

    def named(field: str) -> tuple[str, int]:
        return names.get(field, field), place[field]

    world, per_node, nodes = named("world_size"), named("local_world_size"), named("num_nodes")
    check_int(*world, at_least=1)
    check_int(*named("rank"), below=world)
    check_int(*per_node, at_least=1, at_most=world)
    check_int(*named("local_rank"), below=per_node)
    check_int(*nodes, at_least=1, at_most=world)
    check_int(*named("node_rank"), below=nodes)
    check_int(*named("restart_count"))
    if place["num_nodes"] == 1 and per_node[1] != world[1]:
        raise MeshError(
            f"{per_node[0]}={per_node[1]} on a single node contradicts {world[0]}={world[1]}: "
            f"they must be equal; {REMEDY}"
        )


def ceil_div(numerator: int, denominator: int) -> int:
    """``numerator / denominator``, rounded up."""
    return -(-numerator // denominator)


def _bound(bound: tuple[str, int]) -> str:
    label, value = bound
    return label if label == str(value) else f"{label}={value}"
