"""The server in an actor of Ray or of monarch: what the actor's methods do."""

from __future__ import annotations

import os
import pickle
import socket
import threading
from dataclasses import dataclass
from typing import Any

from meshinfer.server import requests
from meshinfer.server.lifetime import this_machine
from meshinfer.server.setup import ServerSetup
from meshinfer.server.thread import ThreadInferenceServer

__all__ = ["ServerHost", "Whereabouts"]


@dataclass(frozen=True)
class Whereabouts:
    """The process in which a server lives."""

    pid: int
    host: str
    machine: str
    """See :func:`~meshinfer.server.lifetime.this_machine`."""

    @classmethod
    def here(cls) -> Whereabouts:
        """Of this process."""
        return cls(os.getpid(), socket.gethostname(), this_machine())


class ServerHost:
    """Owns the server in its actor's process. Each answer is ``(turn, value, failure, policy_version)``, pickled.

    ``turn`` counts the answers, so that the owner knows which of two versions is the later one.
    """

    def __init__(self) -> None:
        self._server: ThreadInferenceServer | None = None
        self._lock = threading.Lock()
        self._turn = 0

    def where(self) -> Whereabouts:
        """This process."""
        return Whereabouts.here()

    def start(self, setup: ServerSetup) -> bytes:
        """Make the server and let it serve. The answer has the address of its transport, where it has one."""
        try:
            server = setup.build().start()
        except BaseException as error:  # whatever it is, the owner raises it
            return pickle.dumps((0, *requests.encode_failure(error)))
        self._server = server
        return self._answer(server, lambda it: getattr(it.transport, "address", None), ())

    def ask(self, message: bytes) -> bytes:
        """Answer a pickled question, see :mod:`~meshinfer.server.requests`."""
        function, arguments = pickle.loads(message)
        return self._answer(self._started(), function, arguments)

    def end(self, timeout: float) -> bytes:
        """Shut the server down; ``timeout`` seconds for the batch in hand."""
        return self._answer(self._started(), ThreadInferenceServer.shutdown, (timeout,))

    def _started(self) -> ThreadInferenceServer:
        if self._server is None:
            raise RuntimeError("no server was started in this actor")
        return self._server

    def _answer(self, server: ThreadInferenceServer, function: Any, arguments: Any) -> bytes:
        value, failure, _ = requests.encode_answer(server, function, arguments)
        with self._lock:
            self._turn += 1
            return pickle.dumps((self._turn, value, failure, server.policy_version))
