"""A client and its server, joined by standalone gloo groups: building them, and ending them by force."""

from __future__ import annotations

import os
import re
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar, Protocol

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, Store, Work

from meshinfer.inference.distributed.frames import TAG_ABORT, TAG_END, TAG_FRAME, TAG_PROBE

__all__ = ["CLIENT", "SERVER", "GlooDevice", "Pair", "Receiving", "plain"]

SERVER = 0
CLIENT = 1
FOREVER = timedelta(days=3650)  # idling is never a timeout
_MOMENT = timedelta(milliseconds=1)
_DECORATION = re.compile(r"^\[[^\]]*\.cc:\d+\] |\. This (is|may be) .*$", re.DOTALL)


class GlooDevice:
    """The listening socket and the event loop that this process's pairs of one side share.

    Where a process is on both sides of a pair, each has a loop of its own: one loop for both would spin on the lock of
    the one half while the thread that holds it waits for the processor.
    """

    _shared: ClassVar[weakref.WeakValueDictionary[tuple[int, str, int], GlooDevice]] = (
        weakref.WeakValueDictionary()
    )
    _lock = threading.Lock()

    def __init__(self, address: str) -> None:
        self.handle = ProcessGroupGloo.create_device(hostname=address)

    @classmethod
    def at(cls, address: str, rank: int) -> GlooDevice:
        """The device on ``address`` for the side ``rank``, alive for as long as something holds it."""
        key = os.getpid(), address, rank  # a forked child has the object, but not its thread
        with cls._lock:
            device = cls._shared.get(key)
            if device is None:
                device = cls._shared[key] = cls(address)
            return device


class Receiving(Protocol):
    """A message that is on its way, or will be."""

    def wait(self, timeout: timedelta) -> bool:
        """Until it is here; raises :class:`RuntimeError` when it will not come, or has not by then."""


class _Large:
    """A message that takes more than one read, and a short one that follows it.

    gloo never wakes who waits for the message that had come in part when the peer died. It does wake who waits for a
    later one.
    """

    __slots__ = ("_end", "_following", "_message")

    def __init__(self, message: Work, end: list[torch.Tensor], following: Work) -> None:
        self._message = message
        self._end = end
        self._following = following

    def wait(self, timeout: timedelta) -> bool:
        """See :class:`Receiving`."""
        return self._following.wait(timeout) and self._message.wait(timeout)


class Pair:
    """Two process groups of two, one for each direction, outside ``torch.distributed``'s own registry.

    Two, because gloo's loop thread spins on a connection's lock while a writer holds it: on a connection that both
    sides write to, an answer arrives while the thread that asked still holds the lock, perhaps without a processor,
    and where cores are scarce each such meeting costs milliseconds.

    Args:
        store: where the two sides exchange their gloo addresses.
        rank: :data:`SERVER` or :data:`CLIENT`.
        device: on the address to use.
        timeout: seconds for the other side to come.
        large: whether requests, and replies, may take more than one read. Whatever has a tag of its own may.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        device: GlooDevice,
        timeout: float,
        large: tuple[bool, ...] = (False, False),
    ) -> None:
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=timeout)
        options._devices = [device.handle]
        options._threads = 0  # they run collectives; sends and receives need none
        self._store = store  # the groups keep the C++ half only
        self._device = device
        self._peer = CLIENT if rank == SERVER else SERVER
        requests, replies = (
            ProcessGroupGloo(PrefixStore(name, store), rank, 2, options)
            for name in ("requests", "replies")
        )
        self._outgoing: Any = requests if rank == CLIENT else replies
        self._incoming: Any = replies if rank == CLIENT else requests
        self._large_outgoing, self._large_incoming = large if rank == CLIENT else large[::-1]
        self._probes: list[Any] = []

    def send(self, message: list[torch.Tensor], tag: int = TAG_FRAME) -> list[Any]:
        """Start to send. Never waits.

        Returns:
            What must be kept, as it is, until the other side has received it; and so must the message.
        """
        held: list[Any] = [self._outgoing.send(message, self._peer, tag)]
        if tag != TAG_FRAME or self._large_outgoing:
            end = _nothing()
            held += [end, self._outgoing.send(end, self._peer, tag + TAG_END)]
        return held

    def receive(self, message: list[torch.Tensor], tag: int = TAG_FRAME) -> Receiving:
        """Make room for one message; ``wait(FOREVER)`` on the result raises when the peer has gone."""
        work: Work = self._incoming.recv(message, self._peer, tag)
        if tag == TAG_FRAME and not self._large_incoming:
            return work
        end = _nothing()
        return _Large(work, end, self._incoming.recv(end, self._peer, tag + TAG_END))

    def probe(self) -> None:
        """:class:`RuntimeError` if the connection to the peer is known to be broken. Never waits.

        A message that the peer never makes room for: gloo only announces it.
        """
        empty = _nothing()
        self._probes.append((empty, self._outgoing.send(empty, self._peer, TAG_PROBE)))

    def abort(self) -> None:
        """Close the connections at once, so that threads that wait on them raise.

        gloo has no call for this, but closes a connection for good when one of its waits runs out: we let one do so.
        """
        for group in (self._incoming, self._outgoing):
            try:
                group.recv(_nothing(), self._peer, TAG_ABORT).wait(_MOMENT)
            except RuntimeError:
                continue  # the expected end, also where the connection was broken before


def plain(error: BaseException) -> str:
    """What gloo says, without its source file and its advice."""
    return _DECORATION.sub("", str(error))


def _nothing() -> list[torch.Tensor]:
    return [torch.zeros(1, dtype=torch.uint8, device="cpu")]


class AddressExchange(Store):
    """The store that gloo sees while it builds a pair: its two keys travel as two authenticated messages.

    Both sides would otherwise have to keep a connection to a ``TCPStore`` for as long as the pair lives, since the
    group never lets its store go.

    Args:
        send: takes what this side publishes.
        receive: waits for what the other side publishes; raises :class:`TimeoutError`.
    """

    def __init__(
        self, send: Callable[[str, bytes], None], receive: Callable[[], tuple[str, bytes]]
    ) -> None:
        super().__init__()
        self._send, self._receive = send, receive
        self._known: dict[str, bytes] = {}

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]
        self._known[key] = value
        self._send(key, value)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._known[key]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        while not all(key in self._known for key in keys):
            key, value = self._receive()
            self._known[key] = value

    def forget(self) -> None:
        """The pair is built: let the connection behind ``send`` and ``receive`` go."""
        self._send = self._receive = _finished


def _finished(*_: object) -> Any:
    raise RuntimeError("this pair has been built already")
