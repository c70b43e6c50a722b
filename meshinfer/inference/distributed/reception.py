"""The server's side as a whole: the private store, the clients that join, and the requests that are ready."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta

from torch.distributed import DistError, TCPStore

from meshinfer.inference.distributed.attendance import Attendance
from meshinfer.inference.distributed.descriptors import lack_of_descriptors
from meshinfer.inference.distributed.frames import Kind
from meshinfer.inference.distributed.join import (
    JOIN_QUEUE,
    Compared,
    Hello,
    Joining,
    check_nonce,
    objection_to_rows,
    objection_to_version,
    open_sealed,
)
from meshinfer.inference.distributed.pair import SERVER, GlooDevice
from meshinfer.inference.distributed.plane import RowBackend
from meshinfer.inference.distributed.session import ENDED_BY_EXCEPTION, Request, Session
from meshinfer.inference.distributed.watch import await_aborts
from meshinfer.inference.doorbell import Backlog
from meshinfer.layout import PayloadLayout
from meshinfer.rendezvous import PrivateStore, ServerAddress

__all__ = ["Reception"]

logger = logging.getLogger("meshinfer.distributed")

_STOP = b"stop"
_FOREVER = timedelta(days=3650)
_SETTLING_SECONDS = 1.0
_JOIN_SECONDS = 30.0
_ROW_SECONDS = 60.0
_GOODBYE_SECONDS = 2.0
_ABORT_SECONDS = 1.0
_RETURN_SECONDS = 15.0
_LONGEST_HELLO = 1 << 18


class Reception(Backlog[Request]):
    """Admits clients and collects their requests.

    One thread waits in the private store for the next client, with no polling; each client that comes gets a thread,
    which builds the pair and then receives. A client that dies half-way costs its own thread's time and nothing else.

    Args:
        request_layout, response_layout: of the payloads.
        host, port: where the private store listens.
        secret: of the job.
        compared: what replies must have alike at both sides.
        title: what errors call this side.
        expected_ranks: clients that :meth:`wait_until_left` waits for, by the rank of their process.
        join_timeout: seconds for one client to complete its join.
        rows: how rows travel that are not in their frames; clients choose.
        row_timeout: seconds for such a row to arrive after its header.
    """

    def __init__(
        self,
        request_layout: PayloadLayout,
        response_layout: PayloadLayout,
        *,
        host: str,
        port: int,
        secret: bytes,
        compared: Compared,
        title: str,
        expected_ranks: Iterable[int] = (),
        join_timeout: float = _JOIN_SECONDS,
        rows: RowBackend | None = None,
        row_timeout: float = _ROW_SECONDS,
    ) -> None:
        super().__init__()
        self.request_layout = request_layout
        self.response_layout = response_layout
        self.rows = rows
        self.row_timeout = row_timeout
        self._compared = compared
        self._title = title
        self.policy_version_key: tuple[str, ...] | None = ("policy_version",)
        self.on_ready: Callable[[], None] | None = None
        self._store = PrivateStore(host, port)
        self.address = ServerAddress(self._store.host, self._store.port, secret)
        self.device: GlooDevice | None = GlooDevice.at(host, SERVER)
        self._join_timeout = join_timeout
        # Made here, since a store that closes meanwhile would leave whoever connects retrying for long.
        self._connections: list[TCPStore] = [self._store.connect(join_timeout)]
        hellos = self._store.connect(join_timeout)
        self._attendance = Attendance(expected_ranks)
        self._hellos = 0
        self._closed = threading.Event()
        self._listener = threading.Thread(
            target=self._listen, args=(hellos,), name="meshinfer-listener", daemon=True
        )
        self._listener.start()

    @property
    def clients(self) -> int:
        """Clients connected now."""
        return len(self._attendance.sessions)

    @property
    def sessions(self) -> list[Session]:
        """Of the clients connected now."""
        return list(self._attendance.sessions.values())

    def note_change(self) -> None:
        """What :meth:`wait_until` waits for may have become true."""
        self._attendance.note_change()

    def wait_until(self, condition: Callable[[], bool], timeout: float | None) -> bool:
        """Until it is true, or the reception closes; looked at when a client joins or leaves. ``False`` on time-out."""
        return self._attendance.wait_until(condition, timeout)

    def store_keys(self) -> list[str]:
        """Keys in the private store now; joins use queues, which torch does not list."""
        return self._store.keys()

    def ready(self, request: Request) -> None:
        """A session's thread: a request is complete."""
        self.pending.append(request)
        if self._closing:
            request.release()  # nobody will gather it, and its row must not hold its session up
            request.session.receive_on()
        elif (callback := self.on_ready) is not None:
            callback()
        else:
            self._work.ring()

    def wait_until_left(self, num_clients: int | None, timeout: float | None = None) -> bool:
        """Until every client has come and left, or the reception closes; ``False`` when ``timeout`` runs out.

        A rank that was lost, and did not leave, may be started again, and the server with it: it is waited for.

        Args:
            num_clients: how many clients must have joined; without it, every expected rank, or at least one client.
            timeout: seconds.

        Raises:
            PeerLostError: an expected rank was lost, has not come back, and all others have left.
        """
        return self._attendance.wait_until_left(num_clients, timeout, _RETURN_SECONDS)

    # What a session's thread reports.

    def admit(self, session: Session, joining: Joining) -> None:
        """The pair is built and proved; an older session of the same client ends here."""
        self._keep(joining)
        replaced = self._attendance.admit(session)
        logger.debug("%s joined as session %d", session.hello, session.number)
        if replaced is not None:
            logger.info("%s takes over from %s", session.hello, replaced.hello)
            replaced.abort(Kind.REPLACED)
        if self._closing:
            session.close()

    def leave(self, session: Session, lost: str | None) -> None:
        """The session has ended: the client said goodbye, or was ``lost`` for this reason."""
        if lost is None or self._closing:
            logger.debug("%s left", session.hello)
        else:
            logger.warning("%s was lost: %s", session.hello, lost)
        self._attendance.leave(session, lost)

    def join_failed(self, session: Session, reason: str) -> None:
        """The client did not complete its join, or showed a wrong proof."""
        level = logging.DEBUG if self._closing else logging.WARNING
        logger.log(level, "%s did not complete its join: %s", session.hello, reason)
        if not self._closing:
            self._joining_of(session.hello.nonce).clean_up()
        self._attendance.join_failed(session)

    # The listener's thread.

    def _listen(self, store: TCPStore) -> None:
        store.set_timeout(_FOREVER)
        while not self._closing:
            try:
                data = store.queue_pop(JOIN_QUEUE)
            except (DistError, RuntimeError) as error:
                if not self._closing:
                    logger.error(
                        "the private store failed, no further client can join: %s", str(error)
                    )
                return
            if data != _STOP:
                self._receive_hello(data)

    def _receive_hello(self, data: bytes) -> None:
        """Admit, refuse or ignore. Anybody who reaches the store can write here, so nothing may escape."""
        try:
            self._consider(data)
        except Exception as error:
            # Its text, here and elsewhere: a log that keeps the error would keep our frames and sockets.
            logger.warning("something in the private store is no hello: %s", str(error))

    def _consider(self, data: bytes) -> None:
        if len(data) > _LONGEST_HELLO:
            raise ValueError(f"{len(data)} bytes")
        content = open_sealed(self.address.secret, "hello", data)
        claimed = content if content is not None else json.loads(data[64:])
        objection = None if content is not None else "it holds another job secret"
        objection = objection or objection_to_version(claimed)
        if objection is not None:
            return self._refuse(
                str(claimed.get("identity")), check_nonce(claimed["nonce"]), objection
            )
        hello = Hello.from_json(claimed)
        objection = hello.objection(self.request_layout, self._compared, self._title)
        objection = objection or objection_to_rows(hello.rows, self.rows)
        if objection is not None:
            self._refuse(str(hello), hello.nonce, objection)
        elif self._closing:
            self._answer(hello.nonce, {"closed": True})
        elif hello.absent:
            self._attendance.note_absent(
                hello.identity, ENDED_BY_EXCEPTION if hello.failed else None
            )
        elif lack := self._lack():
            self._refuse(str(hello), hello.nonce, f"the server's process has no room: {lack}")
        else:
            self._start_session(hello)

    def _lack(self) -> str | None:
        """Of descriptors, for one more client. Those who join now are waited for: they count twice until they have."""
        joining = self._attendance.joining
        if lack_of_descriptors(len(joining)) is None:
            return None
        self._attendance.wait_until(lambda: not joining, _SETTLING_SECONDS)
        return lack_of_descriptors(len(joining))

    def _refuse(self, whom: str, nonce: str, objection: str) -> None:
        logger.warning("%s refused: %s", whom, objection)
        self._answer(nonce, {"refused": objection})

    def _answer(self, nonce: str, content: dict[str, object]) -> None:
        joining = self._joining_of(nonce)
        joining.answer(content)
        self._keep(joining)

    def _joining_of(self, nonce: str) -> Joining:
        """A join over a store connection of its own: one that an earlier join has left, or a new one."""
        try:
            store = self._connections.pop()
        except IndexError:
            store = self._store.connect(self._join_timeout)
        secret, push = self.address.secret, self._store.push
        return Joining(store, secret, nonce, SERVER, self._join_timeout, push)

    def _keep(self, joining: Joining) -> None:
        """The join is over, and well: its connection may serve another, since making one can be slow."""
        if not self._connections:
            self._connections.append(joining.store)

    def _start_session(self, hello: Hello) -> None:
        self._hellos += 1
        session = Session(self, self._joining_of(hello.nonce), hello, self._hellos)
        self._attendance.expect(session)
        session.thread.start()

    # The end.

    def close(self, timeout: float = _GOODBYE_SECONDS) -> None:
        """Tell every client, wait for their goodbyes for at most ``timeout`` seconds, cut those that stay silent."""
        self._closing = True
        sessions = self._attendance.close()
        if sessions is None:
            self._closed.wait(timeout + _GOODBYE_SECONDS)
            return
        deadline = time.monotonic() + timeout
        self._stop_listener(timeout)
        for request in self.take(len(self.pending)):
            request.release()
        for session in sessions:
            session.close()
        self._join_threads(sessions, deadline)
        for session in sessions:
            if session.thread.is_alive():
                session.abort()
        self.wake()
        self._store.close()  # this ends the joins that still wait in it
        self._join_threads(sessions, time.monotonic() + _ABORT_SECONDS)
        await_aborts()
        self._attendance.sessions.clear()
        self._connections.clear()
        self.device = None
        self._closed.set()

    def _stop_listener(self, timeout: float) -> None:
        self._store.push(JOIN_QUEUE, _STOP)
        self._listener.join(timeout)

    @staticmethod
    def _join_threads(sessions: Iterable[Session], deadline: float) -> None:
        current = threading.current_thread()
        for session in sessions:
            if session.thread is not current and session.thread.is_alive():
                session.thread.join(max(deadline - time.monotonic(), 0.0))
