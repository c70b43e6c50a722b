"""Clients in Ray actors: a few that are made once and run one function after the other."""

from __future__ import annotations

import importlib
import os
import pickle
import queue
import select
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from meshinfer.inference.protocol import InferenceTransport
from meshinfer.testing.harness import ClientRun, run_reporting
from meshinfer.testing.processes import (
    ProcessHarness,
    ProcessRun,
    Worker,
    WorkerPool,
    pickled_error,
)

__all__ = ["ActorPool", "RayHarness"]

_SECONDS_TO_START = 100.0
_SECONDS_TO_EXIT = 10.0


class ActorPool(WorkerPool):
    """Ray actors on this host for the clients of one harness or of several. A context manager.

    Ray is initialised by who makes it, and its actors can import what the functions need.

    Args:
        size: actors that :meth:`replenish` keeps ready; more are made when they are needed.
    """

    def __init__(self, size: int = 3) -> None:
        super().__init__(size)

    def replenish(self) -> None:
        """See :meth:`~meshinfer.testing.processes.WorkerPool.replenish`; those that are new start together."""
        super().replenish()
        with self._lock:
            for worker in self._idle:
                worker.await_start()

    def _make(self, rest: Callable[[Worker], None]) -> Worker:
        return _ActorWorker(rest)


class RayHarness(ProcessHarness):
    """Clients in Ray actors of this host. A context manager.

    Args:
        factory: importable; see :class:`~meshinfer.testing.harness.TransportHarness`.
        workers: a pool, which stays the caller's and may serve several harnesses, or the size of an own one.
        capabilities: as for :class:`~meshinfer.testing.harness.TransportHarness`.
    """

    def __init__(
        self,
        factory: Callable[..., InferenceTransport],
        *,
        workers: ActorPool | int = 3,
        **capabilities: Any,
    ) -> None:
        pool = ActorPool(workers) if isinstance(workers, int) else workers
        super().__init__(factory, workers=pool, **capabilities)
        self._own = isinstance(workers, int)


class Workplace:
    """What an actor is made of."""

    def pid(self) -> int:
        """Of its process."""
        return os.getpid()

    def run(self, task: bytes) -> Iterator[bytes]:
        """Call a function with its arguments: what it reports, and then what it returns or raises."""
        said: queue.SimpleQueue[tuple[str, Any]] = queue.SimpleQueue()
        thread = threading.Thread(target=_perform, args=(task, said), name="conformance-client")
        thread.start()
        kind = "report"
        while kind == "report":
            kind, value = said.get()
            yield pickle.dumps((kind, value))
        thread.join()


def _perform(task: bytes, said: queue.SimpleQueue[tuple[str, Any]]) -> None:
    def deliver(value: object) -> None:
        said.put(("report", value))

    try:
        result = run_reporting(deliver, *pickle.loads(task))
        said.put(("returned", result))
    except BaseException as error:  # whatever it is, the check raises it
        text = "".join(traceback.format_exception(error))
        said.put(("raised", (pickled_error(error), text)))


class _ActorWorker(Worker):
    """One actor, and a thread for each run that reads what it says."""

    def __init__(self, rest: Callable[[Worker], None]) -> None:
        super().__init__(None, rest)
        self._ray: Any = importlib.import_module("ray")
        self._reading: threading.Thread | None = None

    def start(self, call: tuple[Any, ...] | None = None) -> None:
        """See :meth:`~meshinfer.testing.processes.Worker.start`."""
        self._actor = self._ray.remote(Workplace).options(num_cpus=0).remote()
        self._starting: Any = self._actor.pid.remote()

    def await_start(self) -> None:
        if self._starting is not None:
            self._pid = self._ray.get(self._starting, timeout=_SECONDS_TO_START)
            self._life = os.pidfd_open(self._pid)
            self._starting = None

    @property
    def is_alive(self) -> bool:
        self.await_start()
        return not self._closed and not select.select([self._life], [], [], 0)[0]

    def assign(self, task: bytes) -> ClientRun:
        run = self._run = ProcessRun(self)
        said = self._actor.run.options(num_returns="streaming").remote(task)
        self._reading = threading.Thread(
            target=partial(self._listen, said), name="conformance-actor-reader", daemon=True
        )
        self._reading.start()
        return run

    def kill(self) -> None:
        if self.is_alive:
            os.kill(self._pid, signal.SIGKILL)
            self.await_end()

    def await_end(self) -> None:
        if not self._closed:
            select.select([self._life], [], [], _SECONDS_TO_EXIT)

    def end(self, *, politely: bool) -> None:
        if politely and self.is_alive:
            self._ray.kill(self._actor)
            self.await_end()
        self.kill()
        if self._reading is not None:
            self._reading.join(_SECONDS_TO_EXIT)
        os.close(self._life)
        self._closed = True

    def _listen(self, said: Any) -> None:
        try:
            for reference in said:
                self._hear(*pickle.loads(self._ray.get(reference)))
        except self._ray.exceptions.RayActorError:
            if self._run is not None:
                self._take_run().finish(None, ChildProcessError("the client's actor has died"))
