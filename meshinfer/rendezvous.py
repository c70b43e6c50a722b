"""Private stores, the interface they listen on, and how other ranks find them.

A server owns one :class:`PrivateStore`: a ``TCPStore`` on a port that the system chose, bound to one interface by a
socket that we opened ourselves, so no port is probed and lost and no other interface listens. Where it is gets
published in a :class:`Directory`, a store that every rank can find: torchrun's agent hosts one, elsewhere
rank 0 does.
"""

from __future__ import annotations

import functools
import ipaddress
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

from torch.distributed import DistError, TCPStore

from meshinfer.errors import MeshError, ServerClosedError
from meshinfer.interfaces import (
    INTERFACE_VARIABLE,
    choose_address,
    explain_address,
    named_address,
    resolve,
)

__all__ = [
    "INTERFACE_VARIABLE",
    "Directory",
    "PrivateStore",
    "ServerAddress",
    "bounded",
    "choose_address",
    "connect_store",
    "explain_address",
    "given_secret",
    "listen",
    "named_address",
    "resolve",
]

SECRET_VARIABLE = "MESHINFER_SECRET"
PORT_VARIABLE = "MASTER_PORT"
_CLOSED = "closed"
_GRACE_SECONDS = 0.5
_ATTEMPT_SECONDS = 6.0  # a question that a name server has lost is asked again after 5
_HERE_SECONDS = 1.0

T = TypeVar("T")


@dataclass(frozen=True)
class ServerAddress:
    """Where one server's private store listens, and the secret that both sides prove to hold."""

    host: str
    port: int
    secret: bytes

    def __repr__(self) -> str:
        return f"ServerAddress({self.host}:{self.port})"  # the secret stays out of logs


def given_secret(secret: str | bytes | None) -> bytes | None:
    """The secret of a job: what a user gave, else ``MESHINFER_SECRET``, else ``None``.

    Raises:
        TypeError, ValueError: it is no text, or empty.
    """
    given = secret if secret is not None else os.environ.get(SECRET_VARIABLE)
    if given is None:
        return None
    if not isinstance(given, (str, bytes)):
        raise TypeError(f"secret: expected str or bytes, found {type(given).__name__}")
    if not given:
        raise ValueError(
            f"secret (or {SECRET_VARIABLE}) is empty; give at least one character, or leave it out"
        )
    return given.encode() if isinstance(given, str) else given


class PrivateStore:
    """A ``TCPStore`` server bound to ``host`` alone; ``port`` 0 lets the system choose.

    Raises:
        MeshError: the address cannot be bound (names the address and the reason).
    """

    def __init__(self, host: str, port: int = 0) -> None:
        listener = _listen(host, port)
        self.host = host
        self.port = int(listener.getsockname()[1])
        self._store: TCPStore | None = TCPStore(
            host,
            self.port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # the store closes it
        )

    @property
    def is_open(self) -> bool:
        """Whether it can be reached."""
        return self._store is not None

    def keys(self) -> list[str]:
        """The keys in the store now, for tests and for ``stats``."""
        return [] if self._store is None else list(self._store.list_keys())

    def push(self, queue: str, data: bytes) -> None:
        """Append to a queue over the connection that this object has: nothing to connect, so nothing to wait for."""
        store = self._store  # another thread may close
        if store is not None:
            store.queue_push(queue, data)

    def connect(self, timeout: float) -> TCPStore:
        """A connection of its own: one ``TCPStore`` object serialises its calls, so no two threads share one.

        Raises:
            TimeoutError: as :func:`connect_store`; soon, once the store has closed.
        """
        what = "the store of this process"
        return connect_store(self.host, self.port, timeout, awaited=what, patience=_HERE_SECONDS)

    def close(self) -> None:
        """Stop listening and drop every connection. Idempotent."""
        self._store = None


def _listen(host: str, port: int) -> socket.socket:
    try:
        return listen(host, port)
    except (OSError, OverflowError, TypeError) as error:
        raise MeshError(
            f"cannot listen on {host}:{port} at {socket.gethostname()}: {error}; "
            "give an address of this host, and port=0 (the default) to let the system choose a free port"
        ) from error


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; a port that the system chooses is never ``MASTER_PORT``, which belongs to the user.

    Raises:
        OSError: the address is not of this host, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        if port == 0 and str(listener.getsockname()[1]) == os.environ.get(PORT_VARIABLE):
            with listener:
                return listen(host, port)
        listener.listen(1024)
    except BaseException:
        listener.close()
        raise
    return listener


def connect_store(
    host: str, port: int, timeout: float, *, awaited: str, patience: float | None = None
) -> TCPStore:
    """A client connection to the store at ``host:port``, retried while nothing listens there.

    torch looks the name of the address up while it connects: a name server that is silent costs seconds.

    Args:
        timeout: seconds for all of it.
        awaited: what is expected there, for the error.
        patience: seconds to wait for something to listen, if fewer.

    Raises:
        TimeoutError: names ``host:port``, what was awaited and the last reason.
    """
    deadline = time.monotonic() + timeout
    numeric = resolve(host, port)
    if ipaddress.ip_address(numeric.partition("%")[0]).is_unspecified:
        raise MeshError(
            f"{awaited} cannot be reached at {host}, which is every interface: give an address of its host"
        )
    patience = timeout if patience is None else min(patience, timeout)
    listening_by = time.monotonic() + patience
    attempt = _ATTEMPT_SECONDS
    while True:
        _knock(numeric, port, listening_by, f"{awaited} at {host}:{port}", patience)
        try:
            return _connect(numeric, port, max(deadline - time.monotonic(), 0.01), attempt)
        except (DistError, RuntimeError, TimeoutError) as error:
            if time.monotonic() < deadline:
                attempt *= 2
                continue  # what listened has gone since, or is too busy to answer, or its name is slow to find
            raise TimeoutError(
                f"{awaited} at {host}:{port} accepted a connection but did not answer within {_told(timeout)} s; "
                "is that process stopped, or is something else listening there? "
                "(A name server that is slow has the same effect: python -m meshinfer doctor tells)"
            ) from error


def _connect(numeric: str, port: int, left: float, attempt: float) -> TCPStore:
    """Where something was listening just now. torch cannot be called back while it connects, so it tries briefly."""
    seconds = timedelta(seconds=min(left, attempt))

    def connect() -> TCPStore:
        return TCPStore(numeric, port, is_master=False, wait_for_workers=False, timeout=seconds)

    store = bounded(connect, left)
    store.set_timeout(timedelta(seconds=left))
    return store


def bounded(call: Callable[[], T], timeout: float) -> T:
    """The result of a call to a store; :class:`TimeoutError` when nothing came within ``timeout`` seconds and a little.

    torch's own timeouts leave out some answers: a store whose process is stopped would hold its clients until it goes
    on. The call runs in a thread, which is left behind then and ends with that process.
    """
    outcome: futures.Future[T] = futures.Future()

    def work(outcome: futures.Future[T]) -> None:
        try:
            outcome.set_result(call())
        except Exception as error:  # whose frames would hold the outcome, and the outcome the error
            outcome.set_exception(error.with_traceback(None))

    threading.Thread(target=work, args=(outcome,), name="meshinfer-store", daemon=True).start()
    if not futures.wait([outcome], timeout + _GRACE_SECONDS).done:
        raise TimeoutError(f"no answer within {_told(timeout)} s")
    try:
        return outcome.result()
    finally:
        del outcome  # likewise: what callers hold, sockets too, must not wait for the collector


def _told(seconds: float) -> str:
    """What is left of a timeout, as a message has it."""
    return f"{round(seconds, 2):g}"


def _knock(numeric: str, port: int, deadline: float, what: str, timeout: float) -> None:
    """Wait until something listens, so that the store's own client never has to retry (it prints while it does)."""
    pause = 0.01
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection((numeric, port), timeout=max(left, 0.01)).close()
            return
        except OSError as error:
            if time.monotonic() + pause >= deadline:
                raise TimeoutError(
                    f"waited {_told(timeout)} s for {what}: {error.strerror or error}"
                ) from error
        time.sleep(pause)  # nothing signals that a remote listener has appeared
        pause = min(2 * pause, 0.5)


@dataclass(frozen=True)
class Directory:
    """A store that all ranks know, where servers publish where they are.

    Args:
        host: of the store: the launcher's, or the one that rank 0 hosts.
        port: likewise.
        prefix: contains the run id and the restart count, so that an earlier attempt is never read.
    """

    host: str
    port: int
    prefix: str

    def publish(
        self, name: str, address: ServerAddress, *, timeout: float, with_secret: bool
    ) -> None:
        """Announce a server; ``with_secret`` only when the ranks have no other way to learn the job secret."""
        record = {"host": address.host, "port": address.port}
        if with_secret:
            record["secret"] = address.secret.hex()
        self.connect(timeout).set(self._key(name), json.dumps(record))

    def withdraw(self, name: str, *, timeout: float) -> None:
        """Say that the server has closed, so that a late client learns it at once instead of waiting."""
        self.connect(timeout).set(self._key(name), _CLOSED)

    def lookup(self, name: str, *, timeout: float, secret: bytes | None) -> ServerAddress:
        """Where server ``name`` is, waiting for it to be published.

        Raises:
            TimeoutError: it was not published within ``timeout`` seconds.
            ServerClosedError: it has been, and has closed since.
        """
        text = self._wait_for(name, time.monotonic() + timeout, timeout)
        if text == _CLOSED:
            raise ServerClosedError(f"server {name!r} has shut down")
        record = json.loads(text)
        known = secret if secret is not None else bytes.fromhex(record.get("secret", ""))
        if not known:
            raise MeshError(
                f"server {name!r} uses a secret of its own; set {SECRET_VARIABLE} on this rank too"
            )
        return ServerAddress(record["host"], int(record["port"]), known)

    def _wait_for(self, name: str, deadline: float, timeout: float) -> str:
        """What is published as ``name``; a store that ends meanwhile is looked for again."""
        left = timeout
        while True:
            store = self.connect(left)
            left = max(deadline - time.monotonic(), 0.01)
            store.set_timeout(timedelta(seconds=left))
            try:
                return bounded(functools.partial(store.get, self._key(name)), left).decode()
            except (DistError, RuntimeError, TimeoutError) as error:
                left = deadline - time.monotonic()
                if left < _GRACE_SECONDS:
                    raise TimeoutError(
                        f"waited {_told(timeout)} s for server {name!r} to publish its address in the store at "
                        f"{self.place}; has the server rank started?"
                    ) from error

    @property
    def place(self) -> str:
        """Where the store is, for messages."""
        return f"{self.host}:{self.port}"

    def connect(self, timeout: float) -> TCPStore:
        """A connection of its own to the store, within ``timeout`` seconds; errors as :func:`connect_store`."""
        return connect_store(self.host, self.port, timeout, awaited="the job's store")

    def _key(self, name: str) -> str:
        return f"{self.prefix}/{name}"
