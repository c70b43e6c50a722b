"""Clients in processes: a few workers that are started once and run one function after the other."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import threading
import traceback
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from meshinfer.inference.protocol import InferenceTransport
from meshinfer.testing.harness import ClientRun, TransportHarness, run_reporting

__all__ = [
    "ProcessHarness",
    "ProcessRun",
    "RemoteTraceback",
    "Worker",
    "WorkerPool",
    "pickled_error",
    "rebuilt_error",
]

_SECONDS_TO_EXIT = 5.0
_PRELOADED = ("meshinfer.testing.preloaded",)


class RemoteTraceback(Exception):
    """Cause of an exception that a client raised in its process: how it looked there."""


class WorkerPool:
    """Processes for the clients of one harness or of several. A context manager.

    Args:
        size: processes that :meth:`replenish` keeps ready; more are started when they are needed.
        start_method: ``"forkserver"``, which imports torch once, or ``"spawn"``. With ``"fork"`` no process is kept
            ready: each is forked for one function, of the process as it is then, and inherits the client.
        preload: modules for the fork server, which has an effect until that starts.
    """

    def __init__(
        self,
        size: int = 4,
        start_method: str = "forkserver",
        preload: Sequence[str] = _PRELOADED,
    ) -> None:
        self._context: Any = multiprocessing.get_context(start_method)
        self._preload = list(preload) if start_method == "forkserver" else []
        self._forks = start_method == "fork"
        self._size = 0 if self._forks else size
        self._lock = threading.Lock()
        self._workers: list[Worker] = []
        self._idle: list[Worker] = []

    def run(self, *call: Any) -> ClientRun:
        """Run a function with its arguments: ``run(function, *args)``."""
        if self._forks:
            with self._lock:
                self._bury()
                worker = Worker(self._context)
                self._workers.append(worker)
                return worker.start_with(call)
        task = pickle.dumps(call)
        with self._lock:
            self._bury()
            worker = self._idle.pop() if self._idle else self._hire()
        return worker.assign(task)

    def replenish(self) -> None:
        """Replace workers that were killed or still run what a failed check left, so that all are idle."""
        with self._lock:
            for worker in self._workers:
                if worker not in self._idle:
                    worker.kill()
            self._bury()
            while len(self._idle) < self._size:
                self._idle.append(self._hire())

    def close(self) -> None:
        """End all workers. Idempotent."""
        with self._lock:
            for worker in self._workers:
                worker.end(politely=worker in self._idle)
            self._workers.clear()
            self._idle.clear()

    def __enter__(self) -> WorkerPool:
        self.replenish()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _hire(self) -> Worker:
        if self._preload:
            self._context.set_forkserver_preload(self._preload)
        worker = self._make(self._rest)
        worker.start()
        self._workers.append(worker)
        return worker

    def _make(self, rest: Callable[[Worker], None]) -> Worker:
        return Worker(self._context, rest)

    def _rest(self, worker: Worker) -> None:
        with self._lock:
            self._idle.append(worker)

    def _bury(self) -> None:
        dead = [worker for worker in self._workers if not worker.is_alive]
        for worker in dead:
            worker.end(politely=False)
            self._workers.remove(worker)
        self._idle = [worker for worker in self._idle if worker not in dead]


class ProcessHarness(TransportHarness):
    """Clients in processes that share nothing with this one. A context manager.

    Args:
        factory: importable; see :class:`~meshinfer.testing.harness.TransportHarness`.
        workers: a pool, which stays the caller's and may serve several harnesses, or the size of an own one.
        start_method: of an own pool; see :class:`WorkerPool`.
        capabilities: as for :class:`~meshinfer.testing.harness.TransportHarness`.
    """

    crosses_processes = True

    def __init__(
        self,
        factory: Callable[..., InferenceTransport],
        *,
        workers: WorkerPool | int = 4,
        start_method: str = "forkserver",
        **capabilities: Any,
    ) -> None:
        super().__init__(factory, **capabilities)
        self._own = not isinstance(workers, WorkerPool)
        self._pool = WorkerPool(workers, start_method) if isinstance(workers, int) else workers

    def run_client(self, function: Callable[..., Any], client: Any, *args: Any) -> ClientRun:
        """Hand the call to an idle worker; see :meth:`TransportHarness.run_client`."""
        return self._pool.run(function, client, *args)

    def replenish(self) -> None:
        """See :meth:`WorkerPool.replenish`."""
        self._pool.replenish()

    def close(self) -> None:
        """End the workers of an own pool. Idempotent."""
        if self._own:
            self._pool.close()

    def __enter__(self) -> ProcessHarness:
        self.replenish()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ProcessRun(ClientRun):
    """For harnesses: what a worker runs now."""

    def __init__(self, worker: Worker) -> None:
        super().__init__()
        self._worker = worker

    def kill(self) -> None:
        """See :meth:`~meshinfer.testing.harness.ClientRun.kill`."""
        self._worker.kill()


class _ForkedRun(ProcessRun):
    """The only run of its process, which is gone when the result is here."""

    def result(self, timeout: float) -> Any:
        try:
            return super().result(timeout)
        finally:
            if self._finished:
                self._worker.await_end()


class Worker:
    """For harnesses: one process, the pipe to it, and the thread that reads what it says."""

    def __init__(self, context: Any, rest: Callable[[Worker], None] | None = None) -> None:
        self._context = context
        self._rest = rest
        self._run: ClientRun | None = None
        self._closed = False

    def start(self, call: tuple[Any, ...] | None = None) -> None:
        """With a ``call``, for that only."""
        self._connection, theirs = self._context.Pipe()
        self._process = self._context.Process(
            target=work, args=(theirs, call), name="conformance-worker", daemon=True
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # a fork beside threads is meant
            self._process.start()
        theirs.close()
        self._reader = threading.Thread(
            target=self._read, name="conformance-worker-reader", daemon=True
        )
        self._reader.start()

    def await_start(self) -> None:
        """Until it can be given something to do."""

    def start_with(self, call: tuple[Any, ...]) -> ClientRun:
        """Start for this ``call`` only."""
        run = self._run = _ForkedRun(self)
        self.start(call)
        return run

    @property
    def is_alive(self) -> bool:
        """Whether it can be given something to do."""
        return bool(self._process.is_alive())

    def assign(self, task: bytes) -> ClientRun:
        """Run a pickled call."""
        run = self._run = ProcessRun(self)
        self._connection.send_bytes(task)
        return run

    def kill(self) -> None:
        """SIGKILL its process; returns when that has gone."""
        self._process.kill()
        self._process.join(_SECONDS_TO_EXIT)

    def await_end(self) -> None:
        """Until its process has gone."""
        if not self._closed:
            self._process.join(_SECONDS_TO_EXIT)

    def end(self, *, politely: bool) -> None:
        """End it for good, and free what it holds here."""
        if politely and self.is_alive:
            self._connection.send_bytes(b"")
            self._process.join(_SECONDS_TO_EXIT)
        self.kill()
        self._reader.join(_SECONDS_TO_EXIT)
        self._connection.close()
        self._process.close()
        self._closed = True

    def _read(self) -> None:
        while True:
            try:
                kind, value = pickle.loads(self._connection.recv_bytes())
            except (EOFError, OSError):
                break
            self._hear(kind, value)
        if self._run is not None:
            self._take_run().finish(None, ChildProcessError("the client's process has died"))

    def _hear(self, kind: str, value: Any) -> None:
        if kind == "report":
            assert self._run is not None
            return self._run.deliver(value)
        run = self._take_run()
        if self._rest is not None:
            self._rest(self)
        if kind == "returned":
            run.finish(value)
        else:
            run.finish(None, rebuilt_error(*value))

    def _take_run(self) -> ClientRun:
        """The run, which is not ours any more: the traceback of its error holds whatever the check held."""
        run, self._run = self._run, None
        assert run is not None
        return run


def rebuilt_error(data: bytes, text: str) -> BaseException:
    """For harnesses: a :func:`pickled_error`, with ``text``, its traceback, as its cause."""
    try:
        error: BaseException = pickle.loads(data)
    except Exception as reason:  # a class may do anything while it is rebuilt
        error = RuntimeError(f"a client raised what cannot be rebuilt here ({reason})")
    error.__cause__ = RemoteTraceback(text)
    return error


def work(connection: Connection, call: tuple[Any, ...] | None) -> None:
    """The worker's main loop: run what comes, until nothing more does; or one ``call``."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    if call is not None:
        connection.send_bytes(_perform(connection, lambda: call))
        return
    while task := _next(connection):
        connection.send_bytes(_perform(connection, partial(pickle.loads, task)))


def _next(connection: Connection) -> bytes:
    try:
        return connection.recv_bytes()
    except EOFError:  # the parent has gone
        return b""


def _perform(connection: Connection, get_call: Callable[[], tuple[Any, ...]]) -> bytes:
    def deliver(value: object) -> None:
        connection.send_bytes(pickle.dumps(("report", value)))

    try:
        return pickle.dumps(("returned", run_reporting(deliver, *get_call())))
    except BaseException as error:  # whatever it is, the check raises it
        text = "".join(traceback.format_exception(error))
        return pickle.dumps(("raised", (pickled_error(error), text)))


def pickled_error(error: BaseException) -> bytes:
    """For harnesses: what a client has raised, or else what can be said of it."""
    try:
        return pickle.dumps(error)
    except Exception as reason:  # a class may do anything while it is pickled
        return pickle.dumps(RuntimeError(f"{error!r} (cannot be pickled: {reason})"))
