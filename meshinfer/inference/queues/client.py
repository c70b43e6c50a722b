"""The client of every queue between processes."""

from __future__ import annotations

import math
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any, Final

from tensordict import TensorDictBase

from meshinfer.arguments import as_seconds
from meshinfer.errors import ClosedError, PeerLostError, RefusedError, ServerClosedError
from meshinfer.inference.future import ReplyFuture, reply_by
from meshinfer.inference.interaction import current_interaction
from meshinfer.inference.queues.address import Address
from meshinfer.inference.queues.codec import Packer
from meshinfer.inference.queues.connection import Connection
from meshinfer.inference.queues.forks import let_go_in_forks
from meshinfer.inference.queues.locate import NotThereError, Whereabouts
from meshinfer.inference.queues.proof import connect

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["MPClient", "QueueClient"]

_RETURN_SECONDS: Final = 5.0
_FIRST_PAUSE: Final = 0.002
_LONGEST_PAUSE: Final = 0.1


class QueueClient:
    """One process's way to the policy server.

    Connects on first use, waiting for the server if it does not listen yet. Picklable: the copy connects on its own,
    and so does that of a fork. May be shared by threads. After the server is lost the next call looks for it again.

    Args:
        whereabouts: of the server, and the secret.
        timeout: seconds for connecting, and for the server to take a request.
    """

    def __init__(self, whereabouts: Whereabouts, timeout: float) -> None:
        self._whereabouts = whereabouts
        self._timeout = timeout
        self._packer = Packer("request")
        self._closed = False
        self._stale: Address | None = None
        self._reset()

    def __call__(self, payload: TensorDictBase, timeout: float | None = None) -> TensorDictBase:
        """The policy's reply to ``payload``.

        Args:
            payload: a TensorDict or tensorclass of any content that can be pickled, tensors on the CPU; unchanged.
            timeout: seconds for everything, connecting included; ``None`` waits while the server is alive.

        Returns:
            An independent TensorDict, as the policy made it, and the policy version.

        Raises:
            TypeError: the payload cannot travel; nothing was sent.
            TimeoutError: the request is given up.
            RefusedError, ServerClosedError, PeerLostError, ClosedError: see :mod:`meshinfer.errors`.
            Exception: what the policy raised.
        """
        if timeout is None:
            return self.submit(payload).result()
        deadline = time.monotonic() + as_seconds("timeout", timeout, zero=True)
        return reply_by(deadline, self.submit(payload, timeout), timeout)

    def submit(self, payload: TensorDictBase, timeout: float | None = None) -> ReplyFuture:
        """Send ``payload`` and return with a future; errors as in :meth:`__call__`.

        Args:
            payload: copied before this returns.
            timeout: seconds for connecting, and for the server to take the request, which it does at once unless it is
                stopped or this client has 64 MiB of unanswered requests there; the transport's by default.
        """
        if self._closed:
            self._check_open()
        deadline = time.monotonic() + (self._timeout if timeout is None else timeout)
        message = self._packer.pack(payload)
        connection = self._connection
        if connection is None or connection.ended:
            connection = self._connect(deadline)
        return connection.submit(message, current_interaction(), deadline)

    @property
    def in_flight(self) -> int:
        """Requests of this client that have neither been answered nor given up."""
        return 0 if self._connection is None else self._connection.in_flight

    def close(self) -> None:
        """Leave the server; requests in flight raise :class:`~meshinfer.errors.ClosedError`. Idempotent."""
        self._closed = True
        self._leaving.set()  # whoever connects gives up
        self._finalizer()

    def __enter__(self) -> Self:
        self._check_open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        connection = self._connection
        state = "not connected" if connection is None or connection.ended else "connected"
        return f"{type(self).__name__}({self._whereabouts}, {'closed' if self._closed else state})"

    def __reduce__(self) -> tuple[Any, ...]:
        self._check_open()
        return type(self), (self._whereabouts, self._timeout)

    def forked(self) -> None:
        """In a forked child: begin anew."""
        self._finalizer.detach()
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._leaving = threading.Event()
        self._connection: Connection | None = None
        self._holder: list[Connection] = []
        self._finalizer = weakref.finalize(self, _leave, self._holder)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this client was closed; make a new one with transport.client()")

    def _connect(self, deadline: float) -> Connection:
        if not self._lock.acquire(timeout=max(deadline - time.monotonic(), 0.0)):
            raise TimeoutError(
                f"another thread was still connecting to {self._whereabouts} when time ran out"
            )
        try:
            self._check_open()
            ended = self._connection
            if ended is not None and not ended.ended:
                return ended  # another thread was first
            made = self._join(deadline) if ended is None else self._rejoin(ended, deadline)
            self._connection = made
            self._holder[:] = [made]
            if self._closed:
                _leave(self._holder)
                self._check_open()
            return made
        finally:
            self._lock.release()

    def _join(self, deadline: float, patience: float = math.inf) -> Connection:
        """Connect, waiting for somebody to listen.

        Args:
            deadline: ``time.monotonic()`` at which to give up.
            patience: the same, while nobody promises that somebody will.
        """
        let_go_in_forks(self)
        began, pause = time.monotonic(), _FIRST_PAUSE
        while True:
            try:
                return self._try(deadline)
            except NotThereError as error:
                end = deadline if error.coming else min(deadline, patience)
                left = end - time.monotonic()
                if left <= 0:
                    raise TimeoutError(
                        f"no policy server listened at {self._whereabouts} for {end - began:.1f} s; is it started?"
                        f" ({error})"
                    ) from error
            if self._leaving.wait(min(pause, left)):
                self._check_open()
            pause = min(2 * pause, _LONGEST_PAUSE)

    def _rejoin(self, ended: Connection, deadline: float) -> Connection:
        """Look for the server again, briefly; after a goodbye only once."""
        ended.close()
        error, until = ended.error, time.monotonic() + _RETURN_SECONDS
        if isinstance(error, ServerClosedError):
            try:
                return self._try(min(deadline, until))
            except (NotThereError, PeerLostError, TimeoutError):
                raise error from None
        try:
            return self._join(deadline, until)
        except TimeoutError as late:
            raise PeerLostError(f"{error}; looked for it again: {late}") from late

    def _try(self, deadline: float) -> Connection:
        """One attempt, or two when the first was made where the server had been.

        Raises:
            NotThereError: another attempt may find it.
            Exception: none will.
        """
        deadline = max(deadline, time.monotonic() + _FIRST_PAUSE)
        found = self._whereabouts.find(deadline, self._stale)
        try:
            return self._reach(found, deadline)
        except (NotThereError, RefusedError) as error:
            self._stale = found
            fresh = self._whereabouts.find(deadline, found)
            if fresh == found:
                raise error from None
            return self._reach(fresh, deadline)

    def _reach(self, address: Address, deadline: float) -> Connection:
        attempt = time.monotonic() + self._whereabouts.attempt_seconds
        try:
            connected = connect(address, min(deadline, attempt))
        except PeerLostError as error:
            raise NotThereError(str(error)) from error
        except TimeoutError as error:
            if deadline <= attempt:
                raise
            raise NotThereError(str(error)) from error
        return Connection(connected, address, self._timeout, self._whereabouts.account)


class MPClient(QueueClient):
    """The client of a :class:`~meshinfer.inference.queues.transport.MPTransport`."""


def _leave(holder: list[Connection]) -> None:
    """Close without the client, when it is collected or the interpreter exits."""
    while holder:
        holder.pop().close()
