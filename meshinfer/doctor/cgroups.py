"""What the control groups around this process allow, in either version of the kernel's interface."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ControlGroup", "parse_cpus"]

_UNLIMITED = 1 << 60
"""Version 1 spells "no limit" as the largest page number."""


@dataclass(frozen=True)
class ControlGroup:
    """The groups of one process.

    Args:
        root: where the hierarchies are mounted.
        paths: of the process in each: by controller for version 1, under ``""`` for version 2.
    """

    root: Path
    paths: dict[str, str]

    @classmethod
    def own(
        cls, root: Path = Path("/sys/fs/cgroup"), listing: Path = Path("/proc/self/cgroup")
    ) -> ControlGroup:
        """Of this process; without control groups, one that limits nothing."""
        try:
            lines = listing.read_text().splitlines()
        except OSError:  # no such kernel, or no /proc
            lines = []
        entries = [line.split(":", 2) for line in lines if line.count(":") >= 2]
        return cls(root, {name: path for _, names, path in entries for name in names.split(",")})

    def cpu_quota(self) -> float | None:
        """Cores' worth of time, or ``None`` for no limit."""
        quotas = []
        for folder in self._folders("cpu"):
            if found := re.match(r"(\d+) (\d+)", _read(folder / "cpu.max")):
                quotas.append(int(found[1]) / int(found[2]))
            quota, period = (_number(folder / f"cpu.cfs_{n}_us") for n in ("quota", "period"))
            if quota and period:
                quotas.append(quota / period)
        return min(quotas, default=None)

    def cpus(self) -> frozenset[int] | None:
        """The processors of the innermost group that names some."""
        for folder in self._folders("cpuset"):
            for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
                if text := _read(folder / name):
                    return parse_cpus(text)
        return None

    def room(self, controller: str, limits: tuple[str, ...], uses: tuple[str, ...]) -> int | None:
        """What is left under the tightest limit of all groups around the process; ``None`` for no limit.

        Args:
            controller: such as ``"pids"``.
            limits: names of the file with the limit, version 2 first.
            uses: names of the file with the use, likewise.
        """
        rooms = []
        for folder in self._folders(controller):
            for limit, use in zip(limits, uses, strict=True):
                allowed, used = _number(folder / limit), _number(folder / use)
                if allowed is not None and used is not None and allowed < _UNLIMITED:
                    rooms.append(max(0, allowed - used))
        return min(rooms, default=None)

    def _folders(self, controller: str) -> Iterator[Path]:
        """Innermost first. In a container the paths may be those of the host: then only the mount is there."""
        for base, name in (
            (self.root, ""),
            (self.root / "unified", ""),
            (self.root / controller, controller),
        ):
            path = Path(self.paths.get(name, "/").lstrip("/"))
            for part in (path, *path.parents):
                if (base / part).is_dir():
                    yield base / part


def parse_cpus(text: str) -> frozenset[int]:
    """``"0-3,8"`` as a set of numbers."""
    numbers: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        numbers.update(range(int(first), int(last or first) + 1))
    return frozenset(numbers)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:  # the other version, or a group without this controller
        return ""


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text.isdigit() else None
