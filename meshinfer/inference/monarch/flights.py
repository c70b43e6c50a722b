"""The requests of one connection that have not been answered."""

from __future__ import annotations

import threading
import time
from typing import Final

from meshinfer.errors import TransportError
from meshinfer.inference.future import Flight, ReplyFuture
from meshinfer.inference.queues.labels import Labels, unpacked
from meshinfer.inference.queues.wire import BadFrameError, Frame, Kind
from meshinfer.inference.remote_errors import decode_exception

__all__ = ["Flights"]

_MOST_OWED_BYTES: Final = 1 << 26
"""Of requests that the server has not answered; also what a client gives up may still lie there until then."""
_OWED_FOR_EACH: Final = 1 << 10
"""What any message takes beside its body, about."""


class Flights:
    """Futures by number, and how much the server owes; the owner of those futures.

    Args:
        patience: seconds between two looks of a waiter without a deadline.
    """

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self._changed = (
            threading.Condition()
        )  # its lock is reentrant: the garbage collector may end us anywhere
        self._identifiers = 0
        self._flying: dict[int, Flight] = {}
        self._owed: dict[int, int] = {}
        self._owed_bytes = 0
        self._ended: type[TransportError] | None = None
        self._reason = ""

    def __len__(self) -> int:
        return len(self._flying)

    @property
    def owed_bytes(self) -> int:
        """Of the requests that were not answered, also of those that were given up."""
        return self._owed_bytes

    @property
    def ended(self) -> bool:
        """Whether nothing can be added any more."""
        return self._ended is not None

    @property
    def error(self) -> TransportError:
        """Why not."""
        return (self._ended or TransportError)(self._reason)

    def add(self, count: int, deadline: float) -> Flight | None:
        """A future for a request of ``count`` bytes; ``None`` when the server has not answered enough by ``deadline``.

        Raises:
            TransportError: it has ended.
        """
        cost = count + _OWED_FOR_EACH
        with self._changed:
            while (
                self._owed_bytes and self._owed_bytes + cost > _MOST_OWED_BYTES and not self.ended
            ):
                if not self._changed.wait(max(deadline - time.monotonic(), 0.0)):
                    return None
            if self._ended is not None:
                raise self.error
            self._identifiers += 1
            future = self._flying[self._identifiers] = Flight(self, self._identifiers)
            self._owed[future.identifier] = cost
            self._owed_bytes += cost
        return future

    def finish(self, frame: Frame, labels: Labels) -> bool:
        """Settle what ``frame`` answers; ``False`` when it is no answer."""
        if frame.kind == Kind.RESULT:
            structure = labels.structure(frame)
            future = self._pop(frame.identifier)
            if future is not None:
                try:
                    result = unpacked(structure, frame.body)
                except Exception as error:  # a pickled reply may hold anything
                    future.fail(TransportError(f"the reply cannot be rebuilt here: {error!r}"))
                else:
                    future.fulfil(result)
        elif frame.kind == Kind.ERROR:
            future = self._pop(frame.identifier)
            if future is not None:
                future.fail(decode_exception(bytes(frame.body)))
        else:
            return False
        return True

    def end(self, kind: type[TransportError], reason: str) -> bool:
        """Fail everything, now and later; ``False`` when it had ended before."""
        with self._changed:
            if self._ended is not None:
                return False
            self._ended, self._reason = kind, reason
            futures = list(self._flying.values())
            self._flying.clear()
            self._changed.notify_all()
        for future in futures:
            future.fail(kind(reason))
        return True

    def forget(self, future: ReplyFuture) -> None:
        """Drop a cancelled request; its reply is dropped when it comes."""
        assert isinstance(future, Flight)
        self._flying.pop(future.identifier, None)

    def check_alive(self) -> None:
        """The end of the server ends this at once, except in a forked child, where nobody receives."""
        if self._ended is not None:
            for future in list(self._flying.values()):
                future.fail(self.error)

    def forked(self, kind: type[TransportError], reason: str) -> None:
        """In a forked child, where another thread may have held the lock: end, and leave the futures alone."""
        self._changed = threading.Condition()
        self._ended, self._reason = kind, reason

    def _pop(self, identifier: int) -> Flight | None:
        with self._changed:
            cost = self._owed.pop(identifier, None)
            if cost is None:
                raise BadFrameError(f"an answer to request {identifier}, which was answered before")
            full = self._owed_bytes > _MOST_OWED_BYTES // 2
            self._owed_bytes -= cost
            if full:
                self._changed.notify_all()
        return self._flying.pop(identifier, None)
