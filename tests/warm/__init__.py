"""Programs that start at once: forked from a process that has already imported torch and the library.

A new interpreter needs seconds of a core for these imports, and most tests start programs for what these do later.
:class:`WarmProcess` is like ``subprocess.Popen``: a process and session of its own, with its own arguments,
environment and pipes, which runs a file as ``__main__`` and ends as an interpreter ends, finalization included.
:func:`python_command` does the same for launchers, which start their ranks themselves.
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import psutil

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
VARIABLE = "MESHINFER_TEST_WARM"
"""Where the process to fork from listens: for stand-ins, which inherit it."""


class WarmProcess:
    """A program that was started; what this has of ``subprocess.Popen`` behaves as there.

    Args:
        command: what would follow ``python``: a file, or ``-m`` and a module, and arguments.
        env: the whole environment. The path of imports is that of the tests, whatever it says.
        cwd: where it starts.
        files: descriptors that it gets as 0, 1 and 2.
    """

    def __init__(
        self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path, files: Sequence[int]
    ) -> None:
        self.args = command
        self.returncode: int | None = None
        where = str(address())
        request = {"command": command, "env": {**env, VARIABLE: where}, "cwd": str(cwd)}
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.connect(where)
        socket.send_fds(self._connection, [json.dumps(request).encode()], list(files))
        self.pid = int(self._connection.recv(16))

    def poll(self) -> int | None:
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            self._connection.settimeout(timeout)
            try:
                self.returncode = int(self._connection.recv(16))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0) from None
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def python_command(folder: Path) -> str:
    """An executable in ``folder`` that runs its arguments as a :class:`WarmProcess`, and ends as that ends.

    For ``PYTHON_EXEC`` of torchrun. Signals are passed on, and killing it kills the program.
    """
    path = folder / "warm_python"
    command = shlex.join([sys.executable, "-S", "-E", str(HERE / "stand_in.py")])
    path.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
    path.chmod(0o700)
    return str(path)


def monarch_command(python: str) -> tuple[str, list[str], dict[str, str]]:
    """What monarch is to start processes with; ``python`` is from :func:`python_command`."""
    return python, ["-m", "monarch._src.actor.bootstrap_main"], {VARIABLE: str(address())}


@contextmanager
def warm_monarch(python: str) -> Iterator[None]:
    """The processes that monarch starts here meanwhile are forked, as programs are; it must not have been used before.

    monarch itself is imported after the fork: it has threads from then on.
    """
    host_mesh = importlib.import_module("monarch._src.actor.host_mesh")
    original = host_mesh._get_bootstrap_args
    host_mesh._get_bootstrap_args = partial(monarch_command, python)
    try:
        yield
    finally:
        host_mesh._get_bootstrap_args = original


@cache
def _server() -> tuple[subprocess.Popen[bytes], Path]:
    folder = Path(tempfile.mkdtemp())
    path = os.pathsep.join([str(ROOT), str(HERE.parent), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [sys.executable, "-u", str(HERE / "server.py"), str(folder / "socket")],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.PIPE,  # it ends when nobody holds the other end
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    atexit.register(_end, process, folder)
    assert process.stdout is not None
    assert process.stdout.read(1), "the process to fork from did not start"
    return process, folder / "socket"


def _end(process: subprocess.Popen[bytes], folder: Path) -> None:
    process.kill()
    process.communicate()
    shutil.rmtree(folder)


def address() -> Path:
    """Where the process to fork from listens; starts it when it is asked for first."""
    return _server()[1]


def stands_for(process: psutil.Process, pid: int) -> bool:
    """Whether it is a stand-in, and that what it had forked."""
    return process.name() == str(pid)


def is_forked(pid: int) -> bool:
    """Whether the process was forked to be a program."""
    return psutil.Process(pid).ppid() in standing()


def standing() -> list[int]:
    """The process to fork from, if it runs: it stays until the tests end."""
    return [_server()[0].pid] if _server.cache_info().currsize else []
