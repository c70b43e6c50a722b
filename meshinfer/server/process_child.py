"""What runs in the process of a :class:`~meshinfer.server.process.ProcessInferenceServer`.

Each message from the parent is ``(identifier, call, arguments)``, answered by ``(identifier, value, failure,
policy_version)``. ``call`` is one of the functions at the end of this file, or ``None``: shut down.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any, NoReturn

import torch
from tensordict import TensorDictBase
from tensordict.nn import InteractionType

from meshinfer.inference.protocol import InferenceTransport
from meshinfer.inference.remote_errors import encode_exception
from meshinfer.server.lifetime import end_of_process
from meshinfer.server.process_weights import PackedTensor, unpack_weights
from meshinfer.server.server import InferenceServer
from meshinfer.server.stats import ServerStats

__all__ = ["READY", "ServerSetup", "health", "prepare", "run_server", "stats", "update_weights"]

logger = logging.getLogger("meshinfer.server")

READY = 0
"""Identifier of the first answer, which nobody asked for: the server serves, or could not be made."""

_TERMINATED = 128 + signal.SIGTERM
_SHUTDOWN_SECONDS = 5.0


@dataclass(frozen=True)
class ServerSetup:
    """What a server is made of. Picklable.

    Args:
        policy_factory: pickled; called without arguments in the server's process.
        open_transport: makes the server's side of the transport there.
        arguments: further ones of :class:`~meshinfer.server.server.InferenceServer`, by name.
        forked: whether the process shares the memory of its parent, and with it the remains of its threads.
    """

    policy_factory: bytes
    open_transport: Callable[[], InferenceTransport]
    arguments: Mapping[str, Any]
    forked: bool

    def build(self) -> InferenceServer:
        """The policy first: no client finds a server that has none."""
        if self.forked:
            # the parent's pool of threads is not here, and would be waited for
            torch.set_num_threads(1)
        policy = self._factory()()
        transport = self.open_transport()
        try:
            return InferenceServer(policy, transport, share_weights=True, **self.arguments)
        except BaseException:
            transport.close()
            raise

    def _factory(self) -> Callable[[], Any]:
        try:
            factory: Callable[[], Any] = pickle.loads(self.policy_factory)
        except (ImportError, AttributeError) as error:
            raise TypeError(
                f"policy_factory cannot be imported in the server's process ({error}); define it at"
                " the top level of a module that can be imported there"
            ) from error
        return factory


def run_server(connection: Connection, setup: ServerSetup) -> None:
    """Main function of the process: serve until told to stop, or until the parent has gone."""
    # Ctrl-C reaches the whole group; the parent decides
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a forked process has its parent's handler
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    _end_with_parent()
    answers = _Answers(connection)
    try:
        server = setup.build().start()
    except BaseException as error:  # whatever it is, the parent raises it
        answers.send(READY, None, encode_exception(error), 0)
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
        self, identifier: int, server: InferenceServer, call: Callable[..., Any], arguments: Any
    ) -> None:
        """Call, and send what it returns or raises."""
        try:
            value, failure = call(server, *arguments), None
        except Exception as error:
            value, failure = None, encode_exception(error)
        self.send(identifier, value, failure, server.policy_version)

    def send(self, identifier: int, value: Any, failure: bytes | None, version: int) -> None:
        """Send one answer; a parent that has gone is noticed elsewhere."""
        data = pickle.dumps((identifier, value, failure, version))
        try:
            with self._lock:
                self._connection.send_bytes(data)
        except OSError as error:
            logger.debug("no answer to the parent: %s", str(error))


def _obey(
    server: InferenceServer, connection: Connection, answers: _Answers, terminated: int
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
        if call in _NEED_A_TURN:
            patient.put((identifier, call, arguments))
        else:
            answers.give(identifier, server, call, arguments)


def _heed_sigterm() -> int:
    """From now on SIGTERM only makes the returned descriptor readable."""
    noticed, notice = os.pipe()
    signal.signal(signal.SIGTERM, lambda *_: os.write(notice, b"\0"))
    return noticed


def _end_with_parent() -> None:
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


# What the parent may ask.


def stats(server: InferenceServer, reset: bool) -> ServerStats:
    """What has been served."""
    return server.stats(reset)


def health(server: InferenceServer) -> bool:
    """Whether the serving thread runs."""
    return server.is_alive


def update_weights(
    server: InferenceServer, packed: Mapping[str, PackedTensor], version: int | None
) -> int:
    """New parameters and buffers, all or none, between two batches; the version that they have."""
    return server.update_policy_weights_(unpack_weights(packed), version=version)


def prepare(
    server: InferenceServer,
    request_spec: TensorDictBase | None,
    interaction_type: InteractionType | None,
) -> None:
    """Warm the policy up."""
    server.prepare(request_spec, interaction_type=interaction_type)


_NEED_A_TURN = (update_weights, prepare)
"""These wait for the batch that is being computed; whatever else is asked must not wait behind them."""
