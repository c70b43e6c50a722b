"""A queue at a TCP address and nothing else, and a program whose network goes down: run it as a file."""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

import torch
from tensordict import TensorDict, TensorDictBase

from meshinfer import InferenceServer, PeerLostError
from meshinfer.inference.queues import address as addresses
from meshinfer.inference.queues import silence
from meshinfer.inference.queues.address import TcpAddress
from meshinfer.inference.queues.client import QueueClient
from meshinfer.inference.queues.locate import FixedPlace
from meshinfer.inference.queues.served import QueueTransport

SECONDS = 20.0
NO_NAMESPACES = 77
MIB = 1 << 20


class TcpTransport(QueueTransport):
    """On the loopback interface."""

    transport_kind = "custom"

    def __init__(self, port: int = 0, secret: bytes = b"secret", timeout: float = SECONDS) -> None:
        super().__init__(TcpAddress("127.0.0.1", port, secret), timeout)
        found = self._server().address
        assert isinstance(found, TcpAddress)
        self.address = found

    def client(self) -> QueueClient:
        return QueueClient(FixedPlace(self.address), self.timeout)

    def serve_elsewhere(self) -> Callable[[], QueueTransport]:
        raise AssertionError("nobody asks")

    def _place(self) -> TcpAddress:
        return self.address


def numbers(value: int, megabytes: int = 0) -> TensorDict:
    return TensorDict({"x": torch.full((max(megabytes * MIB, 1),), value, dtype=torch.uint8)})


def lose_the_network() -> None:
    """Both ends are here. What waits learns that its peer has vanished; what was only slow did not."""
    _hurry()
    _new_network()
    _switch(on=True)
    gate = threading.Event()

    def hold(batch: TensorDictBase) -> TensorDictBase:
        if batch["x"].flatten()[0] == 1:
            gate.wait(SECONDS)
        return batch.clone()

    transport = TcpTransport()
    with InferenceServer(hold, transport) as server:
        clients = server.clients(3)
        for client in clients:
            client(numbers(0), SECONDS)
        waiting, sending, flooding = clients
        future = waiting.submit(numbers(1))
        flood = []
        with suppress(TimeoutError):  # 64 MiB lie there and nobody takes more
            for _ in range(40):
                flood.append(flooding.submit(numbers(2, 4), 2.5))
        assert transport.num_lost == 0, "a slow policy is no lost peer"
        gate.set()
        for each in (future, *flood):
            each.result(SECONDS)
        gate.clear()
        future = waiting.submit(numbers(1))
        _switch(on=False)
        began = time.monotonic()
        late = sending.submit(numbers(0))
        for each in (late, future):
            try:
                each.result()
            except PeerLostError as error:
                print(type(error).__name__, error)
        while transport.num_lost < 3 and time.monotonic() < began + SECONDS:
            transport.wait_for_work(0.05)
        print("lost", transport.num_lost)
        _switch(on=True)
        gate.set()
        print("again", int(waiting(numbers(0), SECONDS)["x"]))


def _hurry() -> None:
    """A tenth of the usual patience."""
    silence._UNANSWERED_MS = 1150
    silence.LOOK_SECONDS = addresses.LOOK_SECONDS = 0.25
    silence._KEEP_ALIVE = dict.fromkeys(silence._KEEP_ALIVE, 1)


def _new_network() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    new_user, new_net = 0x10000000, 0x40000000
    if libc.unshare(new_net) and libc.unshare(new_user | new_net):
        print(os.strerror(ctypes.get_errno()))
        _leave(NO_NAMESPACES)


def _switch(*, on: bool) -> None:
    """The loopback interface up or down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        set_flags, up = 0x8914, 1
        fcntl.ioctl(control, set_flags, struct.pack("16sh14x", b"lo", up if on else 0))


def _leave(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.exit(status)


if __name__ == "__main__":
    lose_the_network()
