"""The harness's end of a conductor: commands with a deadline, resource counts, the kill."""

from __future__ import annotations

import contextlib
import json
import multiprocessing.connection
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from .peers import IN_COLLECTORS, IN_WEIGHTS
from .suites import Entry

REPOSITORY = Path(__file__).resolve().parent.parent
_START_SECONDS = 180.0
_START_SECONDS_PER_CLIENT = 5.0
_STOP_SECONDS = 90.0
_ANSWER_SECONDS = 30.0
_ERROR_LINES = 12


class ContestantFailed(RuntimeError):
    """A peer raised, died or missed a deadline; the message says which and shows its words."""


class Contestant:
    """One conductor with its server and clients, whose processes and temporary files `kill` ends."""

    def __init__(self, entry: Entry, python: str) -> None:
        self.entry = entry
        self.versions: dict[str, str] = {}
        self._connection, theirs = multiprocessing.Pipe()
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `kill`)
        self._scratch = tempfile.TemporaryDirectory(prefix="bench", ignore_cleanup_errors=True)
        self._processes: set[psutil.Process] = set()
        what = (entry.peer, entry.transport, entry.workload.name, str(theirs.fileno()))
        self._process = subprocess.Popen(
            [python, "-m", "benchmarks.conductor", *what],
            cwd=REPOSITORY,
            env=_environment(self._scratch.name),
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
        theirs.close()

    def start(self) -> dict[str, float]:
        """Bring server and clients up; returns what each client costs the server process."""
        clients = self.entry.workload.clients
        seconds = _START_SECONDS + _START_SECONDS_PER_CLIENT * clients
        launched = self._call("launch", seconds)
        self.versions = launched["versions"]
        server = psutil.Process(launched["server_pid"])
        alone = _resources(server)
        self._call("connect", seconds, clients=1)
        first = _resources(server)
        self._call("connect", seconds, clients=clients)
        self._processes |= self._family()
        if self.entry.transport in (*IN_COLLECTORS, *IN_WEIGHTS):
            return {}
        return _per_client(alone, first, _resources(server), clients)

    def measure(self, seconds: float) -> dict[str, float]:
        """One burst of `seconds`; returns requests, rate (1/s), percentiles (us), other cores.

        `other_cores` is how much processor time other processes of the machine took meanwhile,
        over the burst's length: a burst beside a busy neighbour says little.
        """
        began, busy = time.monotonic(), self._foreign_seconds()
        answer = self._call("measure", seconds + _ANSWER_SECONDS, seconds=seconds)
        busy = self._foreign_seconds() - busy
        return {**answer, "other_cores": max(0.0, busy / (time.monotonic() - began))}

    def stop(self) -> None:
        """The orderly end, which is part of what is under test."""
        self._call("stop", _STOP_SECONDS)
        # What it would remove at exit, named semaphores for one, stays if it is killed on the way.
        descriptor = os.pidfd_open(self._process.pid)
        try:
            if not multiprocessing.connection.wait([descriptor], _STOP_SECONDS):
                raise ContestantFailed(f"did not exit within {_STOP_SECONDS:.0f} s")
        finally:
            os.close(descriptor)

    def kill(self) -> None:
        """End every process that was started, whatever state it is in; harmless when repeated."""
        if self._process.returncode is not None:
            return
        # Not all of Ray's are of the group, and none has a parent any more once the conductor is gone.
        processes = self._processes | self._family()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(processes, timeout=_STOP_SECONDS)
        self._connection.close()
        self._output.close()
        self._scratch.cleanup()

    def _call(self, name: str, timeout: float, **arguments: Any) -> dict[str, Any]:
        try:
            self._connection.send_bytes(json.dumps([name, arguments]).encode())
            if not self._connection.poll(timeout):
                raise ContestantFailed(f"`{name}` took more than {timeout:.0f} s\n{self._words()}")
            answer = json.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionError) as exc:
            raise ContestantFailed(f"died during `{name}`\n{self._words()}") from exc
        if "failed" in answer:
            raise ContestantFailed(f"`{name}` failed\n{answer['failed']}\n{self._words()}")
        return answer

    def _foreign_seconds(self) -> float:
        own = []
        for process in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                own.append(process.cpu_times())
        total = psutil.cpu_times()
        # Interrupts are left out: the bytes that the peer itself moves cause them.
        everyone = total.user + total.system + total.nice + getattr(total, "steal", 0.0)
        return everyone - sum(times.user + times.system for times in own)

    def _family(self) -> set[psutil.Process]:
        try:
            leader = psutil.Process(self._process.pid)
            return {leader, *leader.children(recursive=True)}
        except psutil.NoSuchProcess:
            return set()

    def _words(self) -> str:
        self._output.seek(0)
        lines = self._output.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_ERROR_LINES:])


def _environment(scratch: str) -> dict[str, str]:
    """What a conductor inherits: actors find this package, and files that none removes go with `scratch`."""
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
        "TMPDIR": scratch,
        "RAY_USAGE_STATS_ENABLED": "0",
    }


def _resources(server: psutil.Process) -> dict[str, int]:
    # Threads and buffers of the last handshake may still be on their way out.
    time.sleep(0.2)
    return {
        "threads": server.num_threads(),
        "descriptors": server.num_fds(),
        "memory_kib": server.memory_info().rss // 1024,
    }


def _per_client(
    alone: dict[str, int], first: dict[str, int], full: dict[str, int], clients: int
) -> dict[str, float]:
    cost = {key: (full[key] - alone[key]) / clients for key in ("threads", "descriptors")}
    # The first request pays for the policy's own first pass, so memory is counted from there on.
    if clients > 1:
        cost["memory_kib"] = (full["memory_kib"] - first["memory_kib"]) / (clients - 1)
    return cost
