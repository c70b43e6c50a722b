"""SLURM's way to write many host names: ``n[08-11,20],login`` and the like."""

from __future__ import annotations

import itertools
import math
import re
import subprocess
from collections.abc import Iterator

from meshinfer.errors import MeshError

__all__ = ["expand_counts", "expand_hosts", "hostnames", "node_address"]

_TOOL = "scontrol"
_TOOL_SECONDS = 10.0
_MOST_HOSTS = 1 << 16
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\],\s]+)")
_RANGE = re.compile(r"(\d+)(?:-(\d+))?")
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def hostnames(text: str) -> list[str]:
    """Every host that ``text`` names, in its order: as SLURM's own tool says where it is installed.

    Raises:
        MeshError: ``text`` is not of a form that SLURM writes.
    """
    names = list(_split(text))
    # the tool guesses what a list that was cut off means
    found = _ask("show", "hostnames", text) if names != [text] or "[" in text else None
    return found.split() if found else expand_hosts(text)


def expand_hosts(text: str) -> list[str]:
    """Every host that ``text`` names, in its order: ``"a,n[08-10]x"`` is ``a``, ``n08x``, ``n09x``, ``n10x``.

    Raises:
        MeshError: it is not of a form that SLURM writes; asks for the address instead.
    """
    hosts: list[str] = []
    for name in _split(text):
        parts = list(_PART.finditer(name))
        if not name or "".join(part.group() for part in parts) != name:
            raise _malformed(text, f"cannot read {name!r} as the name of a host")
        choices = [_choices(text, part) for part in parts]
        if len(hosts) + math.prod(map(len, choices)) > _MOST_HOSTS:
            raise _malformed(text, f"more than {_MOST_HOSTS} hosts")
        hosts.extend("".join(chosen) for chosen in itertools.product(*choices))
    return hosts


def expand_counts(text: str) -> list[int]:
    """The tasks of each node: ``"2(x2),1"`` is ``[2, 2, 1]``; :class:`MeshError` for another form."""
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise MeshError(
                f"cannot read the tasks of each node from {text!r}: expected a form such as '2(x3),1'"
            )
        times = int(match[2] or 1)
        if times + len(counts) > _MOST_HOSTS:
            raise MeshError(f"{text!r} has more than {_MOST_HOSTS} nodes")
        counts += [int(match[1])] * times
    return counts


def node_address(name: str) -> str | None:
    """The address that SLURM uses for the node ``name``, where its tool can be asked."""
    match = re.search(r"\bNodeAddr=(\S+)", _ask("show", "node", name) or "")
    return match[1] if match else None


def _split(text: str) -> Iterator[str]:
    """The parts between those commas that are outside of brackets."""
    depth, began = 0, 0
    for position, character in enumerate(text):
        depth += (character == "[") - (character == "]")
        if depth not in (0, 1):
            raise _malformed(text, "brackets do not match")
        if character == "," and depth == 0:
            yield text[began:position]
            began = position + 1
    if depth:
        raise _malformed(text, "brackets do not match")
    yield text[began:]


def _choices(text: str, part: re.Match[str]) -> list[str]:
    if part[1] is None:
        return [part[2]]
    numbers: list[str] = []
    for item in part[1].split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            raise _malformed(text, f"cannot read {item!r} in brackets")
        first, last = match[1], match[2] or match[1]
        if not 0 <= int(last) - int(first) < _MOST_HOSTS:
            raise _malformed(text, f"the range {item!r} is empty or too long")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def _malformed(text: str, why: str) -> MeshError:
    return MeshError(
        f"cannot expand the node list {text!r}: {why}; give the address of rank 0's node with "
        "host= of init_mesh"
    )


def _ask(*arguments: str) -> str | None:
    """What SLURM's tool prints; ``None`` where it is missing, fails, or is too slow."""
    try:
        done = subprocess.run(
            [_TOOL, *arguments], capture_output=True, text=True, timeout=_TOOL_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
