"""How many requests are in flight, and waiting until one of them is over."""

from __future__ import annotations

import math
import time
import weakref
from collections import deque
from collections.abc import Generator
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any

from tensordict import TensorDictBase

from meshinfer.inference.protocol import InferenceFuture

__all__ = ["BoundedFuture", "Permit", "Room"]

_LOOK_SECONDS = 0.1
"""How long it waits for the oldest request alone, where futures cannot tell that they are done."""
_PATIENCE_SECONDS = 60.0


class Permit:
    """One request's place. Given back once, by whoever finds first that the request is over."""

    __slots__ = ("_held",)

    def __init__(self, free: SimpleQueue[None]) -> None:
        self._held = [free]

    @property
    def released(self) -> bool:
        """Whether it has been given back."""
        return not self._held

    def release(self) -> None:
        """Give it back. Idempotent, in any thread, and in a finalizer."""
        try:
            free = self._held.pop()
        except IndexError:
            return
        free.put(None)


class BoundedFuture:
    """A future that gives its permit back when it is done, and when nobody has it any more."""

    __slots__ = ("__weakref__", "_future", "_permit", "announced")

    def __init__(self, future: InferenceFuture, permit: Permit) -> None:
        self._future = future
        self._permit = permit
        tell = getattr(future, "add_done_callback", None)
        self.announced = tell is not None
        if tell is not None:
            tell(lambda _: permit.release())

    @property
    def over(self) -> bool:
        """Whether the permit has been given back."""
        return self._permit.released

    def done(self) -> bool:
        """As :meth:`~meshinfer.inference.protocol.InferenceFuture.done`."""
        finished = self._future.done()
        if finished:
            self._permit.release()
        return finished

    def result(self, timeout: float | None = None) -> TensorDictBase:
        """As :meth:`~meshinfer.inference.protocol.InferenceFuture.result`."""
        try:
            return self._future.result(timeout)
        finally:
            self.done()

    def cancel(self) -> bool:
        """As :meth:`~meshinfer.inference.protocol.InferenceFuture.cancel`."""
        try:
            return self._future.cancel()
        finally:
            self.done()

    @property
    def patience(self) -> float:
        """Seconds after which a waiter asks whether the server is alive."""
        return min(getattr(self._future, "patience", _PATIENCE_SECONDS), _PATIENCE_SECONDS)

    def check_alive(self) -> None:
        """Have it fail if the server is not."""
        check = getattr(self._future, "check_alive", None)
        if check is not None:
            check()

    def wait(self, seconds: float) -> None:
        """Until it is done, whatever it has come to, or time is up."""
        try:
            getattr(self._future, "exception", self._future.result)(seconds)
        except Exception as error:  # what it has come to is for whoever asks for the result
            if not isinstance(error, TimeoutError) and not self._future.done():
                raise

    def __await__(self) -> Generator[Any, None, TensorDictBase]:
        try:
            return (yield from self._future.__await__())  # type: ignore[attr-defined, no-any-return]
        finally:
            self.done()

    def __del__(self) -> None:
        self._permit.release()


class Room:
    """Counts requests in flight. A permit may come back from a finalizer, which can run anywhere: hence no lock.

    Args:
        limit: requests at once.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._free: SimpleQueue[None] = SimpleQueue()
        self._flying: deque[weakref.ref[BoundedFuture]] = deque()
        for _ in range(limit):
            self._free.put(None)

    def enter(self, timeout: float | None) -> Permit:
        """Wait for room; :class:`TimeoutError` when there was none for ``timeout`` seconds."""
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        while not self._free_at_once() and not self._free_within(deadline - time.monotonic()):
            if time.monotonic() >= deadline:
                raise TimeoutError(
                    f"max_inflight={self._limit} requests were in flight for {timeout:g} s"
                )
        return Permit(self._free)

    def bind(self, future: InferenceFuture, permit: Permit) -> BoundedFuture:
        """``future``, which gives ``permit`` back."""
        bounded = BoundedFuture(future, permit)
        self._oldest()  # forgets those that are over
        self._flying.append(weakref.ref(bounded))
        return bounded

    def _free_at_once(self) -> bool:
        if self._free.empty():
            for reference in list(self._flying):
                future = reference()
                if future is not None:
                    future.done()
        return self._taken(None)

    def _free_within(self, seconds: float) -> bool:
        oldest = self._oldest()
        if oldest is None or oldest.announced:
            patience = _PATIENCE_SECONDS if oldest is None else oldest.patience
            if self._taken(max(min(seconds, patience), 0.0)):
                return True
            if oldest is not None and seconds > patience:
                oldest.check_alive()
            return False
        oldest.wait(max(min(seconds, _LOOK_SECONDS), 0.0))
        return False

    def _taken(self, seconds: float | None) -> bool:
        try:
            self._free.get(block=seconds is not None, timeout=seconds)
        except Empty:
            return False
        return True

    def _oldest(self) -> BoundedFuture | None:
        for reference in list(self._flying):
            future = reference()
            if future is not None and not future.over:
                return future
            with suppress(ValueError):  # another thread was first
                self._flying.remove(reference)
        return None
