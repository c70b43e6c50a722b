"""One rank that runs the doctor under a handicap: ``doctor_rank.py <handicap> [argument of the doctor ...]``."""

from __future__ import annotations

import os
import resource
import signal
import sys

import torch.distributed as dist

from meshinfer.doctor import command
from meshinfer.doctor import report as reports

LENGTH = 1 << 18
"""Characters: far more than a pipe holds."""


def stop(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def main(handicap: str, *arguments: str) -> int:
    name, _, value = handicap.partition("=")
    if name == "stopped":
        stop()
    elif name == "stopped-later":
        command.write_once = stop  # it has paired with rank 0 by then
    elif name == "files":
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (int(value), hard))
    elif name == "writing":
        os.write(2, b"!")
        os.close(2)
        reports._LOCK_SECONDS = 60.0  # however long the others write
        command.write_once(value * LENGTH)
        return 0
    code = command.main(["doctor", *arguments])
    assert not dist.is_initialized()
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
