"""Where a queue server listens: a name on its host, or a port of one interface."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import struct
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, Final

from meshinfer.inference.queues.silence import LOOK_SECONDS, is_silent, watch_tcp

__all__ = ["Address", "TcpAddress", "UnixAddress"]

_LONGEST_NAME: Final = 100
_BACKLOG: Final = 4096
_CREDENTIALS: Final = struct.Struct("=3i")
_SENT_AHEAD_BYTES: Final = 1 << 20


class Address(ABC):
    """How a socket is made at either end, and what is known of the other one before a byte was read from it.

    Attributes:
        secret: of those who may meet there; never shown.
        look_seconds: how often to ask :meth:`is_silent`; ``None`` where the system reports every end.
    """

    secret: bytes
    look_seconds: float | None = None

    def is_silent(self, connection: socket.socket) -> bool:
        """Whether nobody is at the other end any more, although the system has not said so."""
        return False

    @abstractmethod
    def listen(self) -> tuple[socket.socket, Address]:
        """A socket that listens, does not block, and is not inherited; and the address with what the system chose.

        Raises:
            ValueError: another server listens there, or it is no address of this host.
        """

    @abstractmethod
    def call(self, timeout: float) -> socket.socket:
        """A new connection. Raises whatever :meth:`socket.socket.connect` raises."""

    @abstractmethod
    def prepare(self, connection: socket.socket) -> None:
        """Set what a connection needs, at both ends."""

    @abstractmethod
    def who(self, connection: socket.socket) -> str:
        """The other end, for a message."""

    @abstractmethod
    def objection_to(self, connection: socket.socket) -> str:
        """Why the other end cannot be one of us; empty if it may be."""


@dataclass(frozen=True)
class UnixAddress(Address):
    """A name in the abstract socket namespace, which needs no file.

    Attributes:
        name: any process of the same network namespace finds it.
        secret: of the job; never shown.
    """

    name: str
    secret: bytes = field(repr=False)

    @classmethod
    def of(cls, name: str | None, secret: bytes | None) -> UnixAddress:
        """The address given, or a new one that nobody can guess.

        Raises:
            ValueError, TypeError: not a usable name.
        """
        if name is None:
            name = f"meshinfer-{secrets.token_hex(16)}"
        if not isinstance(name, str):
            raise TypeError(f"address: expected a str, found {type(name).__name__}")
        if not 1 <= len(name.encode()) <= _LONGEST_NAME or "\0" in name:
            raise ValueError(
                f"address={name!r}: expected 1 to {_LONGEST_NAME} bytes without NUL; or leave it out"
            )
        return cls(name, secrets.token_bytes(32) if secret is None else secret)

    def __str__(self) -> str:
        return f"@{self.name}"

    def listen(self) -> tuple[socket.socket, Address]:
        """See :meth:`Address.listen`."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _bind(listener, f"\0{self.name}")
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            raise ValueError(
                f"address: another server listens at {self}; close it first, or leave address out"
            ) from error
        return listener, self

    def call(self, timeout: float) -> socket.socket:
        """See :meth:`Address.call`."""
        return _connected(socket.AF_UNIX, f"\0{self.name}", timeout)

    def prepare(self, connection: socket.socket) -> None:
        """Let more bytes be under way than by default, for fewer switches in the midst of a large message."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SENT_AHEAD_BYTES)

    def who(self, connection: socket.socket) -> str:
        """The process that made the other end."""
        return f"process {_credentials(connection)[0]}"

    def objection_to(self, connection: socket.socket) -> str:
        """Only our own user is let in."""
        pid, uid = _credentials(connection)
        return (
            "" if uid == os.geteuid() else f"process {pid} runs as user {uid}, not {os.geteuid()}"
        )


@dataclass(frozen=True)
class TcpAddress(Address):
    """A port of one interface. Nothing is known of who connects: only the proof counts.

    Attributes:
        host: numeric.
        port: 0 to listen on one that the system chooses.
        secret: of the job; never shown.
    """

    host: str
    port: int
    secret: bytes = field(repr=False)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def look_seconds(self) -> float | None:  # type: ignore[override]
        """A host may vanish."""
        return LOOK_SECONDS

    def is_silent(self, connection: socket.socket) -> bool:
        """See :meth:`Address.is_silent`."""
        return is_silent(connection)

    @property
    def _family(self) -> int:
        return socket.AF_INET6 if ":" in self.host else socket.AF_INET

    def listen(self) -> tuple[socket.socket, Address]:
        """See :meth:`Address.listen`."""
        listener = socket.socket(self._family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(
                socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
            )  # of a server that has closed
            _bind(listener, (self.host, self.port))
        except OSError as error:
            raise ValueError(
                f"cannot listen at {self} on {socket.gethostname()}: {error.strerror}; give the address of an interface"
                " of this host as host=, and leave port= out to let the system choose one that is free"
            ) from error
        return listener, replace(self, port=listener.getsockname()[1])

    def call(self, timeout: float) -> socket.socket:
        """See :meth:`Address.call`."""
        connection = _connected(self._family, (self.host, self.port), timeout)
        if (
            connection.getsockname() == connection.getpeername()
        ):  # an unused port of this host may be given to us
            connection.close()
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        return connection

    def prepare(self, connection: socket.socket) -> None:
        """Send at once, and notice that the other host has vanished."""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        watch_tcp(connection)

    def who(self, connection: socket.socket) -> str:
        """Where the other end is."""
        try:
            host, port, *_ = connection.getpeername()
        except OSError:  # it has gone
            return "a process unknown"
        return f"a process at {TcpAddress(host, port, b'')}"

    def objection_to(self, connection: socket.socket) -> str:
        """None, before the proof."""
        return ""


def _bind(listener: socket.socket, where: Any) -> None:
    try:
        listener.bind(where)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError:
        listener.close()
        raise


def _connected(family: int, where: Any, timeout: float) -> socket.socket:
    connection = socket.socket(family, socket.SOCK_STREAM)
    try:
        connection.settimeout(timeout)
        connection.connect(where)
    except BaseException:
        connection.close()
        raise
    return connection


def _credentials(connection: socket.socket) -> tuple[int, int]:
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid
