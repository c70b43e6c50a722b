"""The client of a :class:`~meshinfer.inference.distributed.transport.DistributedTransport`."""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
import weakref
from functools import partial
from typing import Any, ClassVar

from tensordict import TensorDictBase
from torch.distributed import TCPStore

from meshinfer.arguments import as_seconds
from meshinfer.errors import (
    ClosedError,
    PeerLostError,
    RefusedError,
    ServerClosedError,
    TransportError,
)
from meshinfer.inference.distributed.announced import plane_over
from meshinfer.inference.distributed.connection import Connection
from meshinfer.inference.distributed.descriptors import lack_of_descriptors
from meshinfer.inference.distributed.frames import Frame, are_large, proof_in, proof_message
from meshinfer.inference.distributed.join import Compared, Hello, Identity, Joining
from meshinfer.inference.distributed.locate import Locator
from meshinfer.inference.distributed.pair import CLIENT, SERVER, GlooDevice, Pair, plain
from meshinfer.inference.distributed.plane import DataPlane, RowBackend
from meshinfer.inference.distributed.watch import await_aborts
from meshinfer.inference.future import ReplyFuture, reply_by
from meshinfer.inference.interaction import current_interaction
from meshinfer.layout import PayloadLayout
from meshinfer.rendezvous import ServerAddress, choose_address, connect_store
from meshinfer.streams import refuse_captures

__all__ = ["DistributedClient"]

logger = logging.getLogger("meshinfer.distributed")

_GOODBYE_SECONDS = 2.0
_PROBE_SECONDS = 15.0  # a TCPStore looks names up: that alone takes ten where the resolver is slow
_RETURN_SECONDS = 5.0
_LOOK_AGAIN_SECONDS = 1.0
_abandoned: list[Connection] = []
"""Connections that a fork copied: their threads are not here, so they can be neither used nor destroyed."""


class DistributedClient:
    """One environment rank's way to the policy server.

    Connects on first use, waiting for the server if it has not started yet. Picklable: the copy connects on its own.
    May be shared by threads. After the server is lost the next call looks for it again.

    Args:
        locator: finds the server.
        request_layout, response_layout: of the payloads.
        identity: see :class:`~meshinfer.inference.distributed.join.Identity`.
        timeout: seconds for connecting, and after which a waiter without a deadline of its own asks whether the
            server is alive.
        window: requests on the wire at once; more wait in this process.
        rows: how rows travel, if not in their frames.
        interface: see :func:`~meshinfer.rendezvous.choose_address`.
    """

    _peer: ClassVar[str] = "policy server"
    """What errors call the other side."""

    def __init__(
        self,
        locator: Locator,
        request_layout: PayloadLayout,
        response_layout: PayloadLayout,
        *,
        identity: Identity,
        timeout: float,
        window: int,
        interface: str | None,
        rows: RowBackend | None = None,
    ) -> None:
        self._locator = locator
        self._request_layout = request_layout
        self._response_layout = response_layout
        self._identity = identity
        self._timeout = timeout
        self._window = window
        self._interface = interface
        self._rows = rows
        self._closed = False
        self._reset()

    def __call__(self, payload: TensorDictBase, timeout: float | None = None) -> TensorDictBase:
        """The policy's reply to ``payload``.

        Args:
            payload: a TensorDict as the request spec declares it; extra keys are left out, and it stays unchanged.
            timeout: seconds for everything, connecting included; ``None`` waits while the server is alive.

        Returns:
            An independent TensorDict with the keys of the response spec and the policy version.

        Raises:
            ValueError, TypeError: the payload does not match the request spec; nothing was sent.
            TimeoutError: the request is given up.
            OSError: this process has too few descriptors to connect.
            RefusedError, ServerClosedError, PeerLostError, ClosedError: see :mod:`meshinfer.errors`.
            Exception: what the policy raised.
        """
        if timeout is None:
            return self.submit(payload).result()
        deadline = time.monotonic() + as_seconds("timeout", timeout, zero=True)
        return reply_by(deadline, self.submit(payload, timeout), timeout)

    def submit(self, payload: TensorDictBase, timeout: float | None = None) -> ReplyFuture:
        """Send ``payload`` and return at once with a future; errors as in :meth:`__call__`.

        Args:
            payload: copied before this returns.
            timeout: seconds for connecting, when this is the first use; the transport's by default.
        """
        if self._closed:
            self._check_open()
        if self._rows is not None:
            refuse_captures(self._rows.device)
        frame = self._spare.pop() if self._spare else self._new_frame()
        self._request_layout.pack(payload, frame.views)
        frame.touch()
        connection = self._connection
        if connection is None or connection.ended or self._pid != os.getpid():
            connection = self._connect(self._timeout if timeout is None else timeout)
        return connection.submit(frame, current_interaction())

    def _new_frame(self) -> Frame:
        layout, rows = self._request_layout, self._rows
        return Frame(layout, None if rows is None else rows.new_row(layout.row_bytes))

    @property
    def in_flight(self) -> int:
        """Requests of this client that have neither been answered nor given up."""
        return 0 if self._connection is None else self._connection.in_flight

    def close(self) -> None:
        """Leave the server; requests in flight raise :class:`~meshinfer.errors.ClosedError`. Idempotent."""
        self._close(failed=False)

    def _close(self, *, failed: bool) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            connection = self._connection
        if connection is None:
            self._report_absence(failed)
        elif failed and self._pid == os.getpid():
            connection.close(_GOODBYE_SECONDS, failed=True)
        self._finalizer()

    def __enter__(self) -> DistributedClient:
        self._check_open()
        return self

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        self._close(failed=error is not None and not _is_orderly(error))

    def __repr__(self) -> str:
        state = (
            "closed"
            if self._closed
            else "not connected"
            if self._connection is None
            else "connected"
        )
        return f"DistributedClient(as {self._identity} of {self._locator}, {state})"

    def __getstate__(self) -> dict[str, Any]:
        self._check_open()
        kept = dict(self.__dict__)
        for name in ("_lock", "_connection", "_finalizer", "_holder", "_pid", "_spare"):
            kept.pop(name)  # they belong to this process
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._identity = self._identity.copy()
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._connection: Connection | None = None
        self._spare: list[Frame] = []
        self._holder: list[Connection] = []
        self._finalizer = weakref.finalize(self, _leave, self._holder, self._pid)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError("this client was closed; make a new one with transport.client()")

    def _connect(self, timeout: float) -> Connection:
        with self._lock:
            self._check_open()
            self._forsake_forked()
            connection = self._connection
            if connection is not None:
                if not connection.ended:
                    return connection  # another thread was first
                connection.close(_GOODBYE_SECONDS)
                self._connection = self._rejoin(connection, timeout)
            else:
                self._connection = self._join(timeout)
            self._holder[:] = [self._connection]
            return self._connection

    def _forsake_forked(self) -> None:
        if self._pid != os.getpid():
            _abandoned.extend(self._holder)
            self._holder.clear()
            self._spare.clear()
            self._connection = None
            self._pid = os.getpid()
            self._identity = self._identity.copy()
            self._finalizer.detach()
            self._finalizer = weakref.finalize(self, _leave, self._holder, self._pid)

    def _rejoin(self, ended: Connection, timeout: float) -> Connection:
        """Look for the server again, briefly; raises at once where nothing can come of it."""
        if ended.replaced or (
            isinstance(ended.error, ServerClosedError) and not self._locator.moves
        ):
            raise ended.error
        try:
            return self._join(min(timeout, _RETURN_SECONDS))
        except (PeerLostError, TimeoutError) as error:  # nobody is there, or knows of another one
            if isinstance(ended.error, ServerClosedError):
                raise ended.error from error
            if isinstance(error, PeerLostError):
                raise
            raise PeerLostError(f"{ended.error}; looked for it again: {error}") from error

    def _join(self, timeout: float) -> Connection:
        deadline = time.monotonic() + timeout
        if lack := lack_of_descriptors():
            raise OSError(errno.EMFILE, f"this process has no room for a client: {lack}")
        address, store = self._reach(deadline)
        said = None if self._rows is None else {"backend": self._rows.name, **self._rows.describe()}
        hello = Hello.of(self._identity, self._request_layout, self._compared, rows=said)
        joining = Joining(
            store, address.secret, hello.nonce, CLIENT, max(deadline - time.monotonic(), 0.01)
        )
        answer = joining.say_hello(hello)
        local = choose_address(self._interface, reach=(address.host, address.port))
        large = are_large(
            (self._request_layout, self._response_layout), announced=self._rows is not None
        )
        pair = joining.build_pair(GlooDevice.at(local, CLIENT), large)
        self._prove(pair, joining, answer["nonce"])
        key = answer["policy_version_key"]
        return self._begin(pair, joining, address, None if key is None else tuple(key))

    def _begin(
        self, pair: Pair, joining: Joining, address: ServerAddress, key: tuple[str, ...] | None
    ) -> Connection:
        """The connection, once rows can travel."""
        plane = plane_over(self._rows, pair, joining, self._timeout)
        try:
            plane.begin_sending()
            connection = self._connection_over(pair, address, key, plane)
            plane.await_receiving()
        except BaseException as error:
            reason = plane.reason or plain(error)
            plane.close()
            pair.abort()
            if isinstance(error, RuntimeError):
                raise PeerLostError(f"no way for rows to the {self._peer}: {reason}") from error
            raise
        return connection

    @property
    def _compared(self) -> Compared:
        """What replies must have alike at both sides."""
        return self._response_layout

    def _connection_over(
        self,
        pair: Pair,
        address: ServerAddress,
        key: tuple[str, ...] | None,
        plane: DataPlane,
        **more: Any,
    ) -> Connection:
        """What this client does with a pair that both sides have proved; ``more`` is for the connection."""
        return Connection(
            pair,
            plane,
            self._response_layout,
            window=self._window,
            spare=self._spare,
            policy_version_key=key,
            patience=self._timeout,
            probe=partial(probe, address, self._peer),
            **more,
        )

    def _reach(self, deadline: float) -> tuple[ServerAddress, TCPStore]:
        """A connection to the server's store; a server that moves is looked up again while nobody answers."""
        while True:
            address = self._locator.find(max(deadline - time.monotonic(), 0.01))
            left = max(deadline - time.monotonic(), 0.01)
            patience = _LOOK_AGAIN_SECONDS if self._locator.moves else left
            try:
                return address, self._store_at(address, left, patience)
            except TimeoutError:
                if time.monotonic() + patience >= deadline:
                    raise

    def _store_at(self, address: ServerAddress, timeout: float, patience: float) -> TCPStore:
        awaited = f"the {self._peer}"
        return connect_store(
            address.host, address.port, timeout, awaited=awaited, patience=patience
        )

    def _prove(self, pair: Pair, joining: Joining, server_nonce: str) -> None:
        mine, shown = proof_message(joining.proof(CLIENT, server_nonce)), proof_message()
        try:
            received = pair.receive(shown)
            sent = pair.send(mine)
            received.wait(joining.left())
        except RuntimeError as error:
            raise PeerLostError(
                f"the server went away while this client joined: {plain(error)}"
            ) from error
        del sent  # the server has read it: its proof is the answer
        if proof_in(shown) != joining.proof(SERVER, server_nonce):
            raise RefusedError("the other end of the new pair does not hold the job secret")

    def _report_absence(self, failed: bool) -> None:
        """A rank that never needed the policy tells the server not to wait for it."""
        if self._identity.rank is None:
            return
        try:
            address = self._locator.find(_GOODBYE_SECONDS)
            store = self._store_at(address, _GOODBYE_SECONDS, _GOODBYE_SECONDS)
            hello = Hello.of(
                self._identity,
                self._request_layout,
                self._response_layout,
                absent=True,
                failed=failed,
            )
            Joining(store, address.secret, hello.nonce, CLIENT, _GOODBYE_SECONDS).announce(hello)
        except (TransportError, TimeoutError, ValueError) as error:
            logger.debug("%s left without telling the server: %s", self._identity, str(error))


def probe(address: ServerAddress, peer: str) -> None:
    """Whether ``peer`` answers at ``address``; raises :class:`TimeoutError` when it does not."""
    awaited = f"a sign of life of the {peer}"
    connect_store(address.host, address.port, _PROBE_SECONDS, awaited=awaited)


def _is_orderly(error: BaseException) -> bool:
    """Whether it ends a process, or a generator, that has done its work."""
    return isinstance(error, GeneratorExit) or (
        isinstance(error, SystemExit) and error.code in (None, 0)
    )


def _leave(holder: list[Connection], pid: int) -> None:
    """Close without the client, when it is collected or the interpreter exits."""
    if pid != os.getpid():
        return _abandoned.extend(holder)
    for connection in holder:
        connection.close(_GOODBYE_SECONDS)
    holder.clear()
    await_aborts()
