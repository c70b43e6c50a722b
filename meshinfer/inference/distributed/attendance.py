"""Which clients of a server are here, which have come and gone, and which were lost."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from meshinfer.errors import PeerLostError

if TYPE_CHECKING:
    from meshinfer.inference.distributed.join import Identity
    from meshinfer.inference.distributed.session import Session

__all__ = ["Attendance"]


class Attendance:
    """Keeps a server's sessions, and what became of the ranks that it expects.

    Args:
        expected_ranks: clients that :meth:`wait_until_left` waits for, by the rank of their process.
    """

    def __init__(self, expected_ranks: Iterable[int]) -> None:
        self.sessions: dict[Identity, Session] = {}
        self.joining: set[Session] = set()
        self._leaving: list[Session] = []
        self._expected = frozenset(expected_ranks)
        self._seen: set[int] = set()
        self._lost: dict[int, str] = {}
        self._joins = 0
        self._closing = False
        self._changed = threading.Condition()

    def expect(self, session: Session) -> None:
        """Its client has begun to join."""
        with self._changed:
            self.joining.add(session)

    def admit(self, session: Session) -> Session | None:
        """Its client has joined; the session of the same client that it replaces."""
        with self._changed:
            key = session.identity
            replaced = self.sessions.pop(key, None)
            self.sessions[key] = session
            self.joining.discard(session)
            self._joins += 1
            self._note_seen(key)
            self._changed.notify_all()
        return replaced

    def join_failed(self, session: Session) -> None:
        """Its client did not complete its join."""
        with self._changed:
            self.joining.discard(session)
            self._let_go(session)

    def leave(self, session: Session, lost: str | None) -> None:
        """Its client said goodbye, or was ``lost`` for this reason."""
        with self._changed:
            if self.sessions.get(session.identity) is session:
                del self.sessions[session.identity]
                self._note_seen(session.identity, lost)
            self._let_go(session)

    def note_absent(self, identity: Identity, lost: str | None) -> None:
        """This client will not join: its work is done, or it was ``lost`` for this reason."""
        with self._changed:
            self._note_seen(identity, lost)
            self._changed.notify_all()

    def _let_go(self, session: Session) -> None:
        """With the lock held: its thread is about to end, but has not yet; :meth:`close` hands it out."""
        self._leaving = [each for each in self._leaving if each.thread.is_alive()]
        self._leaving.append(session)
        self._changed.notify_all()

    def _note_seen(self, identity: Identity, lost: str | None = None) -> None:
        """With the lock held: its rank has come, or left, or was ``lost`` for this reason."""
        if identity.rank is None:
            return
        self._seen.add(identity.rank)
        self._lost.pop(identity.rank, None)
        if lost is not None and identity.rank in self._expected:
            self._lost[identity.rank] = lost

    # Waiting.

    def note_change(self) -> None:
        """What :meth:`wait_until` waits for may have become true."""
        with self._changed:
            self._changed.notify_all()

    def wait_until(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        """Until it is true, or :meth:`close`; looked at when a client joins or leaves. ``False`` on time-out."""
        with self._changed:
            return self._changed.wait_for(lambda: self._closing or condition(), timeout)

    def wait_until_left(
        self, num_clients: int | None, timeout: float | None, return_seconds: float
    ) -> bool:
        """Until every client has come and left, or :meth:`close`; ``False`` when ``timeout`` runs out.

        Args:
            num_clients: how many clients must have joined; without it, every expected rank, or at least one client.
            timeout: seconds.
            return_seconds: how long a lost rank is waited for once all others have left.

        Raises:
            PeerLostError: an expected rank was lost, has not come back, and all others have left.
        """
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        with self._changed:
            while self._wait_for(lambda: self._all_left(num_clients), deadline):
                if self._closing or num_clients is not None or not self._lost:
                    return True
                patience = min(deadline, time.monotonic() + return_seconds)
                if self._wait_for(lambda: not self._all_left(num_clients), patience):
                    continue
                if patience == deadline:
                    break
                rank, why = min(self._lost.items())
                waited = (
                    f"has not come back within {return_seconds:g} s, while all others have left"
                )
                raise PeerLostError(f"rank {rank} was lost and {waited}: {why}")
        return False

    def _wait_for(self, condition: Callable[[], bool], deadline: float) -> bool:
        """With the lock held: until it is true, or :meth:`close`; ``False`` at the ``deadline``."""
        left = None if deadline == float("inf") else max(deadline - time.monotonic(), 0.0)
        return self._changed.wait_for(lambda: self._closing or condition(), left)

    def _all_left(self, num_clients: int | None) -> bool:
        if self.sessions or self.joining:
            return False
        if num_clients is not None:
            return self._joins >= num_clients
        return self._expected <= self._seen if self._expected else self._joins > 0

    def close(self) -> list[Session] | None:
        """Nobody waits any longer; every session whose thread may still run. ``None`` if it was closed before."""
        with self._changed:
            if self._closing:
                return None
            self._closing = True
            self._changed.notify_all()
            return [*self.sessions.values(), *self.joining, *self._leaving]
