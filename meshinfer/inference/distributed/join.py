"""How a client and a server meet: hello, answer, addresses, proof.

All messages are queue items in the server's private store, each sealed with the job secret::

    client -> "join"             hello: who I am, library version, layout fingerprints, a nonce
    server -> "answer/<nonce>"   a session number and a nonce of its own, or why not
    both   -> "pair/<nonce>/..." gloo addresses, for the pair; what else a channel for rows needs
    both   -> first frame        proof of the secret on the new pair itself

Queues leave no key behind, and a client that dies in between leaves at most its own, which the server removes.
Nothing that a peer sent is unpickled before the proof; what is read before it is JSON.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

from torch.distributed import DistError, TCPStore

import meshinfer
from meshinfer.errors import RefusedError, ServerClosedError
from meshinfer.inference.distributed.pair import (
    CLIENT,
    SERVER,
    AddressExchange,
    GlooDevice,
    Pair,
    plain,
)
from meshinfer.inference.distributed.plane import RowBackend
from meshinfer.rendezvous import bounded

__all__ = [
    "JOIN_QUEUE",
    "Compared",
    "Hello",
    "Identity",
    "Joining",
    "answer_queue",
    "open_sealed",
    "seal",
]

JOIN_QUEUE = "join"
_NONCE_CHARACTERS = 32
_EXCHANGES = ("gloo", "requests", "replies")


class Compared(Protocol):
    """What both sides must have alike, as a :class:`~meshinfer.layout.PayloadLayout` is."""

    @property
    def name(self) -> str:
        """For errors."""

    @property
    def fingerprint(self) -> str:
        """Of all that must be alike."""

    def describe(self) -> dict[str, Any]:
        """It in JSON values."""

    def difference(self, other_description: Mapping[str, Any]) -> str:
        """One line on the first differences from another's :meth:`describe`."""


@dataclass(frozen=True)
class Identity:
    """Who a client is. A new session of the same rank and index replaces the old one.

    Args:
        rank: of the process in its job; ``None`` for a client that nobody replaces.
        index: which of the clients of that rank.
        token: sets a client apart that nobody replaces, and each copy that was pickled into another process.
    """

    rank: int | None = None
    index: int = 0
    token: str = ""

    def copy(self) -> Identity:
        """The same client, in a process of its own."""
        return replace(self, token=secrets.token_hex(8))

    def __str__(self) -> str:
        name = "client" if self.rank is None else f"rank {self.rank}"
        return name if self.index == 0 else f"{name} client {self.index}"


@dataclass(frozen=True)
class Hello:
    """What a client says of itself before it is admitted."""

    identity: Identity
    nonce: str
    version: str
    request: Mapping[str, Any]
    response: Mapping[str, Any]
    host: str
    pid: int
    absent: bool = False
    """The client never connected and never will."""
    failed: bool = False
    """Because of an exception."""
    rows: Mapping[str, Any] | None = None
    """How its rows travel, if not in their frames: the name of a backend, and what that says of this side."""

    @classmethod
    def of(
        cls,
        identity: Identity,
        request: Compared,
        response: Compared,
        *,
        absent: bool = False,
        failed: bool = False,
        rows: Mapping[str, Any] | None = None,
    ) -> Hello:
        """This process's."""
        return cls(
            identity=identity,
            nonce=secrets.token_hex(_NONCE_CHARACTERS // 2),
            version=meshinfer.__version__,
            request={"fingerprint": request.fingerprint, **request.describe()},
            response={"fingerprint": response.fingerprint, **response.describe()},
            host=socket.gethostname(),
            pid=os.getpid(),
            absent=absent,
            failed=failed,
            rows=rows,
        )

    def to_json(self) -> dict[str, Any]:
        """As JSON can hold it."""
        return {**vars(self), "identity": vars(self.identity)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Hello:
        """Raises :class:`ValueError`, :class:`TypeError` or :class:`KeyError` for anything but a hello."""
        hello = cls(**{**fields, "identity": Identity(**fields["identity"])})
        check_nonce(hello.nonce)
        return hello

    def __str__(self) -> str:
        return f"{self.identity} (pid {self.pid} on {self.host})"

    def objection(self, request: Compared, response: Compared, here: str) -> str | None:
        """Why a server with these layouts, called ``here``, cannot serve this client, or ``None``."""
        for layout, theirs in ((request, self.request), (response, self.response)):
            if theirs["fingerprint"] != layout.fingerprint:
                return f"the {layout.name} layouts differ: {layout.difference(theirs)} (here: the {here})"
        return None


def check_nonce(nonce: object) -> str:
    """A nonce becomes part of queue names: only what :meth:`Hello.of` makes may."""
    if not isinstance(nonce, str) or len(nonce) != _NONCE_CHARACTERS or not nonce.isalnum():
        raise ValueError("not a nonce")
    return nonce


def objection_to_version(claimed: Mapping[str, Any]) -> str | None:
    """Looked at before the rest of a hello, whose fields another version may have changed."""
    theirs = claimed.get("version")
    if theirs == meshinfer.__version__:
        return None
    return (
        f"the client runs meshinfer {theirs}, the server {meshinfer.__version__}; "
        "install one version"
    )


def objection_to_rows(theirs: Mapping[str, Any] | None, here: RowBackend | None) -> str | None:
    """Why a server whose rows travel so cannot have a client whose rows travel so, or ``None``."""
    if theirs is None:
        return None
    if here is not None and here.name == theirs["backend"]:
        return here.objection(theirs)
    ours = "gloo" if here is None else here.name
    return (
        f"the client has backend={theirs['backend']!r} and the server backend={ours!r}; "
        "give both the same, or the client backend='gloo'"
    )


def answer_queue(nonce: str) -> str:
    """Where the client with this nonce looks for the server's answer."""
    return f"answer/{nonce}"


def seal(secret: bytes, context: str, content: Mapping[str, Any]) -> bytes:
    """``content`` as bytes with a proof that the sender holds ``secret`` and meant it for ``context``."""
    text = json.dumps(content).encode()
    return _mac(secret, context, text).hex().encode() + text


def open_sealed(secret: bytes, context: str, data: bytes) -> dict[str, Any] | None:
    """The content, or ``None`` when it was not sealed with ``secret`` for ``context``."""
    proof, text = data[:64], data[64:]
    if not hmac.compare_digest(proof, _mac(secret, context, text).hex().encode()):
        return None
    content: dict[str, Any] = json.loads(text)
    return content


def _mac(secret: bytes, context: str, text: bytes) -> bytes:
    return hmac.new(secret, context.encode() + b"\0" + text, hashlib.sha256).digest()


class Joining:
    """One side of one join, until the pair is built and proved.

    Args:
        store: a connection of its own to the server's private store.
        secret: of the job.
        nonce: of the client's hello.
        rank: :data:`SERVER` or :data:`CLIENT`.
        timeout: seconds for the rest of the join.
        push: puts a value into a queue of the store over another connection, for :meth:`give_up`.
    """

    def __init__(
        self,
        store: TCPStore,
        secret: bytes,
        nonce: str,
        rank: int,
        timeout: float,
        push: Callable[[str, bytes], None] | None = None,
    ) -> None:
        self.store = store
        self._push = push
        self.rank = rank
        self._secret = secret
        self._nonce = nonce
        self._deadline = time.monotonic() + timeout

    def remaining(self) -> float:
        """Seconds left, never quite zero."""
        return max(self._deadline - time.monotonic(), 0.01)

    def left(self) -> timedelta:
        """As :meth:`remaining`, for torch."""
        return timedelta(seconds=self.remaining())

    def say_hello(self, hello: Hello) -> dict[str, Any]:
        """Client: ask to be admitted; the server's answer.

        Raises:
            TimeoutError: no answer.
            RefusedError: the server said no, or does not hold our secret.
            ServerClosedError: it is shutting down.
        """
        self.announce(hello)
        data = self._pop(answer_queue(self._nonce), "the server's answer")
        answer = open_sealed(self._secret, f"answer/{self._nonce}", data)
        if answer is None:
            raise RefusedError(
                "the server holds another job secret: this is the server of another job, or MESHINFER_SECRET "
                "(or secret=) differs between the two ranks"
            )
        if "closed" in answer:
            raise ServerClosedError("the server is shutting down")
        if "refused" in answer:
            raise RefusedError(f"{hello} was refused: {answer['refused']}")
        return answer

    def announce(self, hello: Hello) -> None:
        """Client: put a hello where the server looks for it."""
        self.store.queue_push(JOIN_QUEUE, seal(self._secret, "hello", hello.to_json()))

    def answer(self, content: Mapping[str, Any]) -> None:
        """Server: admit or refuse."""
        sealed = seal(self._secret, f"answer/{self._nonce}", content)
        self.store.queue_push(answer_queue(self._nonce), sealed)

    def build_pair(self, device: GlooDevice, large: tuple[bool, ...]) -> Pair:
        """Both: the pair, once the other side has come too; ``large`` as :class:`Pair` has it.

        Raises:
            TimeoutError: it has not.
        """
        exchange = self.exchange("gloo")
        try:
            return Pair(exchange, self.rank, device, self.remaining(), large)
        except RuntimeError as error:
            raise TimeoutError(
                f"the other side did not complete the gloo pair: {plain(error)}"
            ) from error
        finally:
            exchange.forget()

    def exchange(self, name: str) -> AddressExchange:
        """Both: a store of the same name at both sides, for the addresses of what is built between them."""
        return AddressExchange(
            partial(self._send_address, name), partial(self._receive_address, name)
        )

    def give_up(self, name: str) -> None:
        """Server, in any thread: whoever waits for the client in the exchange ``name`` is to wait no longer."""
        if self._push is not None:
            self._push(self._address_queue(name, CLIENT), b"")

    def proof(self, rank: int, server_nonce: str) -> bytes:
        """What the side ``rank`` shows on the new pair."""
        return _mac(self._secret, f"pair/{rank}", f"{self._nonce}/{server_nonce}".encode())

    def clean_up(self) -> None:
        """Server: remove what a client that died in between has left in the store."""
        left = [answer_queue(self._nonce)]
        left += [
            self._address_queue(name, side) for name in _EXCHANGES for side in (SERVER, CLIENT)
        ]
        with contextlib.suppress(
            DistError, RuntimeError
        ):  # an empty queue, or a store that has closed meanwhile
            for queue in left:
                while self.store.queue_len(queue):
                    self.store.queue_pop(queue, block=False)

    def _send_address(self, name: str, key: str, value: bytes) -> None:
        queue = self._address_queue(name, self.rank)
        content = {"key": key, "value": value.hex()}
        self.store.queue_push(queue, seal(self._secret, queue, content))

    def _receive_address(self, name: str) -> tuple[str, bytes]:
        queue = self._address_queue(name, CLIENT if self.rank == SERVER else SERVER)
        data = self._pop(queue, f"the other side's {name} address")
        content = open_sealed(self._secret, queue, data)
        if content is None:
            raise RefusedError("an address in the store was not sealed with the job secret")
        return content["key"], bytes.fromhex(content["value"])

    def _address_queue(self, name: str, rank: int) -> str:
        return f"pair/{self._nonce}/{name}/{rank}"

    def _pop(self, queue: str, awaited: str) -> bytes:
        left = self.remaining()
        self.store.set_timeout(timedelta(seconds=left))
        try:
            return bounded(lambda: self.store.queue_pop(queue), left)
        except (DistError, RuntimeError, TimeoutError) as error:
            raise TimeoutError(
                f"waited {left:.1f} s for {awaited} in the store at {self.store.host}:{self.store.port}; "
                f"the last word was: {error}"
            ) from error
