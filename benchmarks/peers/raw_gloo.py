"""The floor of gloo: a blocking ping-pong over one standalone pair for each client, with no policy behind it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING

from ..workload import Workload
from . import MONARCH_DISTRIBUTED, ActorService, Service, Session
from .child import ChildService, HandleSource, hold

if TYPE_CHECKING:
    from torch.distributed import ProcessGroupGloo, TCPStore

NAME = "raw_gloo"
PACKAGES = ("torch",)
MODULES = ("torch.distributed",)
HEADER_BYTES = 64
_SMALLEST_MESSAGE = 96
_HOST = "127.0.0.1"
_STORE_TIMEOUT = timedelta(seconds=60)
_IDLE_TIMEOUT = timedelta(days=1)
_GOODBYE = 1


def open_service(workload: Workload, transport: str) -> Service | ActorService:
    if transport == MONARCH_DISTRIBUTED:
        from .monarch_actors import MonarchService, ServerActor

        return MonarchService(workload, RawConnector, ServerActor, echoing)
    return ChildService(workload, partial(hold, echoing), RawConnector)


def message_bytes(payload: int) -> int:
    """Bytes of one message: a header and the payload, in steps of 32, at least 96."""
    return max(_SMALLEST_MESSAGE, -(-(HEADER_BYTES + payload) // 32) * 32)


@contextmanager
def echoing(workload: Workload) -> Iterator[list[int]]:
    """Answer each client's messages in a thread of its own; the handles are the store's port."""
    from torch.distributed import TCPStore

    # Not probe-then-bind: the store takes over the very socket that was given a free port.
    listener = socket.create_server((_HOST, 0), backlog=128)
    port = listener.getsockname()[1]
    store = TCPStore(
        _HOST,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=_STORE_TIMEOUT,
        master_listen_fd=listener.detach(),
    )
    echoes = [
        Thread(target=_echo, args=(workload, port, client), daemon=True)
        for client in range(workload.clients)
    ]
    for thread in echoes:
        thread.start()
    yield [port] * workload.clients
    for thread in echoes:
        thread.join()
    del store


def _echo(workload: Workload, port: int, client: int) -> None:
    import torch

    pair = _join_pair(port, client, rank=0)
    request = torch.zeros(message_bytes(workload.request_bytes), dtype=torch.uint8)
    reply = torch.zeros(message_bytes(workload.reply_bytes), dtype=torch.uint8)
    while True:
        pair.recv([request], 1, 0).wait()
        if request[0] == _GOODBYE:
            return
        pair.send([reply], 1, 0).wait()


def _join_pair(port: int, client: int, rank: int) -> ProcessGroupGloo:
    from torch.distributed import PrefixStore, ProcessGroupGloo

    options = ProcessGroupGloo._Options()
    options._timeout = _IDLE_TIMEOUT
    options._devices = [ProcessGroupGloo.create_device(hostname=_HOST)]
    return ProcessGroupGloo(PrefixStore(f"pair/{client}", _store(port)), rank, 2, options)


def _store(port: int) -> TCPStore:
    from torch.distributed import TCPStore

    return TCPStore(_HOST, port, is_master=False, timeout=_STORE_TIMEOUT)


@dataclass
class RawConnector:
    source: HandleSource

    def connect(self, workload: Workload, client: int) -> Session:
        import torch

        pair = _join_pair(self.source.receive(), client, rank=1)
        request = torch.zeros(message_bytes(workload.request_bytes), dtype=torch.uint8)
        reply = torch.zeros(message_bytes(workload.reply_bytes), dtype=torch.uint8)

        def ping() -> None:
            pair.send([request], 0, 0).wait()
            pair.recv([reply], 0, 0).wait()

        def close() -> None:
            request[0] = _GOODBYE
            pair.send([request], 0, 0).wait()

        return Session(ping, close)
