"""Every error that meshinfer raises of its own, as one tree.

::

    MeshInferError
    ├── MeshError            (also ValueError)    the launcher's environment or the rank groups do not fit
    ├── EnvironmentFailedError                    an environment of a collector raised, or its process died
    └── TransportError
        ├── ClosedError                           you closed it, and used it again
        ├── ServerClosedError                     the server said goodbye before it answered
        ├── PeerLostError    (also ConnectionError)   the other process died, froze or was cut off
        ├── RefusedError     (also ConnectionError)   the server turned this client away, and said why
        └── RemoteError                           the policy raised something that cannot be rebuilt here

Waits that run out raise the builtin :class:`TimeoutError`; arguments that cannot work raise :class:`ValueError` or
:class:`TypeError`. An exception of the policy arrives as its own type, with a :class:`RemoteError` as its cause.
"""

from __future__ import annotations

__all__ = [
    "ClosedError",
    "EnvironmentFailedError",
    "MeshError",
    "MeshInferError",
    "PeerLostError",
    "RefusedError",
    "RemoteError",
    "ServerClosedError",
    "TransportError",
]


class MeshInferError(Exception):
    """Base of all errors that are meshinfer's own."""


class MeshError(MeshInferError, ValueError):
    """The launcher's environment is incomplete, or the rank groups do not fit the world."""


class EnvironmentFailedError(MeshInferError):
    """An environment raised, or the process that stepped it has died; what it raised is the cause, where that is known.

    Args:
        env_index: which of the collector's environments.
        message: what happened.
        traceback_text: the worker's formatted traceback, empty when there is none.
        exitcode: of the worker's process, minus the signal's number if it was killed; ``None`` while it ran, and for
            threads.
    """

    def __init__(
        self, env_index: int, message: str, traceback_text: str = "", exitcode: int | None = None
    ) -> None:
        super().__init__(env_index, message, traceback_text, exitcode)
        self.env_index = env_index
        self.message = message
        self.traceback_text = traceback_text
        self.exitcode = exitcode

    def __str__(self) -> str:
        text = f"environment {self.env_index} {self.message}"
        return (
            f"{text}\n\nWorker's traceback:\n{self.traceback_text}" if self.traceback_text else text
        )


class TransportError(MeshInferError):
    """Base of what can go wrong between a client and its server."""


class ClosedError(TransportError):
    """A client, transport or server was used after its own ``close`` or ``shutdown``."""


class ServerClosedError(TransportError):
    """The server shut down in good order before it answered this request."""


class PeerLostError(TransportError, ConnectionError):
    """The other side died, stopped answering, or was replaced; requests in flight are lost."""


class RefusedError(TransportError, ConnectionError):
    """The server did not admit this client: other specs, another version, or another secret."""


class RemoteError(TransportError):
    """What is left of a remote exception that cannot be pickled, or cannot be rebuilt here.

    Args:
        class_name: qualified name of the exception's class at the server.
        message: ``str(exception)`` at the server.
        traceback_text: the formatted remote traceback.
    """

    def __init__(self, class_name: str, message: str, traceback_text: str) -> None:
        super().__init__(class_name, message, traceback_text)
        self.class_name = class_name
        self.message = message
        self.traceback_text = traceback_text

    def __str__(self) -> str:
        return f"{self.class_name}: {self.message}\n\nRemote traceback:\n{self.traceback_text}"
