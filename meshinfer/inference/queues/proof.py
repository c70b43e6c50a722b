"""How both sides prove that they belong together, before either interprets anything else.

::

    server -> client   hello: language, version, a nonce
    client -> server   reply: a hello of its own, and its proof over both
    server -> client   verdict: welcome and its own proof, or why not
"""

from __future__ import annotations

import errno
import hmac
import secrets
import socket
import time
from typing import Final

from meshinfer.errors import PeerLostError, RefusedError, ServerClosedError, TransportError
from meshinfer.inference.queues.address import Address

__all__ = [
    "HELLO_BYTES",
    "REPLY_BYTES",
    "VERDICT_BYTES",
    "check_hello",
    "check_verdict",
    "closed_verdict",
    "connect",
    "make_hello",
    "make_reply",
    "verdict",
]

_MAGIC: Final = b"mi-queue"
_VERSION: Final = b"00000001"
_NONCE_BYTES: Final = 32
_PROOF_BYTES: Final = 32
_WELCOME: Final = b"welcome."
_REFUSED: Final = b"refused."
_CLOSED: Final = b"closed.."
HELLO_BYTES: Final = len(_MAGIC) + len(_VERSION) + _NONCE_BYTES
REPLY_BYTES: Final = HELLO_BYTES + _PROOF_BYTES
VERDICT_BYTES: Final = len(_WELCOME) + _PROOF_BYTES
_NOBODY: Final = frozenset(
    {errno.EAGAIN, errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH}
)


def make_hello() -> bytes:
    """What the server says first, with a nonce that it never uses again."""
    return _MAGIC + _VERSION + secrets.token_bytes(_NONCE_BYTES)


def check_hello(hello: bytes, where: object) -> None:
    """:class:`RefusedError` unless what listens at ``where`` speaks our language."""
    if not hello.startswith(_MAGIC):
        raise RefusedError(f"what listens at {where} is no meshinfer queue server")
    if not hello.startswith(_MAGIC + _VERSION):
        raise RefusedError(f"the server at {where} runs another version of meshinfer")


def make_reply(secret: bytes, hello: bytes) -> bytes:
    """The client's answer to the server's ``hello``."""
    mine = make_hello()
    return mine + _proof(secret, b"client", hello, mine)


def verdict(secret: bytes, hello: bytes, reply: bytes) -> tuple[bytes, str]:
    """The server's answer to a client's ``reply`` to its ``hello``, and the objection if it is none of us."""
    theirs, proof = reply[:HELLO_BYTES], reply[HELLO_BYTES:]
    if not theirs.startswith(_MAGIC + _VERSION):
        return _REFUSED + bytes(_PROOF_BYTES), "it speaks another language or version"
    if not hmac.compare_digest(proof, _proof(secret, b"client", hello, theirs)):
        return _REFUSED + bytes(_PROOF_BYTES), "it does not hold the secret"
    return _WELCOME + _proof(secret, b"server", hello, theirs), ""


def closed_verdict() -> bytes:
    """The server's answer to a client that comes while it closes."""
    return _CLOSED + bytes(_PROOF_BYTES)


def check_verdict(secret: bytes, hello: bytes, reply: bytes, answer: bytes, where: object) -> None:
    """Raise unless the server at ``where`` has answered our ``reply`` to its ``hello`` with a welcome and its proof.

    Raises:
        RefusedError: it does not take us, or does not hold the secret.
        ServerClosedError: it is shutting down.
    """
    found, proof = answer[: len(_WELCOME)], answer[len(_WELCOME) :]
    if found == _CLOSED:
        raise ServerClosedError("the server has shut down")
    if found != _WELCOME:
        raise RefusedError(f"the server at {where} does not take us: the secret is not its own")
    if not hmac.compare_digest(proof, _proof(secret, b"server", hello, reply[:HELLO_BYTES])):
        raise RefusedError(f"what listens at {where} does not hold our secret")


def connect(address: Address, deadline: float) -> socket.socket:
    """Try once to connect, and prove both sides; the socket blocks afterwards.

    Args:
        address: of the server.
        deadline: ``time.monotonic()`` at which to give up.

    Raises:
        PeerLostError: nobody listens now, or it went away meanwhile; another try may find it.
        TimeoutError: somebody listens and says nothing, or the host does not answer.
        RefusedError: it is not the server meant, or does not take us.
        ServerClosedError: it is shutting down.
    """
    try:
        connection = address.call(_left(deadline))
        try:
            _join(connection, address, deadline)
            connection.settimeout(None)
            address.prepare(connection)
        except BaseException:
            connection.close()
            raise
    except TransportError:
        raise
    except TimeoutError as error:
        raise TimeoutError(
            f"the server at {address} did not answer in time; is it stopped, computing, or out of descriptors?"
        ) from error
    except OSError as error:
        if not isinstance(error, ConnectionError) and error.errno not in _NOBODY:
            raise
        raise PeerLostError(f"nobody listens at {address}: {error}") from error
    return connection


def _join(connection: socket.socket, address: Address, deadline: float) -> None:
    objection = address.objection_to(connection)
    if objection:
        raise RefusedError(f"the server at {address} is not ours: {objection}")
    hello = _receive(connection, HELLO_BYTES, address, deadline)
    check_hello(hello, address)
    reply = make_reply(address.secret, hello)
    connection.sendall(reply)
    answer = _receive(connection, VERDICT_BYTES, address, deadline)
    check_verdict(address.secret, hello, reply, answer, address)


def _proof(secret: bytes, role: bytes, server_hello: bytes, client_hello: bytes) -> bytes:
    return hmac.digest(secret, role + server_hello + client_hello, "sha256")


def _left(deadline: float) -> float:
    return max(deadline - time.monotonic(), 0.001)


def _receive(connection: socket.socket, count: int, address: Address, deadline: float) -> bytes:
    data = b""
    while len(data) < count:
        connection.settimeout(_left(deadline))
        piece = connection.recv(count - len(data))
        if not piece:
            raise PeerLostError(f"the server at {address} went away while this client joined")
        data += piece
    return data
