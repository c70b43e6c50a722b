"""How the ranks of a job find what rank 0 offers, where no launcher tells them a port.

Rank 0 lights a :class:`Beacon`: it listens on the first free one of a few ports that every rank derives from the job's
identity. Whoever knocks there sends a nonce, and the answer proves that it is this job's beacon, so other jobs' beacons
and any other program on these ports are told apart and passed over::

    rank -> beacon   magic, nonce
    beacon -> rank   magic, proof of the identity, proof of the job's secret, length, content

Nothing is unpickled: the content is JSON, read after the proof.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import hmac
import json
import logging
import os
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from meshinfer.errors import MeshError
from meshinfer.rendezvous import listen

__all__ = ["Beacon", "Key", "candidate_ports"]

logger = logging.getLogger("meshinfer.beacon")

MAGIC = b"mi-bcn1\n"
NONCE_BYTES = 32
KNOCK_BYTES = len(MAGIC) + NONCE_BYTES
HEAD = struct.Struct("!8s32s32sH")

_PORTS = range(61000, 65536)  # above those that systems give to outgoing connections
_CANDIDATES = 8
_VISIT_SECONDS = 5.0
_MOST_VISITORS = 512
_lit: weakref.WeakSet[Beacon] = weakref.WeakSet()


def candidate_ports(identity: str, avoid: Iterable[int] = ()) -> list[int]:
    """The ports where the beacon of a job may be, in the order in which rank 0 tries them.

    Args:
        identity: of the job.
        avoid: ports that belong to the user.
    """
    digests = (hashlib.sha256(f"{number}/{identity}".encode()).digest() for number in range(64))
    ports = (_PORTS[int.from_bytes(digest[:8], "big") % len(_PORTS)] for digest in digests)
    return [port for port in dict.fromkeys(ports) if port not in set(avoid)][:_CANDIDATES]


class Key:
    """What a beacon proves: which job it is of, and that it holds the job's secret if there is one."""

    def __init__(self, identity: str, secret: bytes | None) -> None:
        self._identity = hashlib.sha256(identity.encode()).digest()
        self._secret = secret

    def proofs(self, nonce: bytes, content: bytes) -> tuple[bytes, bytes]:
        """For the identity and for the secret; the latter is all zeros without one."""
        text = nonce + content
        of_identity = hmac.digest(self._identity, b"identity" + text, "sha256")
        if self._secret is None:
            return of_identity, bytes(32)
        return of_identity, hmac.digest(self._secret, b"secret" + self._identity + text, "sha256")


class Beacon:
    """Answers whoever knocks at one of its addresses, in a thread of its own, until it is closed.

    Args:
        key: of the job.
        addresses: numeric addresses of this host.
        ports: candidates, see :func:`candidate_ports`; each address gets the first that is free.
        content: what to tell; small, as JSON can hold it.

    Raises:
        MeshError: no address is of this host, or all the ports of one are taken.
    """

    def __init__(
        self,
        key: Key,
        addresses: Sequence[str],
        ports: Sequence[int],
        content: Mapping[str, Any],
    ) -> None:
        self._key = key
        self._content = json.dumps(content).encode()
        self._listeners = _open_listeners(addresses, ports)
        self.addresses = [listener.getsockname()[:2] for listener in self._listeners]
        _watch_forks()
        self._stop, self._stopped = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._visitors: dict[socket.socket, _Visitor] = {}
        self._thread = threading.Thread(target=self._run, name="meshinfer-beacon", daemon=True)
        _lit.add(self)
        self._thread.start()
        logger.debug("beacon at %s", self.addresses)

    def close(self) -> None:
        """Stop answering, and free the ports. Idempotent."""
        if self._thread.is_alive():
            self._stop.send(b"!")
            self._thread.join()
        self.forget()

    def forget(self) -> None:
        """Close what belongs to it without its thread, which a forked child has not."""
        for each in (*self._listeners, *self._visitors, self._stop, self._stopped):
            each.close()
        self._visitors.clear()
        self._selector.close()

    def _run(self) -> None:
        for each in (*self._listeners, self._stopped):
            each.setblocking(False)
            self._selector.register(each, selectors.EVENT_READ)
        while True:
            ready = self._selector.select(_VISIT_SECONDS if self._visitors else None)
            for key, _ in ready:
                if key.fileobj is self._stopped:
                    return
                self._serve(key.fileobj)  # type: ignore[arg-type]
            self._dismiss()

    def _serve(self, ready: socket.socket) -> None:
        visitor = self._visitors.get(ready)
        try:
            if visitor is not None:
                if visitor.listen(self._key, self._content):
                    self._leave(ready)
                return
            guest, _ = ready.accept()
        except OSError as error:  # it has gone again, or there are no descriptors left
            logger.debug("a visitor of the beacon has gone: %s", str(error))
            if visitor is not None:
                self._leave(ready)
            return
        guest.setblocking(False)
        self._visitors[guest] = _Visitor(guest)
        self._selector.register(guest, selectors.EVENT_READ)

    def _dismiss(self) -> None:
        """Strangers who connect and say nothing."""
        late = time.monotonic() - _VISIT_SECONDS
        surplus = len(self._visitors) - _MOST_VISITORS
        for number, (guest, visitor) in enumerate(list(self._visitors.items())):
            if visitor.since > late and number >= surplus:
                return
            self._leave(guest)

    def _leave(self, guest: socket.socket) -> None:
        del self._visitors[guest]
        self._selector.unregister(guest)
        guest.close()


class _Visitor:
    """Somebody who has connected, until what it has to say is complete."""

    def __init__(self, guest: socket.socket) -> None:
        self.since = time.monotonic()
        self._guest = guest
        self._heard = b""

    def listen(self, key: Key, content: bytes) -> bool:
        """Whether that was all: it has been answered, has hung up, or is no rank."""
        heard = self._guest.recv(KNOCK_BYTES - len(self._heard))
        self._heard += heard
        if not heard or not MAGIC.startswith(self._heard[: len(MAGIC)]):
            return True
        if len(self._heard) < KNOCK_BYTES:
            return False
        proofs = key.proofs(self._heard[len(MAGIC) :], content)
        self._guest.send(HEAD.pack(MAGIC, *proofs, len(content)) + content)
        return True


def _open_listeners(addresses: Sequence[str], ports: Sequence[int]) -> list[socket.socket]:
    opened: list[socket.socket] = []
    absent: OSError | None = None
    for address in dict.fromkeys(addresses):
        try:
            opened.append(_listen_first(address, ports))
        except MeshError:
            for listener in opened:
                listener.close()
            raise
        except OSError as error:
            absent = error
    if not opened:
        raise MeshError(
            f"rank 0 cannot listen on {' or '.join(addresses)} at {socket.gethostname()}: {absent}; give an address of "
            "this host with host= of init_mesh"
        ) from absent
    return opened


def _listen_first(address: str, ports: Sequence[int]) -> socket.socket:
    for port in ports:
        try:
            return listen(address, port)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
    raise MeshError(
        f"rank 0 cannot listen at {socket.gethostname()}: all of its ports on {address} are taken "
        f"({', '.join(map(str, ports))}); set MESHINFER_JOB_ID to another word on every rank for other ports, or give "
        "host= and port= to init_mesh"
    )


@functools.cache
def _watch_forks() -> None:
    os.register_at_fork(after_in_child=_forget_all)


def _forget_all() -> None:
    """In a forked child: it must not hold the ports when its parent has ended."""
    for beacon in list(_lit):
        beacon.forget()
    _lit.clear()
