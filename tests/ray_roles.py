"""What Ray's actors and tasks of test_ray_transport.py do."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from meshinfer import InferenceServer, MeshInferError
from meshinfer.testing import report

SECONDS = 60.0
"""For what includes the start of an actor on a busy machine."""
HELD = 10**9


def number(value: int) -> TensorDict:
    return TensorDict({"x": torch.tensor([value])})


class Holding:
    """Its input; a batch with a request of :data:`HELD` waits until :attr:`gate` is set."""

    def __init__(self) -> None:
        self.gate = threading.Event()

    def __call__(self, batch: TensorDictBase) -> TensorDictBase:
        if batch["x"].dtype == torch.int64 and HELD in batch["x"]:
            self.gate.wait()
        return batch.clone()


def ray_transport(**options: Any) -> Any:
    """Imported late: these modules can be read without Ray."""
    from meshinfer.inference.ray import RayTransport

    return RayTransport(**options)


# Servers.


class Serving:
    """An actor with a server, made in ``__init__``, so that a restarted one has it too."""

    def __init__(self, opener: Callable[[], Any] = ray_transport) -> None:
        self.server = InferenceServer(Holding(), opener()).start()

    def client(self) -> Any:
        return self.server.client()

    def pid(self) -> int:
        return os.getpid()

    def second(self) -> str:
        """Why there is no second server of the same name here; there is one of another."""
        with ray_transport(name="second") as other:
            assert other.port != self.server.transport.port  # type: ignore[attr-defined]
        try:
            ray_transport()
        except ValueError as error:
            return str(error)
        return ""

    def shutdown(self) -> None:
        self.server.shutdown()

    def ask(self, client: Any) -> None:
        """Wait for what does not come."""
        client(number(HELD))


class AsyncServing:
    """The same as an async actor."""

    async def start(self, opener: Callable[[], Any]) -> int:
        self.server = InferenceServer(Holding(), opener()).start()
        return os.getpid()

    async def client(self) -> Any:
        return self.server.client()


def serve_in_a_task() -> Iterator[Any]:
    """A client, and when that has left, the process."""
    transport = ray_transport()
    with InferenceServer(Holding(), transport) as server:
        yield server.client()
        assert transport.wait_until_left(1, SECONDS)
        yield os.getpid()


# Clients.


def count(client: Any, start: int, number_of: int) -> str:
    """Ask for so many numbers, each alone; the client's text."""
    for value in range(start, start + number_of):
        assert client(number(value), SECONDS)["x"].item() == value
    return repr(client)


def ask_in_vain(client: Any) -> tuple[str, str, float]:
    """Wait for what does not come: what was raised, and when."""
    future = client.submit(number(HELD))
    report(os.getpid())
    try:
        future.result()
    except MeshInferError as error:
        return type(error).__name__, str(error), time.time()
    raise AssertionError("it came")


def many(clients: list[Any], rounds: int) -> None:
    for value in range(rounds):
        futures = [client.submit(number(value)) for client in clients]
        assert all(future.result(SECONDS)["x"].item() == value for future in futures)


def exchange_large(client: Any, megabytes: int) -> None:
    sent = TensorDict({"x": torch.randint(0, 256, (megabytes << 20,), dtype=torch.uint8)})
    futures = [client.submit(sent) for _ in range(3)]
    assert all(future.result(SECONDS)["x"].equal(sent["x"]) for future in futures)


def send_half(client: Any) -> None:
    """Stop for ever in the midst of a request."""
    client(number(0), SECONDS)
    connection = client._connection
    connection._socket.sendall(bytes(4))
    report(os.getpid())
    threading.Event().wait()


class Waiting:
    """An env worker that is blocked in a call, in the actor's main thread."""

    def pid(self) -> int:
        return os.getpid()

    def wait(self, client: Any) -> None:
        client(number(HELD))
