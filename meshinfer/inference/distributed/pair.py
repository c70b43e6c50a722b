"""One standalone gloo pair: building it, its tags, and ending it when the other side does not answer."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, ClassVar

import torch
from torch.distributed import ProcessGroupGloo, Store, Work

from meshinfer.inference.distributed.frames import TAG_ABORT, TAG_FRAME

__all__ = ["CLIENT", "SERVER", "GlooDevice", "Pair"]

SERVER = 0
CLIENT = 1
FOREVER = timedelta(days=3650)  # idling is never a timeout
_MOMENT = timedelta(milliseconds=1)


class GlooDevice:
    """The listening socket and the event loop that all pairs of this process on one address share."""

    _shared: ClassVar[weakref.WeakValueDictionary[tuple[int, str], GlooDevice]] = (
        weakref.WeakValueDictionary()
    )
    _lock = threading.Lock()

    def __init__(self, address: str) -> None:
        self.handle = ProcessGroupGloo.create_device(hostname=address)

    @classmethod
    def at(cls, address: str) -> GlooDevice:
        """The device on ``address``, alive for as long as something holds it."""
        key = os.getpid(), address  # a forked child has the object, but not its thread
        with cls._lock:
            device = cls._shared.get(key)
            if device is None:
                device = cls._shared[key] = cls(address)
            return device


class Pair:
    """A process group of two, outside ``torch.distributed``'s own registry.

    Args:
        store: where the two sides exchange their gloo addresses.
        rank: :data:`SERVER` or :data:`CLIENT`.
        device: on the address to use.
        timeout: seconds for the other side to come.
    """

    def __init__(self, store: Store, rank: int, device: GlooDevice, timeout: float) -> None:
        options: Any = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = timedelta(seconds=timeout)
        options._devices = [device.handle]
        options._threads = 0  # they run collectives; sends and receives need none
        self._store = store  # the group keeps the C++ half only
        self._device = device
        self._peer = CLIENT if rank == SERVER else SERVER
        self._group: Any = ProcessGroupGloo(store, rank, 2, options)

    def send(self, message: list[torch.Tensor], tag: int = TAG_FRAME) -> Work:
        """Start to send; the message must stay as it is until the other side has received it. Never waits."""
        work: Work = self._group.send(message, self._peer, tag)
        return work

    def receive(self, message: list[torch.Tensor], tag: int = TAG_FRAME) -> Work:
        """Make room for one message; ``wait(FOREVER)`` on the result raises when the peer has gone."""
        work: Work = self._group.recv(message, self._peer, tag)
        return work

    def abort(self) -> None:
        """Close the connection at once, so that threads that wait on it raise.

        gloo has no call for this, but closes a pair for good when one of its waits runs out: we let one do so.
        """
        try:
            self.receive([torch.empty(1, dtype=torch.uint8, device="cpu")], TAG_ABORT).wait(_MOMENT)
        except RuntimeError:
            return  # the expected end, also when the pair was broken before


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
