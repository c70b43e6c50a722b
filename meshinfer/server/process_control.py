"""One life of a server process, as its parent sees it: calls, answers, and the end."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import pickle
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any

from meshinfer.errors import PeerLostError, TransportError
from meshinfer.inference.remote_errors import decode_exception
from meshinfer.server.lifetime import describe_exit, end_of_process
from meshinfer.server.process_child import READY, run_server
from meshinfer.server.setup import ServerSetup

__all__ = ["ServerProcess", "interrupts_held_back"]

logger = logging.getLogger("meshinfer.server")

_EXIT_SECONDS = 3.0
"""For a process that has shut its server down to leave."""
_REAPING_SECONDS = 1.0


class ServerProcess:
    """Starts the process; the methods are for any thread.

    One thread waits for answers and for the end, another one writes, so that a process that does not read holds no
    caller up.

    Args:
        context: of :mod:`multiprocessing`.
        setup: what the process serves.
        version: of the policy at first.
    """

    def __init__(self, context: Any, setup: ServerSetup, version: int) -> None:
        self.policy_version = version
        self.exitcode: int | None = None
        self._pending: dict[int, futures.Future[Any]] = {READY: futures.Future()}
        self._ready = self._pending[READY]
        self._identifiers = itertools.count(READY + 1)
        self._lock = threading.Lock()
        self._unsent: dict[int, bytes] = {}
        self._outbox: SimpleQueue[int | None] = SimpleQueue()
        self._ended = threading.Event()
        self._stopping = False
        self._reaped = False
        self._owner = os.getpid()
        self._connection, self._process = _start(context, setup)
        self.pid: int = self._process.pid
        self._writer = threading.Thread(
            target=self._write, name="meshinfer-process-writer", daemon=True
        )
        self._watcher = threading.Thread(
            target=self._watch, name="meshinfer-process-watcher", daemon=True
        )
        self._writer.start()
        self._watcher.start()

    @property
    def ended(self) -> bool:
        """Whether the process has gone."""
        return self._ended.is_set()

    @property
    def is_ready(self) -> bool:
        """Whether the server serves, as far as is known."""
        return not self.ended and self._ready.done() and self._ready.exception() is None

    def wait_until_ready(self, timeout: float) -> None:
        """Wait until it serves.

        Args:
            timeout: seconds.

        Raises:
            TimeoutError: it does not yet.
            PeerLostError: the process has ended.
            Exception: what the policy factory, or the server's construction, raised.
        """
        if not futures.wait([self._ready], timeout).done:
            raise TimeoutError(
                f"the server process (pid {self.pid}) was not ready within {timeout:g} s and has been"
                " killed; is policy_factory still at work? Raise startup_timeout"
            )
        self._ready.result()

    def call(self, function: Callable[..., Any], *arguments: Any, timeout: float) -> Any:
        """What ``function(server, *arguments)`` returns in the process, or raises there.

        Args:
            function: one of :mod:`~meshinfer.server.requests`.
            arguments: picklable.
            timeout: seconds.

        Raises:
            TimeoutError: no answer yet; what was asked may still happen.
            PeerLostError: the process has ended.
        """
        identifier, answer = self._post(function, arguments)
        if not futures.wait([answer], timeout).done:
            with self._lock:
                self._pending.pop(identifier, None)
                self._unsent.pop(identifier, None)  # it may be large, and the next one comes
            raise TimeoutError(
                f"the server process (pid {self.pid}) did not answer {function.__name__} within"
                f" {timeout:g} s, and is alive"
            )
        return answer.result()

    def stop(self, timeout: float) -> None:
        """End it: in good order if it can, by SIGKILL otherwise. Returns when it has gone.

        Args:
            timeout: seconds for the batch that is being computed.
        """
        self._stopping = True
        # where the garbage collector came by: a thread cannot wait for itself
        if threading.current_thread() in (self._watcher, self._writer):
            return self.kill()
        if self.is_ready:
            with contextlib.suppress(PeerLostError):  # it was faster
                self._post(None, (timeout,))
        if self._ready.done():
            self._ended.wait(timeout + _EXIT_SECONDS)
        if not self.ended:
            if self.is_ready:
                logger.warning("the server process (pid %d) did not stop and is killed", self.pid)
            self.kill()
        self._watcher.join()

    def kill(self) -> None:
        """SIGKILL, if there still is a process."""
        self._stopping = True
        with self._lock:
            if not self._reaped:
                self._process.kill()

    def __str__(self) -> str:
        if self.ended:
            return self._epitaph()
        return f"the server process (pid {self.pid}) {'serves' if self.is_ready else 'is starting'}"

    def _epitaph(self) -> str:
        return f"the server process (pid {self.pid}) {describe_exit(self.exitcode)}"

    def _post(
        self, function: Callable[..., Any] | None, arguments: Any
    ) -> tuple[int, futures.Future[Any]]:
        answer: futures.Future[Any] = futures.Future()
        if self._owner != os.getpid():
            raise TransportError(
                f"this server belongs to process {self._owner}: use its clients here, not itself"
            )
        identifier = next(self._identifiers)
        data = pickle.dumps((identifier, function, arguments), pickle.HIGHEST_PROTOCOL)
        with self._lock:
            if self.ended:
                raise PeerLostError(str(self))
            self._pending[identifier], self._unsent[identifier] = answer, data
        self._outbox.put(identifier)
        return identifier, answer

    def _write(self) -> None:
        try:
            while (identifier := self._outbox.get()) is not None:
                with self._lock:
                    data = self._unsent.pop(identifier, None)
                if data is not None:
                    self._connection.send_bytes(data)
        except OSError as error:
            logger.debug("the server process does not read any more: %s", str(error))

    def _watch(self) -> None:
        end = _end_of(self.pid)
        ended = self._process.sentinel if end is None else end
        listening = True
        while ended not in wait([ended, *[self._connection] * listening]):
            listening = self._hear()
        while listening and self._connection.poll():
            listening = self._hear()
        self._bury()
        if end is not None:
            os.close(end)

    def _hear(self) -> bool:
        """Take one answer; ``False`` when there will be none any more."""
        try:
            identifier, value, failure, version = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            return False
        with self._lock:
            answer = self._pending.pop(identifier, None)
        if failure is None:
            self.policy_version = version
        if answer is not None and failure is None:
            answer.set_result(value)
        elif answer is not None:
            answer.set_exception(decode_exception(failure))
        return True

    def _bury(self) -> None:
        with self._lock:
            self.exitcode = _reap(self._process)
            self._reaped = True
        started = self._ready.done() and self._ready.exception() is None
        expected = self._stopping or not started  # start() tells
        logger.log(logging.DEBUG if expected else logging.WARNING, "%s", self._epitaph())
        with self._lock:
            self._ended.set()
            lost, self._pending = self._pending, {}
        self._outbox.put(None)
        _wake_writer(self._connection)
        self._writer.join()
        self._connection.close()
        for identifier, answer in lost.items():
            when = " before it was ready; see its output" if identifier == READY else ""
            answer.set_exception(PeerLostError(f"{self}{when}"))


def _start(context: Any, setup: ServerSetup) -> tuple[Connection, Any]:
    ours, theirs = context.Pipe()
    try:
        process = context.Process(target=run_server, args=(theirs, setup), name="meshinfer-server")
        with interrupts_held_back(context):
            process.start()
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return ours, process


@contextlib.contextmanager
def interrupts_held_back(context: Any) -> Iterator[None]:
    """The new process does not see Ctrl-C before it has learnt to ignore it.

    Not for a fork server, which this call may start: it would pass the mask on to every other process.
    """
    method = context.get_start_method()
    if method == "forkserver":
        yield
        return
    if method == "spawn":
        resource_tracker.ensure_running()  # it unblocks SIGINT when it has started
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end_of(pid: int) -> int | None:
    try:
        return end_of_process(pid)
    except ProcessLookupError:  # a fork server was told already; so is the sentinel
        return None


def _reap(process: Any) -> int | None:
    """The exit code of a process that has ended; ``None`` if somebody else has taken it and keeps it."""
    process.join()
    deadline = time.monotonic() + _REAPING_SECONDS
    while process.exitcode is None and time.monotonic() < deadline:
        process.join(0.01)  # another thread, which looked at all children, is about to note it
    exitcode: int | None = process.exitcode
    if exitcode is not None:
        process.close()
    return exitcode


def _wake_writer(connection: Connection) -> None:
    """A writer that waits for room in the pipe has nobody to wait for, though somebody may have inherited it."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as end:
        end.shutdown(socket.SHUT_RDWR)
