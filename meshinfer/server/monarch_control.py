"""One life of a server in a monarch actor."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from meshinfer.errors import PeerLostError
from meshinfer.monarch_faults import Fault
from meshinfer.server.actor_life import ActorLife
from meshinfer.server.setup import ServerSetup

__all__ = ["ServerActorLife"]

logger = logging.getLogger("meshinfer.server")

_PROCESS_DIED = "the process this actor was running on failed"
_STOP_SECONDS = 15.0
_TELLING_SECONDS = 1.0
"""For monarch to say why a process has ended."""
_LOOK_SECONDS = 5.0
_JOIN_SECONDS = 1.0
"""After this the thread ends by itself, once monarch has noticed the death of a process that did not answer."""


class ServerActorLife(ActorLife):
    """Starts the server in an actor that was spawned.

    Args:
        actors: a mesh of one :class:`~meshinfer.server.monarch_actor.ServerActor`.
        setup: what it serves.
        version: of the policy at first.
        name: the actor, for errors.
        procs: the proc mesh in which it is, if that ends with it.
        at_end: called when it has been stopped.
    """

    def __init__(
        self,
        actors: Any,
        setup: ServerSetup,
        version: int,
        *,
        name: str = "the server actor",
        procs: Any = None,
        at_end: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(version, name)
        self._actors = actors
        self._procs = procs
        self.owns_process = procs is not None
        self._at_end = at_end
        self._unfinished = {"watch", "stop"}
        self._killed = False
        self.process_died = False
        """Whether it has ended with its process."""
        self._started = actors.start_serving.call_one(setup)
        self._watcher = threading.Thread(
            target=self._watch,
            args=(actors.where.call_one(), actors.watch.call_one()),
            name="meshinfer-monarch-watcher",
            daemon=True,
        )
        self._watcher.start()

    def kill(self) -> None:
        """End the actor, and its proc where that is ours; a process that does not end by itself is killed."""
        with self._lock:
            if self._killed:
                return
            self._killed = True
        mesh = self._actors if self._procs is None else self._procs
        try:
            mesh.stop("the server ends").get(timeout=_STOP_SECONDS)
        except TimeoutError:
            self._kill_process()
        except (
            Exception
        ) as error:  # what a mesh has failed with; or it is part of one, and ends with that
            logger.debug("%s: %s", self._name(), str(error))
            self.bury("was given up")

    def bury_fault(self, fault: Fault) -> None:
        """It has ended, as monarch told."""
        self.process_died = self.process_died or fault.process_died
        self.bury(f"has died: {fault.cause}")

    def stop(self, timeout: float) -> None:
        """End it."""
        super().stop(timeout)
        if self._owner == os.getpid() and self._may_wait():
            self._watcher.join(_JOIN_SECONDS)
            self._conclude("stop")

    def _conclude(self, part: str) -> None:
        """Monarch tells of faults as long as somebody watches; whoever comes last leaves."""
        with self._lock:
            self._unfinished.discard(part)
            left, self._at_end = (None, self._at_end) if self._unfinished else (self._at_end, None)
        if left is not None:
            left()

    def _await_start(self, timeout: float) -> bytes:
        return self._get(lambda: self._started, timeout)

    def _exchange(self, method: str, argument: Any, timeout: float, turn: bool = False) -> bytes:
        named = getattr(self._actors, "ask_in_turn" if turn else method)
        return self._get(lambda: named.call_one(argument), timeout)

    def _get(self, send: Callable[[], Any], timeout: float) -> bytes:
        try:
            answer: bytes = send().get(timeout=timeout)
        except TimeoutError:
            raise
        except Exception as error:  # also what monarch raises when it is shut down in this process
            self._fail(error)
            raise PeerLostError(str(self)) from error
        return answer

    def _may_wait(self) -> bool:
        return threading.current_thread() is not self._watcher

    def _watch(self, where: Any, end: Any) -> None:
        try:
            self._met(where.get())
            self._watch_process()
            self._await_end(end)
        except Exception as error:  # as in _get
            self._fail(error)
        self.bury("has ended")
        self._conclude("watch")

    def _await_end(self, end: Any) -> None:
        """Until monarch tells, or it is known otherwise: of a process that died monarch may tell late."""
        while not self.ended:
            with contextlib.suppress(TimeoutError):
                end.get(timeout=_LOOK_SECONDS)
                return

    def _fail(self, error: Exception) -> None:
        self.process_died = self.process_died or _PROCESS_DIED in str(error)
        self.bury(_cause(error))

    def _watch_process(self) -> None:
        """On this machine: monarch may take many seconds, but knows more."""
        if self._process is None:
            return
        process = os.dup(self._process)

        def watch() -> None:
            wait([process])
            os.close(process)
            if not self._ended.wait(_TELLING_SECONDS):
                self.process_died = True
                self.bury("has died: its process has ended")

        threading.Thread(target=watch, name="meshinfer-monarch-process", daemon=True).start()


def _cause(error: Exception) -> str:
    """monarch's reason: the last line says what happened, those before it say to whom."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"has died: {lines[-1] if lines else type(error).__name__}"
