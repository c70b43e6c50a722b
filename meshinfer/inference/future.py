"""The future that clients hand out."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Generator
from typing import Any, Protocol

from tensordict import TensorDictBase

from meshinfer.errors import TransportError
from meshinfer.inference.protocol import InferenceFuture

__all__ = ["Flight", "ReplyFuture", "mark", "reply_by"]


_settling = threading.RLock()
"""Guards the one transition that a receiving and a cancelling thread may race for; held for a few instructions.

The collector may run between them, and end a client that settles its own futures: hence not a plain lock.
"""


class FutureOwner(Protocol):
    """What a future needs of the connection that will fulfil it."""

    patience: float

    def check_alive(self) -> None:
        """Fail all that is in flight when the server does not answer any more."""

    def forget(self, future: ReplyFuture) -> None:
        """The future was cancelled: drop its request if it has not left yet."""


class ReplyFuture:
    """The reply to one request.

    Every waiter waits on its own account: none is held up by another, and ``done`` never waits. ``await future``
    works inside asyncio.
    """

    __slots__ = ("__weakref__", "_callbacks", "_error", "_finished", "_gate", "_owner", "_result")

    def __init__(self, owner: FutureOwner) -> None:
        self._owner: FutureOwner | None = owner
        self._gate = (
            threading.Lock()
        )  # held until the reply is here: a lock wakes a waiter faster than a condition
        self._gate.acquire()
        self._finished = False
        self._result: TensorDictBase | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[ReplyFuture], object]] = []

    def done(self) -> bool:
        """Whether the reply, or an error, is here."""
        return self._finished

    def result(self, timeout: float | None = None) -> TensorDictBase:
        """The reply.

        Args:
            timeout: seconds to wait. ``None`` waits while the server is alive, which is checked whenever the
                transport's ``timeout`` passes without a reply.

        Raises:
            TimeoutError: no reply yet; the request stays in flight and ``result`` may be called again.
            PeerLostError, ServerClosedError, ClosedError: it will never come.
            Exception: what the policy raised, with the remote traceback as its cause.
        """
        if not self._finished:
            self._wait(timeout)
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What :meth:`result` would raise, or ``None``; raises :class:`TimeoutError` like it."""
        if not self._finished:
            self._wait(timeout)
        return self._error

    def cancel(self) -> bool:
        """Give the reply up. A request that has not left yet never does; a later reply is dropped."""
        owner = self._owner
        if owner is None or not self.fail(TransportError("the request was cancelled")):
            return False
        owner.forget(self)
        return True

    def add_done_callback(self, callback: Callable[[ReplyFuture], object]) -> None:
        """Call ``callback(self)`` once the reply is here, at once if it is; it runs in the receiving thread.

        Short ones only: the client's next reply waits for it, and over NCCL the server gives up who waits for too long.
        """
        with _settling:
            if not self._finished:
                self._callbacks.append(callback)
                return
        callback(self)

    @property
    def patience(self) -> float:
        """Seconds after which a waiter without a deadline asks whether the server is alive."""
        owner = self._owner
        return 0.0 if owner is None else owner.patience

    def check_alive(self) -> None:
        """Ask now; the future fails if the server does not answer any more."""
        owner = self._owner
        if owner is not None:
            owner.check_alive()

    def fulfil(self, result: TensorDictBase) -> bool:
        """For transports: the reply has come. ``False`` when the future was settled before."""
        return self._settle(result, None)

    def fail(self, error: BaseException) -> bool:
        """For transports: the reply will not come."""
        return self._settle(None, error)

    def _settle(self, result: TensorDictBase | None, error: BaseException | None) -> bool:
        with _settling:
            if self._finished:
                return False
            self._result, self._error = result, error
            self._finished = True
            self._owner = None
        self._gate.release()
        for callback in self._callbacks:
            callback(self)
        return True

    def _wait(self, timeout: float | None) -> None:
        owner = self._owner
        if owner is None:
            return
        if timeout is None:
            while not self._gate.acquire(timeout=owner.patience):
                owner.check_alive()
        elif not self._gate.acquire(timeout=max(timeout, 0.0)):
            raise TimeoutError(f"no reply within {timeout:g} s; the request is still in flight")
        self._gate.release()  # for the next waiter

    def __await__(self) -> Generator[Any, None, TensorDictBase]:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Future[None] = loop.create_future()
        self.add_done_callback(lambda _: loop.call_soon_threadsafe(mark, arrived))
        yield from arrived
        return self.result()


class Flight(ReplyFuture):
    """A future that knows its number."""

    __slots__ = ("identifier",)

    def __init__(self, owner: FutureOwner, identifier: int) -> None:
        super().__init__(owner)
        self.identifier = identifier


def reply_by(deadline: float, future: InferenceFuture, timeout: float) -> TensorDictBase:
    """The reply, for a client that is called and not given a future.

    Args:
        deadline: on the clock of ``time.monotonic()``, in seconds.
        future: of the request, which is given up when the deadline has passed.
        timeout: what the caller asked for, for the error.

    Raises:
        TimeoutError: no reply by then.
        Exception: what the policy raised, which may be a :class:`TimeoutError` of its own.
    """
    try:
        return future.result(deadline - time.monotonic())
    except TimeoutError:
        if not future.cancel():  # it has come meanwhile, or is what the policy raised
            return future.result(0)
        raise TimeoutError(f"no reply within {timeout:g} s; the request is given up") from None


def mark(arrived: asyncio.Future[None]) -> None:
    """In the loop's thread: what an ``await`` waits for has come, unless it was cancelled."""
    if not arrived.done():
        arrived.set_result(None)
