"""The monarch actor in which a server lives. Imports monarch: import this module when it is needed."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from monarch.actor import Actor, endpoint

from meshinfer.server.actor_host import ServerHost

__all__ = ["ServerActor"]

_answered: Callable[[Any], Any] = endpoint(explicit_response_port=True)


class ServerActor(Actor):  # type: ignore[misc]
    """No endpoint waits, so that the actor hears that it shall end whatever the policy does.

    What may take long is done by threads, which have the actor's context: a transport that is opened there belongs
    to the actor.
    """

    def __init__(self) -> None:
        self._host = ServerHost()
        self._watching: list[Any] = []
        self._turns: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._take_turns, name="meshinfer-turns", daemon=True).start()

    @_answered
    def where(self, port: Any) -> None:
        """The actor's process."""
        port.send(self._host.where())

    @_answered
    def watch(self, port: Any) -> None:
        """Answered when the server has ended in good order."""
        self._watching.append(port)

    @_answered
    def start_serving(self, port: Any, setup: Any) -> None:
        """Make the server."""
        self._put_off(lambda: port.send(self._host.start(setup)))

    @_answered
    def ask(self, port: Any, message: bytes) -> None:
        """Answer a question at once."""
        port.send(self._host.ask(message))

    @_answered
    def ask_in_turn(self, port: Any, message: bytes) -> None:
        """Answer a question that waits for the batch in hand."""
        self._put_off(lambda: port.send(self._host.ask(message)))

    @_answered
    def end(self, port: Any, timeout: float) -> None:
        """Shut the server down."""

        def work() -> None:
            answer = self._host.end(timeout)
            for watching in self._watching:
                watching.send(None)
            port.send(answer)

        context = contextvars.copy_context()
        threading.Thread(
            target=context.run, args=(work,), name="meshinfer-end", daemon=True
        ).start()

    def _put_off(self, work: Callable[[], None]) -> None:
        context = contextvars.copy_context()
        self._turns.put(lambda: context.run(work))

    def _take_turns(self) -> None:
        while True:
            self._turns.get()()
