"""Whether a process has descriptors for one more pair; gloo ends one that has none left when a peer connects."""

from __future__ import annotations

import os
import resource
from typing import Final

__all__ = ["FILES_PER_CLIENT", "FILES_WHILE_JOINING", "lack_of_descriptors"]

FILES_PER_CLIENT: Final = 4
"""Of each side: measured 3.3 with 1 to 48 clients that join at once."""
FILES_WHILE_JOINING: Final = 2
"""Beside those."""
_FILES_TO_SPARE = 16


def lack_of_descriptors(joining: int = 0) -> str | None:
    """Why this process cannot take part in one more pair, with the remedy; ``None`` when it can.

    Args:
        joining: pairs that are being built, which may not have their descriptors yet.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    needed = (joining + 1) * (FILES_PER_CLIENT + FILES_WHILE_JOINING) + _FILES_TO_SPARE
    if limit == resource.RLIM_INFINITY or used + needed <= limit:
        return None
    return (
        f"it has {used} of at most {limit} descriptors in use, and needs {needed} for one more client; "
        "raise ulimit -n before it starts, or spread the clients over more servers"
    )
