"""Where a queue server is found, and how both sides prove that they belong together."""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import socket
import struct
import time
from dataclasses import dataclass, field
from typing import Final

from meshinfer.errors import PeerLostError, RefusedError, ServerClosedError, TransportError

__all__ = [
    "HELLO_BYTES",
    "REPLY_BYTES",
    "Address",
    "closed_verdict",
    "connect",
    "listen",
    "make_hello",
    "objection_to",
    "process_behind",
    "verdict",
]

_MAGIC: Final = b"mi-queue"
_VERSION: Final = b"00000001"
_NONCE_BYTES: Final = 32
_PROOF_BYTES: Final = 32
HELLO_BYTES: Final = len(_MAGIC) + len(_VERSION) + _NONCE_BYTES
REPLY_BYTES: Final = HELLO_BYTES + _PROOF_BYTES
_LONGEST_NAME: Final = 100
_BACKLOG: Final = 4096
_CREDENTIALS: Final = struct.Struct("=3i")


_WELCOME: Final = b"welcome."
_REFUSED: Final = b"refused."
_CLOSED: Final = b"closed.."


@dataclass(frozen=True)
class Address:
    """A name in the abstract socket namespace, which needs no file, and the secret of those who may meet there.

    Attributes:
        name: any process of the same network namespace finds it.
        secret: of the job; never shown.
    """

    name: str
    secret: bytes = field(repr=False)

    @classmethod
    def of(cls, name: str | None, secret: bytes | None) -> Address:
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

    @property
    def path(self) -> str:
        """As the socket module takes it."""
        return f"\0{self.name}"


def listen(address: Address) -> socket.socket:
    """A socket that listens, does not block, and is not inherited.

    Raises:
        ValueError: another server listens there.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(address.path)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        if error.errno != errno.EADDRINUSE:
            raise
        raise ValueError(
            f"address: another server listens at {address}; close it first, or leave address out"
        ) from error
    return listener


def connect(address: Address, deadline: float) -> socket.socket:
    """Try once to connect, and prove both sides; the socket blocks afterwards.

    Args:
        address: of the server.
        deadline: ``time.monotonic()`` at which to give up.

    Raises:
        PeerLostError: nobody listens now, or it went away meanwhile; another try may find it.
        TimeoutError: somebody listens and says nothing.
        RefusedError: it is not the server meant, or does not take us.
        ServerClosedError: it is shutting down.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _reach(connection, address, deadline)
    except BaseException:
        connection.close()
        raise
    return connection


def _reach(connection: socket.socket, address: Address, deadline: float) -> None:
    try:
        _set_deadline(connection, deadline)
        connection.connect(address.path)
        _join(connection, address, deadline)
        connection.settimeout(None)
    except TransportError:
        raise
    except TimeoutError as error:
        raise TimeoutError(
            f"the server at {address} did not answer in time; is it stopped, computing, or out of descriptors?"
        ) from error
    except (ConnectionError, BlockingIOError) as error:
        raise PeerLostError(f"nobody listens at {address}: {error}") from error


def make_hello() -> bytes:
    """What both sides say first, with a nonce that they never use again."""
    return _MAGIC + _VERSION + secrets.token_bytes(_NONCE_BYTES)


def process_behind(connection: socket.socket) -> int:
    """Id of the process that made the other end."""
    return _credentials(connection)[0]


def objection_to(connection: socket.socket) -> str:
    """Why the other end cannot be one of us, before a byte was read from it; empty if it may be."""
    pid, uid = _credentials(connection)
    return "" if uid == os.geteuid() else f"process {pid} runs as user {uid}, not {os.geteuid()}"


def verdict(address: Address, hello: bytes, reply: bytes) -> tuple[bytes, str]:
    """The server's answer to a client's ``reply`` to its ``hello``, and the objection if it is none of us."""
    theirs, proof = reply[:HELLO_BYTES], reply[HELLO_BYTES:]
    if not theirs.startswith(_MAGIC + _VERSION):
        return _REFUSED + bytes(_PROOF_BYTES), "it speaks another language or version"
    if not hmac.compare_digest(proof, _proof(address, b"client", hello, theirs)):
        return _REFUSED + bytes(_PROOF_BYTES), "it does not hold the secret"
    return _WELCOME + _proof(address, b"server", hello, theirs), ""


def closed_verdict() -> bytes:
    """The server's answer to a client that comes while it closes."""
    return _CLOSED + bytes(_PROOF_BYTES)


def _join(connection: socket.socket, address: Address, deadline: float) -> None:
    objection = objection_to(connection)
    if objection:
        raise RefusedError(f"the server at {address} is not ours: {objection}")
    hello = _receive(connection, HELLO_BYTES, address, deadline)
    if not hello.startswith(_MAGIC):
        raise RefusedError(f"what listens at {address} is no meshinfer queue server")
    if not hello.startswith(_MAGIC + _VERSION):
        raise RefusedError(f"the server at {address} runs another version of meshinfer")
    mine = make_hello()
    connection.sendall(mine + _proof(address, b"client", hello, mine))
    answer = _receive(connection, len(_WELCOME) + _PROOF_BYTES, address, deadline)
    found, proof = answer[: len(_WELCOME)], answer[len(_WELCOME) :]
    if found == _CLOSED:
        raise ServerClosedError("the server has shut down")
    if found != _WELCOME:
        raise RefusedError(f"the server at {address} does not take us: the secret is not its own")
    if not hmac.compare_digest(proof, _proof(address, b"server", hello, mine)):
        raise RefusedError(f"what listens at {address} does not hold our secret")


def _credentials(connection: socket.socket) -> tuple[int, int]:
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    return pid, uid


def _proof(address: Address, role: bytes, server_hello: bytes, client_hello: bytes) -> bytes:
    return hmac.digest(address.secret, role + server_hello + client_hello, "sha256")


def _set_deadline(connection: socket.socket, deadline: float) -> None:
    connection.settimeout(max(deadline - time.monotonic(), 0.001))


def _receive(connection: socket.socket, count: int, address: Address, deadline: float) -> bytes:
    data = b""
    while len(data) < count:
        _set_deadline(connection, deadline)
        piece = connection.recv(count - len(data))
        if not piece:
            raise PeerLostError(f"the server at {address} went away while this client joined")
        data += piece
    return data
