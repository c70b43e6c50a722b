"""The floor of monarch's messages: the payload's bytes through a Channel each way, and nothing computed.

The server is an `async` actor and the clients are not: of the four ways this is the fastest.
"""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from typing import Any

from monarch.actor import Actor, Channel, endpoint

from ..workload import Workload
from . import ActorService, Session
from .child import HandleSource
from .monarch_actors import MonarchService

NAME = "raw_channel"
PACKAGES = ("torchmonarch",)
MODULES = ()
_GOODBYE = b""


def open_service(workload: Workload, transport: str) -> ActorService:
    return MonarchService(workload, ChannelConnector, EchoActor)


class EchoActor(Actor):
    """Receives from every client through one Channel; a message's first byte is the client's number."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload
        self._ports: dict[int, Any] = {}
        self._echo: asyncio.Task[None] | None = None

    @endpoint
    async def begin(self) -> tuple[int, list[Any]]:
        port, receiver = Channel.open()
        self._own_port = port
        self._echo = asyncio.create_task(self._answer(receiver, bytes(self._workload.reply_bytes)))
        return os.getpid(), [port] * self._workload.clients

    @endpoint
    async def end(self) -> None:
        self._own_port.send(_GOODBYE)
        await self._echo

    async def _answer(self, receiver: Any, reply: bytes) -> None:
        while True:
            message = await receiver.recv()
            if isinstance(message, tuple):
                number, port = message
                self._ports[number] = port
            elif message == _GOODBYE:
                return
            else:
                self._ports[message[0]].send(reply)


@dataclass
class ChannelConnector:
    source: HandleSource

    def connect(self, workload: Workload, client: int) -> Session:
        server = self.source.receive()
        port, receiver = Channel.open()
        server.send((client, port))
        request = bytes([client]) + bytes(workload.request_bytes - 1)

        def ping() -> None:
            server.send(request)
            receiver.recv().get()

        return Session(ping, lambda: None)
