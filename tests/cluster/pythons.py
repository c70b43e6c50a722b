"""The ``python`` of jobs on several hosts: a new interpreter, or one forked on that host when all is imported."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from mesh_jobs import environment
from warm import VARIABLE, WarmProcess, python_command

from cluster.hosts import Host

_ENTER = Path(__file__).resolve().parent / "enter.py"
_SOCKET = "/dev/shm/warm"
"""The same path on each host, where it is another file: their shared memory is their own."""


def cold_python() -> dict[str, str]:
    """The variables of a job whose ``python`` is a new interpreter, as a user has."""
    return {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


@contextmanager
def warm_python(hosts: Sequence[Host], folder: Path) -> Iterator[dict[str, str]]:
    """The variables of a job on these hosts whose ``python`` is forked; torchrun forks its ranks as well."""
    (programs := folder / "bin").mkdir()
    os.rename(python_command(programs), python := programs / "python")
    with ExitStack() as stack:
        for host in hosts:
            stack.enter_context(_warm(host))
        path = f"{programs}:{os.environ['PATH']}"
        # The last is with what a host of monarch starts its processes, instead of what it runs itself.
        pythons = dict.fromkeys(("PYTHON_EXEC", "FB_XAR_INVOKED_NAME"), str(python))
        yield {"PATH": path, **pythons, VARIABLE: _SOCKET}


@contextmanager
def _warm(host: Host) -> Iterator[None]:
    """Programs are forked on this host, at ``_SOCKET``, until nobody holds the other end of standard input."""
    stdin, holder = os.pipe()
    listening, stdout = os.pipe()
    try:
        command = [str(_ENTER), str(host.pid), _SOCKET]
        variables = environment(Path(os.devnull), {})
        process = WarmProcess(command, env=variables, cwd=Path("/"), files=[stdin, stdout, 2])
        for end in (stdin, stdout):
            os.close(end)
        assert os.read(listening, 1), f"no programs can be forked on {host.name}"
        yield
    finally:
        os.close(listening)
        os.close(holder)
    process.wait(60.0)
