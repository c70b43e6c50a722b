"""Start real jobs in process groups of their own, wait with a deadline, and leave nothing running."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from warm import WarmProcess, python_command

ROOT = Path(__file__).resolve().parent.parent
RANKS = ROOT / "tests" / "mesh_ranks.py"
RESULTS_VARIABLE = "MESHINFER_TEST_RESULTS"
JOB_SECONDS = 50.0
"""For a whole job, on cores that others use too."""

_LAUNCHER_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "MASTER_", "ROLE_", "TORCHELASTIC_"),
    *("SLURM_", "OMPI_", "PMI", "MPI_", "HYPERACTOR_", "MESHINFER_LAUNCHER", "MESHINFER_JOB_ID"),
)


@dataclass(frozen=True)
class Ended:
    """What a command left."""

    code: int
    stdout: str
    stderr: str
    seconds: float
    results: dict[str, Any]
    """What its ranks reported, by label."""

    def __str__(self) -> str:
        return f"exit code {self.code}\n--- stdout\n{self.stdout}\n--- stderr\n{self.stderr}"


class Job:
    """One running command and whatever it starts.

    Args:
        command: is forked once everything is imported if it is a program of this Python, and if that is torchrun, so
            are the ranks.
        folder: for what it writes.
        variables: of its environment, beside those of the tests.
        cold: have new interpreters instead, as a user has.
    """

    def __init__(
        self, command: Sequence[str], folder: Path, variables: dict[str, str], cold: bool
    ) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self._began = time.monotonic()
        warm = command[0] == sys.executable and not cold
        if warm:
            variables = {"PYTHON_EXEC": python_command(folder), **variables}
        with (
            open(os.devnull, "rb") as stdin,
            open(folder / "stdout", "wb") as stdout,
            open(folder / "stderr", "wb") as stderr,
        ):
            self.process = (_start_warm if warm else _start_cold)(
                command,
                env=environment(folder, variables),
                cwd=ROOT,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
            )

    def end(self, timeout: float = JOB_SECONDS) -> Ended:
        """Wait for it; raises :class:`TimeoutError` with what it has written so far."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"still running after {timeout} s: {self._ended(-1)}") from error
        return self._ended(code)

    def kill(self) -> None:
        """End the command and all that it started, torchrun's ranks (sessions of their own) included."""
        try:
            members = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            members = []
        for send, target in [(os.killpg, self.process.pid), *((os.kill, m.pid) for m in members)]:
            try:
                send(target, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()

    def _ended(self, code: int) -> Ended:
        return Ended(
            code=code,
            stdout=(self.folder / "stdout").read_text(),
            stderr=(self.folder / "stderr").read_text(),
            seconds=time.monotonic() - self._began,
            results=reported(self.folder),
        )


def _start_warm(command: Sequence[str], **options: Any) -> WarmProcess:
    files = [options.pop(name).fileno() for name in ("stdin", "stdout", "stderr")]
    return WarmProcess(command[1:], files=files, **options)


def _start_cold(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, start_new_session=True, **options)


@contextmanager
def running(
    folder: Path, *commands: Sequence[str], cold: bool = False, **variables: str
) -> Iterator[list[Job]]:
    """Start commands at the same moment; all are gone afterwards."""
    with ExitStack() as stack:
        jobs = []
        for number, command in enumerate(commands):
            jobs.append(Job(command, folder / f"job{number}", variables, cold))
            stack.callback(jobs[-1].kill)
        yield jobs


def run(folder: Path, command: Sequence[str], *, cold: bool = False, **variables: str) -> Ended:
    """Start one command and wait for its end."""
    with running(folder, command, cold=cold, **variables) as (job,):
        return job.end()


def torchrun(ranks: int, *script: str, flags: Sequence[str] = ("--standalone",)) -> list[str]:
    """The command that a user would type."""
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}"]
    return [*launcher, *flags, *(script if script[0].endswith(".py") else (str(RANKS), *script))]


def plain(*arguments: str) -> list[str]:
    """One process without a launcher."""
    return [sys.executable, str(RANKS), *arguments]


def report(label: str, **values: Any) -> None:
    """In a rank: leave ``values`` for :attr:`Ended.results`."""
    folder = Path(os.environ[RESULTS_VARIABLE])
    unfinished = folder / f"{label}.{os.getpid()}"
    unfinished.write_text(json.dumps(values))
    unfinished.rename(folder / f"{label}.json")


def reported(folder: Path) -> dict[str, Any]:
    """What ranks have left in ``folder`` with :func:`report`, by label."""
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def environment(folder: Path, variables: dict[str, str]) -> dict[str, str]:
    """The whole environment of a job: that of the tests, less what launchers set, and ``variables``."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_LAUNCHER_VARIABLES)
    }
    return {
        **kept,
        "OMP_NUM_THREADS": "1",
        # torch looks up the name of each address that it connects to; a name server that drops one
        # question in a hundred must not decide how long a test takes.
        "RES_OPTIONS": "timeout:1 attempts:1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")]),
        RESULTS_VARIABLE: str(folder),
        **variables,
    }
