"""Clients in actors of monarch, each in a process of its own on this host."""

from __future__ import annotations

import os
import secrets
import select
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from meshinfer.inference.protocol import InferenceTransport
from meshinfer.monarch_faults import Fault, watch_faults
from meshinfer.optional import load_monarch
from meshinfer.testing.harness import ClientRun, TransportHarness
from meshinfer.testing.processes import rebuilt_error

__all__ = ["MonarchHarness", "MonarchWorkers"]

_SECONDS_TO_START = 120.0
_SECONDS_TO_EXIT = 60.0
_ENVIRONMENT = {"OMP_NUM_THREADS": "1"}


class MonarchWorkers:
    """Actors for the clients of one harness or of several. A context manager.

    Args:
        size: actors that :meth:`replenish` keeps ready; more are started when they are needed.
    """

    def __init__(self, size: int = 4) -> None:
        self._size = size
        self._token = secrets.token_hex(4)
        self._lock = threading.RLock()
        self._workers: list[_Worker] = []
        self._hired = 0
        self._forget_faults: Callable[[], None] | None = None

    def run(self, *call: Any) -> ClientRun:
        """Run a function with its arguments: ``run(function, *args)``."""
        with self._lock:
            self._bury()
            idle = [worker for worker in self._workers if worker.is_idle]
            worker = idle[0] if idle else self._hire()
            return worker.assign(call)

    def replenish(self) -> None:
        """Replace workers that were killed or still run what a failed check left, so that all are idle."""
        with self._lock:
            for worker in self._workers:
                if not worker.is_idle:
                    worker.kill()
            self._bury()
            hired = [self._hire() for _ in range(self._size - len(self._workers))]
        for worker in hired:
            worker.await_start()

    def spawn(self, index: int, kind: type, *args: Any) -> Any:
        """A further actor of class ``kind`` in the process of the worker with that index; whoever asks stops it."""
        worker = self._workers[index]
        return worker.procs.spawn(f"{worker.name}_{kind.__name__}", kind, *args)

    def procs(self, index: int) -> Any:
        """The proc mesh, of one process, of the worker with that index."""
        return self._workers[index].procs

    def kill(self, index: int) -> None:
        """SIGKILL the process of the worker with that index; returns when it has gone."""
        self._workers[index].kill()

    def close(self) -> None:
        """End all workers. Idempotent."""
        with self._lock:
            workers, self._workers = self._workers, []
        with ThreadPoolExecutor(max(len(workers), 1), "conformance-end") as threads:
            list(threads.map(_Worker.end, workers))
        if self._forget_faults is not None:
            self._forget_faults()
            self._forget_faults = None

    def __enter__(self) -> MonarchWorkers:
        self.replenish()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hire(self) -> _Worker:
        if self._forget_faults is None:
            load_monarch("MonarchWorkers")
            self._forget_faults = watch_faults(self._token, self._hear_of)
        self._hired += 1
        worker = _Worker(f"conformance_{self._token}_{self._hired}")
        self._workers.append(worker)
        return worker

    def _hear_of(self, fault: Fault) -> None:
        for worker in list(self._workers):
            if fault.process_died and fault.mesh.startswith(worker.name):
                worker.died()

    def _bury(self) -> None:
        for worker in [worker for worker in self._workers if worker.is_dead]:
            worker.end()
            self._workers.remove(worker)


class MonarchHarness(TransportHarness):
    """Clients in actors of monarch. A context manager.

    Args:
        factory: importable; see :class:`~meshinfer.testing.harness.TransportHarness`.
        workers: a pool, which stays the caller's and may serve several harnesses, or the size of an own one.
        capabilities: as for :class:`~meshinfer.testing.harness.TransportHarness`.
    """

    crosses_processes = True

    def __init__(
        self,
        factory: Callable[..., InferenceTransport],
        *,
        workers: MonarchWorkers | int = 4,
        **capabilities: Any,
    ) -> None:
        super().__init__(factory, **capabilities)
        self._own = not isinstance(workers, MonarchWorkers)
        self._workers = MonarchWorkers(workers) if isinstance(workers, int) else workers

    def run_client(self, function: Callable[..., Any], client: Any, *args: Any) -> ClientRun:
        """Hand the call to an idle actor; see :meth:`TransportHarness.run_client`."""
        return self._workers.run(function, client, *args)

    def replenish(self) -> None:
        """See :meth:`MonarchWorkers.replenish`."""
        self._workers.replenish()

    def close(self) -> None:
        """End the actors of an own pool. Idempotent."""
        if self._own:
            self._workers.close()

    def __enter__(self) -> MonarchHarness:
        self.replenish()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _ActorRun(ClientRun):
    def __init__(self, worker: _Worker) -> None:
        super().__init__()
        self._worker = worker

    def kill(self) -> None:
        self._worker.kill()


class _Worker:
    """One actor in a process of its own, and the thread that reads what it says."""

    def __init__(self, name: str) -> None:
        from monarch.actor import Channel, default_bootstrap_cmd, this_host

        from meshinfer.testing.monarch_worker import ClientActor

        self.name = name
        self._run: ClientRun | None = None
        self._dead = threading.Event()
        self._port, self._receiver = Channel[Any].open()
        command = default_bootstrap_cmd().with_env(_ENVIRONMENT | {"PYTHONPATH": _python_path()})
        self.procs = this_host().spawn_procs(
            per_host={"procs": 1}, name=name, bootstrap_command=lambda _: command
        )
        self._actor = self.procs.spawn(name, ClientActor, self._port)
        self._pid = self._actor.pid.call_one()
        self._reader = threading.Thread(
            target=self._read, name="conformance-worker-reader", daemon=True
        )
        self._reader.start()

    @property
    def is_idle(self) -> bool:
        return self._run is None and not self.is_dead

    @property
    def is_dead(self) -> bool:
        return self._dead.is_set()

    def await_start(self) -> int:
        return int(self._pid.get(timeout=_SECONDS_TO_START))

    def assign(self, call: tuple[Any, ...]) -> ClientRun:
        run = self._run = _ActorRun(self)
        self._actor.perform.broadcast(*call)
        return run

    def kill(self) -> None:
        """SIGKILL; returns when the process has gone."""
        if not self.is_dead:
            pid = self.await_start()
            descriptor = os.pidfd_open(pid)
            try:
                os.kill(pid, signal.SIGKILL)
                ended, _, _ = select.select([descriptor], [], [], _SECONDS_TO_EXIT)
            finally:
                os.close(descriptor)
            assert ended, f"process {pid} of {self.name} does not die"
            self.died()

    def died(self) -> None:
        self._dead.set()
        self._port.send(("died", None))

    def end(self) -> None:
        if not self.is_dead:
            self.procs.stop().get(timeout=_SECONDS_TO_EXIT)
            self.died()
        self._reader.join(_SECONDS_TO_EXIT)

    def _read(self) -> None:
        kind = ""
        while kind != "died":
            kind, value = self._receiver.recv().get()
            if kind == "report":
                assert self._run is not None
                self._run.deliver(value)
            elif self._run is not None:
                self._take_run().finish(*_outcome(kind, value))

    def _take_run(self) -> ClientRun:
        """The run, which is not ours any more: the traceback of its error holds whatever the check held."""
        run, self._run = self._run, None
        assert run is not None
        return run


def _python_path() -> str:
    """So that whatever can be imported here can be there."""
    return os.pathsep.join(filter(None, sys.path))


def _outcome(kind: str, value: Any) -> tuple[Any, BaseException | None]:
    if kind == "returned":
        return value, None
    if kind == "raised":
        return None, rebuilt_error(*value)
    return None, ChildProcessError("the client's process has died")
