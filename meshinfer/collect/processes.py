"""Workers that are processes on this host."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch

from meshinfer.collect.workers import Begin, Failed, Ready, work
from meshinfer.inference.remote_errors import encode_exception
from meshinfer.semaphore import Semaphore
from meshinfer.server.process import check_may_start
from meshinfer.server.process_child import end_with_parent
from meshinfer.server.process_control import interrupts_held_back

__all__ = ["ProcessWorker", "portable"]

logger = logging.getLogger("meshinfer.collect")


def portable(name: str, function: Callable[[], Any]) -> Callable[[], Any]:
    """``function`` in a form that pickles: as it is, or by value where no module has it under its name.

    Raises:
        TypeError: it cannot be sent to another process at all.
    """
    try:
        pickle.dumps(function)
        return function
    except Exception as error:  # any class may raise anything while it is pickled
        reason = str(error)
    import cloudpickle  # type: ignore[import-untyped]  # comes with tensordict

    try:
        return partial(_call_pickled, cloudpickle.dumps(function))
    except Exception as error:
        raise TypeError(
            f"{name} cannot be sent to another process ({reason}; {error}); give a function at the top level of a "
            "module, or functools.partial of one"
        ) from error


def _call_pickled(data: bytes) -> Any:
    return pickle.loads(data)()


class _PipeLink:
    """Over a connection; as bytes, since multiprocessing would move tensors to shared memory."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def report(self, report: Ready | Failed) -> None:
        """Tell the driver."""
        try:
            self._connection.send_bytes(pickle.dumps(report))
        except OSError as error:
            logger.debug("no report to the driver: %s", str(error))

    def order(self) -> Begin | None:
        """Wait for the driver."""
        try:
            found: Begin | None = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            return None
        return found


def _run(connection: Connection, factory: bytes) -> None:
    """Main function of the process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    end_with_parent()
    torch.set_num_threads(1)
    link = _PipeLink(connection)
    try:
        make = pickle.loads(factory)
    except BaseException as error:
        link.report(Failed(encode_exception(error), "being imported", False))
    else:
        work(link, make)


class ProcessWorker:
    """One worker in a process; a :class:`~meshinfer.collect.crew.Worker`.

    Args:
        index: of the environment.
        factory: makes it, in the process; picklable.
        context: of :mod:`multiprocessing`.
    """

    def __init__(self, index: int, factory: Callable[[], Any], context: Any) -> None:
        check_may_start(context)
        self._owner = os.getpid()
        self._connection, theirs = context.Pipe()
        try:
            self._process = context.Process(
                target=_run, args=(theirs, pickle.dumps(factory)), name=f"meshinfer-env-{index}"
            )
            with interrupts_held_back(context):
                self._process.start()
        except BaseException:
            self._connection.close()
            raise
        finally:
            theirs.close()

    @property
    def ended(self) -> bool:
        """Whether the process has ended."""
        return not self._process.is_alive()

    @property
    def exitcode(self) -> int | None:
        """As :mod:`multiprocessing` has it."""
        code: int | None = self._process.exitcode
        return code

    @property
    def pid(self) -> int:
        """Of the process."""
        pid: int = self._process.pid
        return pid

    def report(self, timeout: float = 0.0) -> Ready | Failed | None:
        """The next report, ``None`` without one for ``timeout`` seconds, or any more."""
        try:
            if self._connection.poll(timeout):
                found: Ready | Failed = pickle.loads(self._connection.recv_bytes())
                return found
        except (EOFError, OSError):
            self._process.join(timeout)
        return None

    def begin(self, order: Begin, bell: Semaphore) -> None:
        """Have it collect."""
        with contextlib.suppress(BrokenPipeError):  # that it has ended is seen elsewhere
            self._connection.send_bytes(pickle.dumps(order))

    def dismiss(self) -> None:
        """Let it leave if it still waits for an order, or to report."""
        self._connection.close()

    def join(self, timeout: float) -> bool:
        """Wait for its end: whether it has ended."""
        self._process.join(timeout)
        return self.ended

    def kill(self) -> bool:
        """SIGKILL: whether it has ended."""
        if self._owner == os.getpid():
            self._process.kill()
            self._process.join(_REAPING_SECONDS)
        return self.ended


_REAPING_SECONDS = 5.0
