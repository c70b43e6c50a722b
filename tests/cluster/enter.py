"""Fork warm programs inside a host: ``enter.py <pid of the host's first process> <path of the socket there>``.

Run warm itself, so that a host costs no imports. See ``warm/server.py`` for what is served.
"""

from __future__ import annotations

import ctypes
import os
import sys

from warm import server

SPACES = ("net", "uts", "ipc", "pid", "mnt")


def enter(pid: int) -> None:
    """Be in the host, but for the process id: that of the next child is."""
    library = ctypes.CDLL(None, use_errno=True)
    spaces = [os.open(f"/proc/{pid}/ns/{space}", os.O_RDONLY) for space in SPACES]
    for space in spaces:
        if library.setns(space, 0):
            raise OSError(ctypes.get_errno(), f"cannot enter the host of process {pid}")
        os.close(space)


if __name__ == "__main__":
    enter(int(sys.argv[1]))
    inside = os.fork()
    if inside:
        os.waitpid(inside, 0)
        os._exit(0)  # at once: nothing here has to be finalized
    else:
        server.run(sys.argv[2])
