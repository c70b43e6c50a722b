"""A monarch endpoint that takes the payload's bytes and computes nothing, called with `call_one`."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from monarch.actor import Actor, endpoint

from ..workload import Workload
from . import ActorService, Session
from .child import HandleSource
from .monarch_actors import MonarchService

NAME = "raw_endpoint"
PACKAGES = ("torchmonarch",)
MODULES = ()


def open_service(workload: Workload, transport: str) -> ActorService:
    return EndpointService(workload, EndpointConnector, CalledActor)


class CalledActor(Actor):
    def __init__(self, workload: Workload) -> None:
        self._reply = bytes(workload.reply_bytes)

    @endpoint
    def begin(self) -> tuple[int, None]:
        return os.getpid(), None

    @endpoint
    def end(self) -> None:
        pass

    @endpoint
    def answer(self, request: bytes) -> bytes:
        return self._reply


class EndpointService(MonarchService):
    """The clients hold the server actor itself."""

    def _handles(self, made: Any) -> Sequence[Any]:
        return [self._server] * self._workload.clients


@dataclass
class EndpointConnector:
    source: HandleSource

    def connect(self, workload: Workload, client: int) -> Session:
        server = self.source.receive()
        request = bytes(workload.request_bytes)

        def call() -> None:
            server.answer.call_one(request).get()

        return Session(call, lambda: None)
