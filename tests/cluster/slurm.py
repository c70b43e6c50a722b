"""A SLURM cluster over hosts of their own: munge, a controller, and a slurmd on each node."""

from __future__ import annotations

import os
import re
import secrets
import shlex
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
from mesh_jobs import JOB_SECONDS, environment
from support import wait_until

from cluster.hosts import Host, require

_TOOLS = dict.fromkeys(("sbatch", "slurmctld", "slurmd"), "slurm-wlm") | {"munged": "munge"}
_UP_SECONDS = 60.0
_CPUS = 8
_CONFIGURATION = """
ClusterName=meshinfer
SlurmctldHost={controller}
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1
ReturnToService=2
KillWait=3
PartitionName=all Nodes=ALL Default=YES
"""
"""``KillWait`` is how many seconds SLURM leaves between SIGTERM and SIGKILL."""


@dataclass(frozen=True)
class Slurm:
    """A running cluster.

    Args:
        controller: the host of its commands; no job runs there.
        nodes: the hosts of its jobs, ``n0`` first.
        folder: of its configuration, state and logs.
    """

    controller: Host
    nodes: Sequence[Host]
    folder: Path

    @property
    def variables(self) -> dict[str, str]:
        """Of the environment of each of its commands."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def run(self, *command: str) -> str:
        """What one of its commands prints."""
        return self.controller.run(*command, **self.variables)

    def submit(self, folder: Path, *command: str, variables: dict[str, str]) -> SlurmJob:
        """Have ``sbatch`` start what ``command`` says, in ``folder``, where the job leaves its logs.

        Args:
            variables: of the job's environment, beside those of the tests.
        """
        folder.mkdir(parents=True, exist_ok=True)
        sbatch = ["sbatch", "--parsable", f"--chdir={folder}", *command]
        done = subprocess.run(
            self.controller.command(*sbatch),
            env=environment(folder, {**variables, **self.variables}),
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, f"{shlex.join(sbatch)}: {done.stderr}"
        return SlurmJob(self, int(done.stdout), folder)


@dataclass(frozen=True)
class SlurmJob:
    """A job that was submitted."""

    slurm: Slurm
    id: int
    folder: Path

    def fields(self) -> dict[str, str]:
        """What SLURM knows of it, as ``{"JobState": "RUNNING", ...}``."""
        shown = self.slurm.run("scontrol", "--oneliner", "show", "job", str(self.id))
        return dict(re.findall(r"(\S+?)=(\S*)", shown.splitlines()[0]))

    def processes(self) -> list[psutil.Process]:
        """All that belongs to it on any node, SLURM's own processes included."""
        return [
            process
            for node in self.slurm.nodes
            for process in node.processes()
            if _environ(process).get("SLURM_JOB_ID") == str(self.id)
        ]

    def cancel(self) -> None:
        """``scancel`` it, whether it runs or has ended."""
        self.slurm.run("scancel", str(self.id))

    def end(self, timeout: float = JOB_SECONDS) -> SlurmEnd:
        """Wait until it has ended and its nodes are free; :class:`TimeoutError` with its logs otherwise."""
        running = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING")
        ended = wait_until(lambda: self.fields()["JobState"] not in running, timeout, interval=0.2)
        found = self.fields()
        code, number = map(int, found["ExitCode"].split(":"))
        end = SlurmEnd(found["JobState"], code, number, self.logs())
        if not ended:
            self.cancel()
            raise TimeoutError(f"still there after {timeout} s: {end}")
        return end

    def logs(self) -> dict[str, str]:
        """What its script and its ranks have written, by file."""
        return {path.name: path.read_text() for path in sorted(self.folder.glob("*.out"))}


@dataclass(frozen=True)
class SlurmEnd:
    """How a job ended.

    Args:
        state: SLURM's word for it, such as ``"COMPLETED"``.
        code: exit code of the batch script.
        signal: that ended the batch script, or 0.
        logs: see :meth:`SlurmJob.logs`.
    """

    state: str
    code: int
    signal: int
    logs: Mapping[str, str]

    @property
    def text(self) -> str:
        """All logs in one."""
        return "\n".join(self.logs.values())

    def __str__(self) -> str:
        logs = "".join(f"--- {name}\n{text}\n" for name, text in self.logs.items())
        return f"{self.state}, exit code {self.code}, signal {self.signal}\n{logs}"


@contextmanager
def running_slurm(controller: Host, nodes: Sequence[Host], folder: Path) -> Iterator[Slurm]:
    """A cluster over these hosts, in ``folder``; skips the test where SLURM is not installed."""
    require(_TOOLS)
    slurm = Slurm(controller, nodes, folder)
    _configure(slurm)
    with ExitStack() as stack, open(folder / "daemons.log", "ab") as log:
        for host, command in _daemons(slurm):
            process = subprocess.Popen(
                host.command(*command),
                env={**os.environ, **slurm.variables},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            stack.callback(_end, process)
        up = f"idle {len(nodes)}"
        assert wait_until(lambda: _states(slurm) == up, _UP_SECONDS, interval=0.1), (
            f"SLURM did not start: {(folder / 'daemons.log').read_text()}"
        )
        yield slurm


def _configure(slurm: Slurm) -> None:
    controller = f"{slurm.controller.name}({slurm.controller.address})"
    lines = [_CONFIGURATION.format(controller=controller, folder=slurm.folder)]
    for node in slurm.nodes:
        (slurm.folder / f"spool-{node.name}").mkdir()
        lines.append(f"NodeName={node.name} NodeAddr={node.address} CPUs={_CPUS} RealMemory=4000\n")
    (slurm.folder / "slurm.conf").write_text("".join(lines))
    (slurm.folder / "state").mkdir()
    key = slurm.folder / "munge.key"
    key.touch(0o400)
    key.write_bytes(secrets.token_bytes(128))


def _daemons(slurm: Slurm) -> Iterator[tuple[Host, list[str]]]:
    files = {"socket": "socket", "key-file": "key", "pid-file": "pid", "log-file": "log"}
    files["seed-file"] = "seed"
    options = [f"--{name}={slurm.folder}/munge.{end}" for name, end in files.items()]
    yield slurm.controller, ["munged", "--foreground", *options]
    yield slurm.controller, ["slurmctld", "-D"]
    for node in slurm.nodes:
        yield node, ["slurmd", "-D", "-N", node.name]


def _states(slurm: Slurm) -> str:
    try:
        return slurm.run("sinfo", "--noheader", "--format=%t %D").strip()
    except OSError:  # nobody answers yet
        return ""


def _end(process: subprocess.Popen[bytes]) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _environ(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:  # it has ended
        return {}
