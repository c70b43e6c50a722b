"""Finding a server through the Ray actor that it is in, and what Ray says of an actor that has died."""

from __future__ import annotations

import threading
import time
from typing import Any, Final, Protocol, cast

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError

from meshinfer.errors import PeerLostError
from meshinfer.inference.queues.address import Address, TcpAddress
from meshinfer.inference.queues.locate import NotThereError
from meshinfer.inference.ray.serving import listening_here

__all__ = ["ActorPlace", "HeldActor", "NamedActor"]

_ATTEMPT_SECONDS: Final = 5.0
_ACCOUNT_SECONDS: Final = 4.0
_SLICE_SECONDS: Final = 0.5
_PAUSE_SECONDS: Final = 0.1


class Actor(Protocol):
    """Picklable; ``str`` of it names the actor."""

    def handle(self) -> Any:
        """Ray's handle.

        Raises:
            NotThereError: there is no such actor now.
        """

    def died(self, reason: str) -> Exception:
        """What to raise when Ray says that the actor is dead, and why."""


class NamedActor:
    """Whichever actor has the name now.

    Args:
        name: of the actor.
        namespace: of the name.
    """

    def __init__(self, name: str, namespace: str) -> None:
        self.name = name
        self.namespace = namespace
        self._handle: Any = None

    def __str__(self) -> str:
        return f"the Ray actor {self.name!r}" if self._handle is None else _described(self._handle)

    def __reduce__(self) -> tuple[Any, ...]:
        return NamedActor, (self.name, self.namespace)

    def handle(self) -> Any:
        """See :meth:`Actor.handle`."""
        if self._handle is None:
            try:
                self._handle = ray.get_actor(self.name, self.namespace)
            except ValueError as error:
                raise NotThereError(f"there is no Ray actor named {self.name!r}") from error
        return self._handle

    def died(self, reason: str) -> Exception:
        """Another one may take the name."""
        self._handle = None
        return NotThereError(reason)


class HeldActor:
    """One actor, with all its lives.

    Args:
        handle: Ray's, or what it was pickled to, where it cannot be rebuilt yet.
    """

    def __init__(self, handle: Any = None, pickled: tuple[Any, ...] | None = None) -> None:
        self._handle = handle
        self._pickled = pickled

    def __str__(self) -> str:
        return "a Ray actor" if self._handle is None else _described(self._handle)

    def __reduce__(self) -> tuple[Any, ...]:
        return _held, (self._handle.__reduce__() if self._pickled is None else self._pickled,)

    def handle(self) -> Any:
        """See :meth:`Actor.handle`."""
        if self._pickled is not None:
            rebuild, arguments = self._pickled
            self._handle, self._pickled = rebuild(*arguments), None
        return self._handle

    def died(self, reason: str) -> Exception:
        """There is no other one."""
        return PeerLostError(reason)


def _held(pickled: tuple[Any, ...]) -> HeldActor:
    """At once where that is possible: Ray counts those who hold a handle. A process without Ray keeps it for later."""
    held = HeldActor(pickled=pickled)
    if ray.is_initialized():
        held.handle()
    return held


class ActorPlace:
    """A server in a Ray actor, which is asked where that listens.

    Args:
        actor: which.
        server: name of the server in that actor.
        known: where it listened when this was made.
    """

    attempt_seconds = _ATTEMPT_SECONDS

    def __init__(self, actor: Actor, server: str, known: TcpAddress | None = None) -> None:
        self._actor = actor
        self._server = server
        self._known = known
        self._asked: Any = None

    def __str__(self) -> str:
        where = "" if self._known is None else f" at {self._known}"
        return f"{self._actor}{where}"

    def __reduce__(self) -> tuple[Any, ...]:
        return ActorPlace, (self._actor, self._server, self._known)

    def find(self, deadline: float, stale: Address | None) -> Address:
        """Where the server was last, unless that is ``stale``: then the actor is asked."""
        known = self._known
        if known is not None and known != stale:
            return known
        try:
            found = self._known = self._ask(deadline)
        except NotThereError as error:
            if known is None or error.coming:
                raise
            raise NotThereError(f"nobody listens at {known}, and {error}") from error
        return found

    def account(self) -> str:
        """What Ray says of the actor, which it may learn a moment after us."""
        deadline = time.monotonic() + _ACCOUNT_SECONDS
        while True:
            try:
                self._ask(deadline)
            except NotThereError as error:
                if error.coming and time.monotonic() < deadline:
                    time.sleep(_PAUSE_SECONDS)
                    continue
                return f"; {error}"
            except PeerLostError as error:
                return f"; {error}"
            return f"; {self._actor} lives"

    def _ask(self, deadline: float) -> TcpAddress:
        """See :meth:`~meshinfer.inference.queues.locate.Whereabouts.find`; returns soon, whatever the deadline."""
        if not ray.is_initialized():  # otherwise Ray starts a cluster of its own
            reason = f"this process is not connected to Ray, which would know {self._actor}"
            raise NotThereError(reason) if self._known is not None else PeerLostError(reason)
        try:
            asked = self._asked
            if asked is None:
                asked = self._actor.handle().__ray_call__.remote(listening_here, self._server)
            self._asked = asked
            left = max(deadline - time.monotonic(), 0.0)
            found = ray.get(asked, timeout=min(left, _SLICE_SECONDS))
            self._asked = None
        except GetTimeoutError as error:  # the answer may still come
            raise NotThereError(
                f"{self._actor} has not told yet where its server listens; is it starting, or busy?",
                coming=True,
            ) from error
        except BaseException as error:
            self._asked = None
            understood = self._understood(error)
            if understood is None:
                raise
            raise understood from error
        if found is None:
            raise NotThereError(f"{self._actor} has no open RayTransport named {self._server!r}")
        return cast(TcpAddress, found)

    def _understood(self, error: BaseException) -> Exception | None:
        """What an error of Ray's means; ``None`` for one that is none of ours, such as that of a signal's handler."""
        if isinstance(error, ActorUnavailableError):
            return NotThereError(_on_one_line(error), coming=True)
        if isinstance(error, RayActorError):
            return self._actor.died(f"{self._actor} is dead: {_on_one_line(error)}")
        if isinstance(error, SystemExit):  # also what Ray raises in a thread when it shuts down
            ours = threading.current_thread() is not threading.main_thread()
        else:
            ours = isinstance(error, Exception) and not ray.is_initialized()
        if not ours:
            return None
        return PeerLostError(f"Ray was shut down here while it was asked for {self._actor}")


def _described(handle: Any) -> str:
    return f"the Ray {str(handle)[0].lower()}{str(handle)[1:]}"


def _on_one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
