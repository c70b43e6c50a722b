"""From whom a process descends, as Linux tells."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["ancestor_named", "descends_from"]


def descends_from(pid: int) -> bool:
    """Whether this process is a child, or a child's child and so on, of ``pid``."""
    return any(ancestor == pid for ancestor, _ in _ancestors())


def ancestor_named(name: str) -> int | None:
    """The process id of the nearest ancestor whose command is ``name``."""
    return next((pid for pid, command in _ancestors() if command == name[:15]), None)


def _ancestors() -> Iterator[tuple[int, str]]:
    pid = os.getppid()
    while pid > 1:
        try:
            text = Path(f"/proc/{pid}/stat").read_text()
        except OSError:  # it has ended, or belongs to another namespace
            return
        name, _, rest = text.partition("(")[2].rpartition(")")
        yield pid, name
        pid = int(rest.split()[1])
