"""Actors for the tests of the transport over monarch's messages, and what they serve."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from typing import Any

import torch
from monarch.actor import Actor, context, endpoint
from monarch_policy import AddOne, request, value_of
from tensordict import TensorDict, TensorDictBase

from meshinfer import InferenceServer
from meshinfer.inference.monarch import MonarchTransport

SECONDS = 30.0


def outcome(call: Callable[[], TensorDictBase]) -> tuple[str, str]:
    """The reply, or the name and the text of the error."""
    try:
        return "reply", str(value_of(call()))
    except Exception as error:
        return type(error).__name__, str(error)


class Serving(Actor):
    """A server in an actor; with an opener, that of another process's transport."""

    def __init__(self, opener: Callable[[], MonarchTransport] | None = None) -> None:
        self.transport = MonarchTransport() if opener is None else opener()
        self.server = InferenceServer(AddOne(), self.transport).start()

    @endpoint
    def clients(self, number: int) -> list[Any]:
        return self.server.clients(number)

    @endpoint
    def counts(self) -> tuple[int, int]:
        """Clients that are there, and that were lost."""
        return self.transport.num_clients, self.transport.num_lost

    @endpoint
    def close(self) -> None:
        self.server.shutdown()

    @endpoint
    def wait_until_left(self, number: int) -> bool:
        return self.transport.wait_until_left(number, SECONDS)

    @endpoint
    def ask_here(self, value: float) -> float:
        """Through a client in the serving process."""
        with self.server.client() as client:
            return value_of(client(request(value), SECONDS))

    @endpoint
    def process(self) -> int:
        return os.getpid()


class Preparing(Actor):
    """Serves from a thread of its process that belongs to no actor."""

    def __init__(self, opener: Any) -> None:
        self.opener = opener
        self.servers: list[InferenceServer] = []

    @endpoint
    def serve_in_thread(self) -> bool:
        """Whether the server's port is this actor's."""
        self.opener.prepare()
        thread = threading.Thread(target=self._serve)
        thread.start()
        thread.join()
        port = self.servers[0].transport.address.port
        return port.startswith(str(context().actor_instance.actor_id).partition("@")[0])

    @endpoint
    def close(self) -> None:
        self.servers[0].shutdown()

    def _serve(self) -> None:
        self.servers.append(InferenceServer(AddOne(), self.opener()).start())


class Asking(Actor):
    """A client in an actor whose endpoints are plain functions."""

    def __init__(self, client: Any) -> None:
        self.client = client
        self.future: Any = None

    @endpoint
    def ask(self, value: float) -> float:
        return value_of(self.client(request(value), SECONDS))

    @endpoint
    def ask_in_threads(self, values: list[float]) -> list[float]:
        found = dict.fromkeys(values, 0.0)

        def ask(value: float) -> None:
            found[value] = value_of(self.client(request(value), SECONDS))

        threads = [threading.Thread(target=ask, args=(value,)) for value in values]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return list(found.values())

    @endpoint
    def echo_bytes(self, count: int) -> bool:
        """Whether so many random bytes come back as they are, plus one."""
        data = torch.randint(0, 255, (count,), dtype=torch.uint8)
        reply = self.client(TensorDict({"x": data}), SECONDS)
        return bool(torch.equal(reply["y"], data + 1))

    @endpoint
    def submit(self, value: float) -> None:
        self.future = self.client.submit(request(value))

    @endpoint
    def outcome(self) -> tuple[str, str]:
        return outcome(lambda: self.future.result(SECONDS))

    @endpoint
    def outcome_of(self, value: float) -> tuple[str, str]:
        return outcome(lambda: self.client(request(value), SECONDS))

    @endpoint
    def process(self) -> int:
        return os.getpid()

    @endpoint
    def client_again(self) -> Any:
        """The client, as the result of an endpoint."""
        return self.client


class AskingAsync(Actor):
    """A client in an actor whose endpoints are coroutines."""

    @endpoint
    async def ask_many(self, client: Any, values: list[float]) -> list[float]:
        ticks = asyncio.create_task(_tick())
        replies = await asyncio.gather(*(_answer(client, value) for value in values))
        return [*map(value_of, replies), float(await ticks)]


async def _answer(client: Any, value: float) -> Any:
    return await client.submit(request(value))


async def _tick() -> int:
    """Only where nobody holds the loop up it gets to run between others."""
    for _ in range(10):
        await asyncio.sleep(0)
    return 10
