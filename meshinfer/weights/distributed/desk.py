"""The publisher's side of all polls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

import torch

from meshinfer.inference.distributed.reception import Reception
from meshinfer.inference.distributed.session import Request, Session
from meshinfer.layout import PayloadLayout
from meshinfer.weights.distributed.rows import Snapshot

__all__ = ["NONE", "POLL", "Desk", "Poll"]

NONE: Final = -1
"""No version."""

_FIELDS = ("applied", "origin", "received", "waits")
POLL = PayloadLayout.from_spec(
    {name: torch.zeros((), dtype=torch.int64) for name in _FIELDS}, name="poll"
)
"""What a subscriber says.

``origin``: the publisher of the last version that it has received, ``received``; ``applied``: the last of that
publisher that it serves. ``waits``: 1 if it wants the next one, 0 if it only says what it serves. Each poll gets an
answer, a row or none, and the next poll of the same subscriber takes the place of one that still waits.
"""


class Poll:
    """One poll at the publisher. It may outlive its pair, so it keeps nothing of that."""

    __slots__ = ("applied", "identifier", "origin", "received", "session", "waits")

    def __init__(self, request: Request) -> None:
        values = [int(tensor) for tensor in request.frame.views.tensors]
        self.applied, self.origin, self.received, self.waits = values
        self.session, self.identifier = request.session, request.identifier
        request.release()

    def wants(self, newest: Snapshot | None) -> bool:
        """Whether ``newest`` is what it waits for."""
        if newest is None or not self.waits:
            return False
        return newest.origin != self.origin or newest.version > self.received

    def answer(self, snapshot: Snapshot | None) -> None:
        """Send a row, which is not copied, or say that there is none. Never waits.

        This and the subscriber's ``room`` are where NCCL would come in: the row would stay on the trainer's device, and
        these few lines would announce it and then send it over a communicator of the pair.
        """
        if snapshot is None:
            self.session.reply_row(self.identifier, None)
        else:
            row, version, origin = snapshot.row.tensor, snapshot.version, snapshot.origin
            self.session.reply_row(self.identifier, row, version, origin, owner=snapshot)


class Desk:
    """Who asks, what each subscriber serves, and the newest version.

    Polls are answered by the thread that received them, or that publishes. Neither moves a byte of a row: gloo's thread
    does, once the subscriber has made room, and it needs no interpreter.
    """

    def __init__(self, reception: Reception) -> None:
        self._reception = reception
        self._lock = threading.Lock()
        self._newest: Snapshot | None = None
        self._waiting: dict[Session, Poll] = {}
        self._served: dict[Session, tuple[int, int]] = {}
        reception.on_ready = self._consider
        self._consider()  # who was faster

    @property
    def subscribers(self) -> int:
        """How many are connected."""
        return self._reception.clients

    def publish(self, snapshot: Snapshot) -> None:
        """It is the newest version from now on."""
        present = {*self._reception.sessions}
        with self._lock:
            self._newest = snapshot
            due = [poll for session, poll in self._waiting.items() if session in present]
            self._waiting = {}
            self._served = {each: self._served[each] for each in present & self._served.keys()}
        for poll in due:
            poll.answer(snapshot if poll.wants(snapshot) else None)

    def wait(
        self, origin: int, version: int, timeout: float, given_up: Callable[[], bool]
    ) -> list[str]:
        """Until every subscriber that is there serves it, or ``given_up``; those that do not, and what they serve."""
        self._reception.wait_until(lambda: given_up() or not self._late(origin, version), timeout)
        return [self._describe(each, origin) for each in self._late(origin, version)]

    def note_change(self) -> None:
        """What :meth:`wait` waits for may have changed."""
        self._reception.note_change()

    def _late(self, origin: int, version: int) -> list[Session]:
        late = []
        for session in self._reception.sessions:
            whose, served = self._served.get(session, (NONE, NONE))
            if whose != origin or served < version:
                late.append(session)
        return late

    def _describe(self, session: Session, origin: int) -> str:
        whose, served = self._served.get(session, (NONE, NONE))
        known = (
            f"version {served}"
            if whose == origin and served != NONE
            else "none of this publisher's"
        )
        return f"{session.hello} ({known})"

    def _consider(self) -> None:
        """In the thread of a session that has received a poll."""
        answers: list[tuple[Poll, Snapshot | None]] = []
        with self._lock:
            for request in self._reception.take(len(self._reception.pending)):
                answers += self._place(Poll(request))
        for poll, snapshot in answers:
            poll.answer(snapshot)
        self._reception.note_change()

    def _place(self, poll: Poll) -> list[tuple[Poll, Snapshot | None]]:
        """With the lock held: note what it says; what is to be answered now."""
        session = poll.session
        self._served[session] = poll.origin, poll.applied
        before = self._waiting.pop(session, None)
        due: list[tuple[Poll, Snapshot | None]] = [] if before is None else [(before, None)]
        if poll.wants(self._newest):
            return [*due, (poll, self._newest)]
        if not poll.waits:
            return [*due, (poll, None)]
        self._waiting[session] = poll
        return due
