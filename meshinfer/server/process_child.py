"""What runs in the process of a :class:`~meshinfer.server.process.ProcessInferenceServer`.

Each message from the parent is ``(identifier, call, arguments)``, answered by ``(identifier, value, failure,
policy_version)``. ``call`` is one of the functions of :mod:`~meshinfer.server.requests`, or ``None``: shut down.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any, NoReturn

from meshinfer.server.lifetime import end_of_process
from meshinfer.server.requests import encode_answer, encode_failure, health, needs_a_turn
from meshinfer.server.setup import ServerSetup
from meshinfer.server.thread import ThreadInferenceServer

__all__ = ["READY", "end_with_parent", "run_server"]

logger = logging.getLogger("meshinfer.server")

READY = 0
"""Identifier of the first answer, which nobody asked for: the server serves, or could not be made."""

_TERMINATED = 128 + signal.SIGTERM
_SHUTDOWN_SECONDS = 5.0


def run_server(connection: Connection, setup: ServerSetup) -> None:
    """Main function of the process: serve until told to stop, or until the parent has gone."""
    # Ctrl-C reaches the whole group; the parent decides
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked process has its parent's handler
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    end_with_parent()
    answers = _Answers(connection)
    try:
        server = setup.build().start()
    except BaseException as error:  # whatever it is, the parent raises it
        answers.send(READY, encode_failure(error))
        raise SystemExit(1) from None
    terminated = _heed_sigterm()
    answers.give(READY, server, health, ())
    code, timeout = _obey(server, connection, answers, terminated)
    try:
        server.shutdown(timeout)
    except TimeoutError as error:
        logger.warning("%s; its process ends", str(error))
        _leave(1)
    raise SystemExit(code)


class _Answers:
    """The way back to the parent, for several threads."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = threading.Lock()

    def give(
        self,
        identifier: int,
        server: ThreadInferenceServer,
        call: Callable[..., Any],
        arguments: Any,
    ) -> None:
        """Call, and send what it returns or raises."""
        self.send(identifier, encode_answer(server, call, arguments))

    def send(self, identifier: int, answer: tuple[Any, bytes | None, int]) -> None:
        """Send one answer; a parent that has gone is noticed elsewhere."""
        data = pickle.dumps((identifier, *answer))
        try:
            with self._lock:
                self._connection.send_bytes(data)
        except OSError as error:
            logger.debug("no answer to the parent: %s", str(error))


def _obey(
    server: ThreadInferenceServer, connection: Connection, answers: _Answers, terminated: int
) -> tuple[int, float]:
    """Do as the parent says; in the end the exit code, and how long the batch in hand may take, in seconds."""
    patient: SimpleQueue[tuple[int, Callable[..., Any], Any]] = SimpleQueue()

    def take_turns() -> None:
        while True:
            identifier, call, arguments = patient.get()
            answers.give(identifier, server, call, arguments)

    threading.Thread(target=take_turns, name="meshinfer-turns", daemon=True).start()
    while True:
        if terminated in wait([connection, terminated]):
            return _TERMINATED, _SHUTDOWN_SECONDS
        try:
            identifier, call, arguments = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            return 0, _SHUTDOWN_SECONDS
        if call is None:
            return 0, arguments[0]
        if needs_a_turn(call):
            patient.put((identifier, call, arguments))
        else:
            answers.give(identifier, server, call, arguments)


def _heed_sigterm() -> int:
    """From now on SIGTERM only makes the returned descriptor readable."""
    noticed, notice = os.pipe()
    signal.signal(signal.SIGTERM, lambda *_: os.write(notice, b"\0"))
    return noticed


def end_with_parent() -> None:
    """However the parent ends, this process ends too, whatever it is doing."""
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        raise RuntimeError("run_server() is for a process that multiprocessing has started")
    ends: list[Any] = [parent.sentinel]
    try:
        ends.append(end_of_process(parent.pid))
    except ProcessLookupError:
        _leave(1)

    def watch() -> None:
        wait([end for end in ends if end is not None])
        _leave(1)

    threading.Thread(target=watch, name="meshinfer-parent", daemon=True).start()


def _leave(code: int) -> NoReturn:
    """Without a word to threads that would not end by themselves."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
