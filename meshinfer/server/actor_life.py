"""One life of a server in an actor, as its owner sees it."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import Any

from meshinfer.errors import PeerLostError, TransportError
from meshinfer.server import requests
from meshinfer.server.actor_host import Whereabouts
from meshinfer.server.lifetime import end_of_process, this_machine

__all__ = ["ActorLife"]

logger = logging.getLogger("meshinfer.server")

_MEET_SECONDS = 5.0
"""For word of where an actor is that has started."""
_EXIT_SECONDS = 3.0
"""For an actor whose server has shut down to say so."""
_GONE_SECONDS = 10.0
"""For the process of an actor that was killed to be gone."""


class ActorLife(ABC):
    """A :class:`~meshinfer.server.life.ServerLife` by way of a runtime's messages. For any thread.

    Args:
        version: of the policy at first.
        what: the actor, for errors.
    """

    exitcode: None = None
    """No runtime tells it."""
    owns_process: bool = True
    """Whether the actor's process ends with it."""

    def __init__(self, version: int, what: str) -> None:
        self.policy_version = version
        self.address: Any = None
        """Of the server's transport, where it has one."""
        self._what = what
        self._where: Whereabouts | None = None
        self._process: int | None = None
        self._turn = 0
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._cause = ""
        self._ready = False
        self._stopping = False
        self._owner = os.getpid()
        self._whereabouts = threading.Event()

    # How the runtime does it.

    @abstractmethod
    def _await_start(self, timeout: float) -> bytes:
        """The host's answer to ``start``; errors as for :meth:`_exchange`."""

    @abstractmethod
    def _exchange(self, method: str, argument: Any, timeout: float, turn: bool = False) -> bytes:
        """What the host's ``method`` answers; ``turn`` when others must not wait behind it.

        Raises:
            TimeoutError: no answer.
            PeerLostError: the actor has died; :meth:`bury` was called.
        """

    @abstractmethod
    def kill(self) -> None:
        """End the actor at once. Does not wait."""

    @abstractmethod
    def _may_wait(self) -> bool:
        """Whether this thread is not one by which the runtime speaks to us."""

    def _hint(self) -> str:
        return "is policy_factory still at work? Raise startup_timeout"

    # What the owner does.

    @property
    def ended(self) -> bool:
        """Whether the actor has gone."""
        return self._ended.is_set()

    @property
    def is_ready(self) -> bool:
        """Whether the server serves, as far as is known."""
        return self._ready and not self.ended

    @property
    def pid(self) -> int | None:
        """Of the actor's process, where that is; ``None`` until it is known."""
        return None if self._where is None else self._where.pid

    @property
    def host(self) -> str | None:
        """Name of the host on which it is; ``None`` until it is known."""
        return None if self._where is None else self._where.host

    def wait_until_ready(self, timeout: float) -> None:
        """Wait until it serves; see :class:`~meshinfer.server.life.ServerLife`."""
        try:
            answer = self._await_start(timeout)
        except TimeoutError:
            raise TimeoutError(
                f"{self._name()} was not ready within {timeout:g} s and has been ended; {self._hint()}"
            ) from None
        except PeerLostError as error:
            raise PeerLostError(f"{error}, before it was ready; see its output") from error
        self.address = self._taken(answer)
        self._whereabouts.wait(
            _MEET_SECONDS
        )  # told to another thread, which may not have had its turn
        self._ready = True

    def call(self, function: Callable[..., Any], *arguments: Any, timeout: float) -> Any:
        """What ``function(server, *arguments)`` returns there; see :class:`~meshinfer.server.life.ServerLife`."""
        self._check_owner()
        message = pickle.dumps((function, arguments), pickle.HIGHEST_PROTOCOL)
        if self.ended:
            raise PeerLostError(str(self))
        try:
            answer = self._exchange("ask", message, timeout, turn=requests.needs_a_turn(function))
        except TimeoutError:
            raise TimeoutError(
                f"{self._name()} did not answer {function.__name__} within {timeout:g} s, and is"
                " alive as far as is known"
            ) from None
        return self._taken(answer)

    def stop(self, timeout: float) -> None:
        """End it; see :class:`~meshinfer.server.life.ServerLife`."""
        self._stopping = True
        if self._owner != os.getpid():
            return
        if not self._may_wait():  # the garbage collector came by in a thread of the runtime's
            self.kill()
            return
        if self.is_ready and not self._end_in_good_order(timeout):
            self._kill_process()  # which may be stopped, and not hear the runtime either
            self._ended.wait(
                _EXIT_SECONDS
            )  # the runtime knows better what to do once it has noticed
        self.kill()
        if not self._ended.wait(_GONE_SECONDS):
            self.bury("did not tell that it has ended")
        self._wait_until_gone()

    def bury(self, cause: str) -> None:
        """It has ended, because of ``cause``. Idempotent: the first one counts."""
        with self._lock:
            if self._ended.is_set():
                return
            self._cause = "has been shut down" if self._stopping and self._ready else cause
            self._ended.set()
        self._whereabouts.set()  # or it will never be known
        expected = self._stopping or not self._ready  # start() tells
        logger.log(logging.DEBUG if expected else logging.WARNING, "%s", self)

    def __str__(self) -> str:
        if self.ended:
            return f"{self._name()} {self._cause}"
        return f"{self._name()} {'serves' if self._ready else 'is starting'}"

    def _name(self) -> str:
        where = self._where
        return self._what if where is None else f"{self._what} (pid {where.pid} on {where.host})"

    def _end_in_good_order(self, timeout: float) -> bool:
        try:
            self._taken(self._exchange("end", timeout, timeout + _EXIT_SECONDS))
        except (PeerLostError, TimeoutError) as error:
            logger.warning("%s did not stop by itself and is killed: %s", self._name(), str(error))
            return False
        return True

    def _met(self, where: Whereabouts) -> None:
        """The actor has told where it is."""
        self._where = where
        if self.owns_process and where.machine == this_machine():
            with contextlib.suppress(ProcessLookupError):
                self._process = end_of_process(where.pid)
        self._whereabouts.set()

    def _kill_process(self) -> None:
        """Where it ends with the actor, and can be seen from here."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._process, signal.SIGKILL)
        if wait([self._process], _GONE_SECONDS):
            self.bury("was killed")  # the runtime may take its time to notice

    def _wait_until_gone(self) -> None:
        """Also one that the runtime has given up, because it did not answer."""
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        if not wait([process], _GONE_SECONDS):
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process, signal.SIGKILL)
            wait([process], _GONE_SECONDS)
        os.close(process)

    def _taken(self, data: bytes) -> Any:
        turn, *answer = pickle.loads(data)
        value, failure, version = answer
        with self._lock:
            if failure is None and turn > self._turn:
                self._turn, self.policy_version = turn, version
        return requests.decode_answer((value, failure, version))

    def _check_owner(self) -> None:
        if self._owner != os.getpid():
            raise TransportError(
                f"this server belongs to process {self._owner}: use its clients here, not itself"
            )
