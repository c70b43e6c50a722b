"""Programs of their own, as a user would start them: how they end, and what they print."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from support import wait_until
from warm import WarmProcess, python_command

ROOT = Path(__file__).resolve().parents[1]
NAME_LOOKUP = "hostname of the client socket cannot be retrieved"
"""What torch prints where the name server does not answer; nothing that ours could prevent."""

PRELUDE = """
import os, signal, sys, threading, time
sys.path.insert(0, {tests!r})
import torch
from failure_roles import SECRET, HELD, Doubler, ask, check, reply, request
from meshinfer import *
torch.set_num_threads(1)


def say(*words):
    print(*words, flush=True)


def listen():
    line = sys.stdin.readline()
    assert line, "the test has gone"
    return line.strip()


def new_client(port, **options):
    options = {{"secret": SECRET, "role": "client", "port": int(port), **options}}
    return DistributedTransport(request(0), reply(), **options).client()


def new_server(policy=None, **options):
    transport = DistributedTransport(request(0), reply(), secret=SECRET, **options)
    return InferenceServer(policy or Doubler(), transport)
"""


@dataclass(frozen=True)
class Ending:
    """How a program ended."""

    code: int
    stdout: str
    stderr: str
    seconds: float

    def assert_clean(self, code: int = 0) -> None:
        """Ended by itself, with ``code``, and without a word of complaint."""
        assert self.code == code, self.stderr
        assert self.complaints() == []

    def complaints(self) -> list[str]:
        lines = self.stderr.splitlines()
        return [line for line in lines if line.strip() and NAME_LOOKUP not in line]

    def assert_not_aborted(self, name: str) -> None:
        assert self.code >= 0, (name, self.stderr)
        for word in ("terminate called", "Aborted", "Segmentation", "Fatal Python error"):
            assert word not in self.stderr


class Program:
    """A running program, in a session of its own, whose lines are read as they come.

    Args:
        command: what would follow ``python``.
        environment: the whole of it.
        cold: run it in a new interpreter, not in one that is forked once everything is imported.
    """

    def __init__(
        self, command: list[str], environment: dict[str, str], *, cold: bool = False
    ) -> None:
        (stdin, self._stdin), (output, stdout), (errors, stderr) = (os.pipe() for _ in range(3))
        start = start_cold if cold else WarmProcess
        self.process = start(command, env=environment, cwd=ROOT, files=(stdin, stdout, stderr))
        for descriptor in (stdin, stdout, stderr):
            os.close(descriptor)
        self.lines: list[str] = []
        self._errors: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=(output, self.lines)),
            threading.Thread(target=self._read, args=(errors, self._errors)),
        ]
        for reader in self._readers:
            reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def tell(self, line: str = "") -> None:
        os.write(self._stdin, f"{line}\n".encode())

    def hear(self, start: str, count: int = 1, timeout: float = 40.0) -> list[str]:
        """What follows ``start`` in the first ``count`` lines that begin with it."""

        def heard() -> list[str]:
            return [line for line in self.lines if line.startswith(start)]

        assert wait_until(lambda: len(heard()) >= count, timeout), "".join(self._errors)
        return [line[len(start) :].strip() for line in heard()[:count]]

    def signal_group(self, number: int) -> None:
        os.killpg(self.pid, number)

    def ending(self, timeout: float = 40.0) -> Ending:
        began = time.monotonic()
        code = self.process.wait(timeout)
        for reader in self._readers:
            reader.join(timeout)
        return Ending(code, "".join(self.lines), "".join(self._errors), time.monotonic() - began)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.signal_group(signal.SIGKILL)
        self.process.wait()
        for reader in self._readers:
            reader.join()
        os.close(self._stdin)

    @staticmethod
    def _read(descriptor: int, into: list[str]) -> None:
        with open(descriptor, encoding="utf-8") as stream:
            into.extend(stream)


def start_cold(
    command: list[str], *, env: dict[str, str], cwd: Path, files: tuple[int, int, int]
) -> subprocess.Popen[bytes]:
    """As a :class:`WarmProcess`, but nothing is imported when it starts."""
    stdin, stdout, stderr = files
    return subprocess.Popen(
        [sys.executable, "-u", *command],
        env=env,
        cwd=cwd,
        stdin=stdin,
        stdout=stdout,
        stderr=stderr,
        start_new_session=True,
    )


@contextmanager
def programs(
    tmp_path: Path, *, cold: Collection[str] = (), **sources: str
) -> Iterator[dict[str, Program]]:
    """All started at once, by name, those in ``cold`` in new interpreters; each is a file, for its tracebacks."""
    running: dict[str, Program] = {}
    try:
        for name, source in sources.items():
            path = write_program(tmp_path, name, source)
            running[name] = Program([str(path)], environment(), cold=name in cold)
        yield running
    finally:
        for program in running.values():
            program.close()


@contextmanager
def torchrun(tmp_path: Path, source: str, ranks: int, *, cold: bool = False) -> Iterator[Program]:
    """``ranks`` processes of one program under torchrun."""
    path = write_program(tmp_path, "job", source)
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    python = {} if cold else {"PYTHON_EXEC": python_command(tmp_path)}
    job = Program([*command, str(path)], {**environment(), **python}, cold=cold)
    try:
        yield job
    finally:
        for pid in pids_heard(job):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        job.close()


def pids_heard(job: Program) -> list[int]:
    """Of the ranks that have said ``pid <pid>``; torchrun gives each a session of its own."""
    return [int(line.split()[1]) for line in job.lines if line.startswith("pid ")]


def write_program(tmp_path: Path, name: str, source: str) -> Path:
    path = tmp_path / f"{name}.py"
    prelude = PRELUDE.format(tests=str(ROOT / "tests"))
    path.write_text(prelude + textwrap.dedent(source))
    return path


def environment() -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
