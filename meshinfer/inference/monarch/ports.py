"""Sending and receiving bytes with monarch: the one file that knows how.

It uses the ports of monarch's mailboxes, a layer below ``Channel`` and ``Port``: those pickle each message in Python,
and open ports only for the actor of the calling thread. A message that is sent here is a finished pickle of one
``bytearray``, put together around the payload, which arrives in memory that can be written.
"""

from __future__ import annotations

import atexit
import logging
import os
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any, Final, Protocol

from meshinfer.errors import PeerLostError
from meshinfer.optional import load_monarch

__all__ = ["TICK_SECONDS", "Inbox", "Outlet", "Recipient", "actor_here", "own_actors"]

logger = logging.getLogger("meshinfer.monarch")

TICK_SECONDS: Final = 1.0
"""How often an inbox looks up when nothing comes."""
_MOMENT_SECONDS: Final = 0.1
"""Without a message, after which nothing is on its way any more from a process that has ended."""
_RINGS_MISSED: Final = 4
_SECONDS_TO_OPEN: Final = 2.0
_SECONDS_TO_END: Final = 2.0

_BYTEARRAY: Final = b"\x80\x05\x96"  # protocol 5; a bytearray, after 8 bytes of its length
_LENGTH: Final = struct.Struct("<Q")
_STOP: Final = b"."


class Recipient(Protocol):
    """To whom an inbox delivers, in its thread."""

    def receive(self, message: bytearray) -> None:
        """A message has come. What this raises ends the inbox."""

    def tick(self) -> None:
        """Called about every :data:`TICK_SECONDS`, and soon after :meth:`Inbox.ring`."""

    def cut_off(self, reason: str) -> None:
        """Nothing will come any more; ``reason`` is empty after :meth:`Inbox.close`."""

    def close(self) -> None:
        """The interpreter exits. Idempotent."""


_users: set[int] = set()
"""This process, once it uses monarch; in a fork of it, that one."""


@cache
def _monarch() -> SimpleNamespace:
    """What is used of monarch, imported late.

    Raises:
        ImportError: monarch is missing, or is another version.
    """
    load_monarch("transport 'monarch'")
    try:
        from monarch._rust_bindings.monarch_hyperactor.actor import PythonMessage, PythonMessageKind
        from monarch._rust_bindings.monarch_hyperactor.buffers import Buffer
        from monarch._rust_bindings.monarch_hyperactor.mailbox import PortId, PortRef
        from monarch.actor import context
    except ImportError as error:
        raise ImportError(
            f"transport 'monarch' needs torchmonarch 0.7 (pip install 'torchmonarch==0.7.*'): {error}"
        ) from error
    _users.add(os.getpid())
    kind: Any = PythonMessageKind
    return SimpleNamespace(
        Buffer=Buffer,
        PortId=PortId,
        PortRef=PortRef,
        Message=PythonMessage,
        context=context,
        result=kind.Result(None),
    )


def actor_here() -> Any:
    """The actor whose message this thread is handling, ``None`` if it handles none."""
    module = sys.modules.get("monarch._src.actor.actor_mesh")
    if module is None:
        return None  # without monarch there is no actor
    found = module._context.get()
    if found is None:
        return None
    _users.add(os.getpid())
    return found.actor_instance


def own_actors(known: Any = None) -> list[Callable[[], Any]]:
    """Ways to an actor of this process that can have a port, the best first.

    Args:
        known: an actor of this process from an earlier :func:`actor_here`.
    """
    here = actor_here()
    ways = [lambda actor=actor: actor for actor in (here, known) if actor is not None]
    return [*ways[: 1 if here is known else 2], _client_actor]


def _client_actor() -> Any:
    """Of a controller, or of a thread that belongs to no actor: the client that monarch has for each process."""
    try:
        return _monarch().context().actor_instance
    except BaseException as error:
        if type(error).__name__ != "PanicException":  # how monarch says that it cannot listen
            raise
        raise RuntimeError(f"monarch cannot start in this process: {error}") from error


class Outlet:
    """A way to one port, anywhere. Messages arrive in the order in which they were sent. Nobody is ever waited for.

    Args:
        actor: in whose name to send.
        address: of the port.

    Raises:
        ValueError: not the address of a port.
    """

    __slots__ = ("_actor", "_port")

    def __init__(self, actor: Any, address: str) -> None:
        monarch = _monarch()
        self._actor = actor
        self._port = monarch.PortRef(monarch.PortId.from_string(address))
        # What cannot be delivered would be reported to the sending actor, and end it.
        self._port.return_undeliverable = False

    def send(self, *parts: bytes | bytearray | memoryview) -> None:
        """Send ``parts`` as one message. It is lost when nobody is there any more, which is noticed elsewhere."""
        monarch = _monarch()
        buffer = monarch.Buffer()
        length = _LENGTH.pack(sum(map(len, parts)))
        buffer.write(b"".join((_BYTEARRAY, length, *parts, _STOP)))
        self._port.send(self._actor, monarch.Message(monarch.result, buffer.freeze(), []))


class Inbox:
    """A port of this process, and the thread that receives from it.

    It ends with the actor that has the port: monarch then delivers nothing, and says nothing either, so that an idle
    inbox sends itself a message from time to time.

    Args:
        recipient: gets what comes.
        name: of the thread.
        known_actor: see :func:`own_actors`.

    Raises:
        PeerLostError: no actor of this process can have a port.
        ValueError: this process was forked from one that uses monarch.
    """

    def __init__(self, recipient: Recipient, name: str, known_actor: Any = None) -> None:
        self._recipient = recipient
        self._name = name
        self._pid = os.getpid()
        self._closing = False
        self._rung = False
        self._thread: threading.Thread | None = None
        if _users and os.getpid() not in _users:
            raise ValueError(
                f"process {os.getpid()} was forked from one that uses monarch, and cannot use it; start it with"
                " 'spawn' or 'forkserver', or make it a process of monarch"
            )
        if not any(self._open(way()) for way in own_actors(known_actor)):
            self._closing = True
            raise PeerLostError("the actor of this process was stopped: nothing can reach it")
        _close_at_exit(recipient)

    @property
    def closing(self) -> bool:
        """Whether it has ended, or is about to."""
        return self._closing

    @property
    def receives_meanwhile(self) -> bool:
        """Whether messages are delivered while the calling thread waits."""
        return not self._closing and self._thread is not threading.current_thread()

    def outlet(self, address: str) -> Outlet:
        """A way from here to ``address``."""
        return Outlet(self.actor, address)

    def ring(self) -> None:
        """Have :meth:`Recipient.tick` called soon: when all that was sent before this has been delivered."""
        self._rung = True
        self._to_self.send()

    def close(self) -> None:
        """End the thread, and wait for it, but in the thread itself. Idempotent."""
        self._closing = True
        thread = self._thread
        if thread is None or self._pid != os.getpid():
            return  # in a fork there is no thread
        self._to_self.send()
        if thread is not threading.current_thread():
            thread.join(_SECONDS_TO_END)

    def _open(self, actor: Any) -> bool:
        """Whether a new port of ``actor`` can be reached."""
        handle, receiver = actor._mailbox.open_port()
        self.actor = actor
        self.address = str(handle.bind().port_id)
        self._to_self = Outlet(actor, self.address)
        opened = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(receiver, opened), name=self._name, daemon=True
        )
        self._thread.start()
        self._to_self.send()
        return opened.wait(_SECONDS_TO_OPEN)

    def _run(self, receiver: Any, opened: threading.Event) -> None:
        try:
            reason = self._receive(receiver, opened)
        except Exception as error:
            logger.exception("%s failed", self._name)
            reason = f"it failed: {error!r}"
        if opened.is_set():
            self._closing = True
            self._recipient.cut_off(reason)

    def _receive(self, receiver: Any, opened: threading.Event) -> str:
        """Until it is closed; returns why it ended otherwise."""
        missed, looked = 0, time.monotonic()
        while not self._closing and self._thread is threading.current_thread():
            message = _next(receiver, TICK_SECONDS)
            if message is None:
                if missed == _RINGS_MISSED:
                    return "its actor was stopped"
                missed += 1
                self._to_self.send()
            else:
                missed = 0
                if message:
                    self._recipient.receive(message)
                elif not opened.is_set():
                    opened.set()
            if self._rung:
                if message:
                    continue  # the ring is in the port, behind what had come before it
                self._hear_out(receiver)
            if self._rung or time.monotonic() - looked >= TICK_SECONDS:
                self._rung, looked = False, time.monotonic()
                self._recipient.tick()
        return ""

    def _hear_out(self, receiver: Any) -> None:
        """Deliver what is still on its way: until nothing comes for a moment, and not much longer than a tick."""
        until = time.monotonic() + TICK_SECONDS
        while not self._closing and time.monotonic() < until:
            message = _next(receiver, _MOMENT_SECONDS)
            if message is None:
                return
            if message:
                self._recipient.receive(message)


def _next(receiver: Any, seconds: float) -> bytearray | None:
    """The next message, empty where it is none of ours; ``None`` when none comes for a while."""
    try:
        message = receiver.recv_task().with_timeout(seconds).block_on()
    except TimeoutError:
        return None
    try:
        found = message.decode()
    except Exception as error:  # anybody can send anything to a port
        logger.warning("a message that is none of ours cannot be read: %s", str(error))
        return bytearray()
    if type(found) is not bytearray:
        logger.warning("a message that is none of ours has come: a %s", type(found).__name__)
        return bytearray()
    return found


_to_close: weakref.WeakSet[Recipient] = weakref.WeakSet()
_registered = threading.Event()


def _close_at_exit(recipient: Recipient) -> None:
    """Close it before monarch's own end, which has been registered by now: exit functions run backwards."""
    _to_close.add(recipient)
    if not _registered.is_set():
        _registered.set()
        atexit.register(_close_all)


def _close_all() -> None:
    for recipient in list(_to_close):
        recipient.close()
