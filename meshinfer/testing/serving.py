"""Policies whose replies tell which request they belong to, and servers for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from meshinfer.server import InferenceServer, ThreadInferenceServer
from meshinfer.testing.harness import TransportHarness

__all__ = [
    "HELD",
    "AddOne",
    "Gated",
    "check_reply",
    "clients_for",
    "make_transport",
    "request",
    "request_spec",
    "response_spec",
    "serving",
]

WIDTH = 8
"""Every value is repeated, so that a torn row shows."""
HELD = 1_000_000
"""The request that a :class:`Gated` policy holds back."""


def request(value: int, *batch_size: int) -> TensorDict:
    """A request that carries ``value``."""
    x = torch.full((*batch_size, WIDTH), value, dtype=torch.int64)
    return TensorDict({"x": x}, batch_size=batch_size)


def request_spec(*batch_size: int) -> TensorDict:
    """``{"x": int64[WIDTH]}``."""
    return request(0, *batch_size)


def response_spec(*batch_size: int) -> TensorDict:
    """``{"y": int64[WIDTH]}``."""
    return TensorDict({"y": request_spec(*batch_size)["x"]}, batch_size=batch_size)


def check_reply(reply: TensorDictBase, value: int) -> None:
    """Fail unless ``reply`` answers ``request(value)``."""
    found = reply["y"].flatten().tolist()
    expected = [value + 1] * len(found)
    assert found == expected, f"request {value} got {found} instead of {value + 1}"


class AddOne:
    """``y = x + 1``; keeps the values of each batch in :attr:`batches`."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []

    def __call__(self, batch: TensorDictBase) -> TensorDict:
        """The replies."""
        self.batches.append(batch["x"].reshape(-1, WIDTH)[:, 0].tolist())
        return TensorDict({"y": batch["x"] + 1}, batch_size=batch.batch_size)


class Gated(AddOne):
    """As :class:`AddOne`, but a batch with a request of :data:`HELD` or more waits until :attr:`gate` is set."""

    def __init__(self, patience: float) -> None:
        super().__init__()
        self.entered = threading.Event()
        self.gate = threading.Event()
        self._patience = patience

    def __call__(self, batch: TensorDictBase) -> TensorDict:
        """The replies, perhaps later."""
        result = super().__call__(batch)
        if max(self.batches[-1]) >= HELD:
            self.entered.set()
            if not self.gate.wait(self._patience):
                raise TimeoutError("the check did not open the gate")
        return result

    def wait_entered(self) -> None:
        """Until a request is being held."""
        assert self.entered.wait(self._patience), "the request did not reach the policy"


def clients_for(harness: TransportHarness, source: Any, number: int) -> list[Any]:
    """Whom to give ``number`` requests that are in flight at once: a new client so many times, or so many clients.

    Args:
        harness: says whether one client can have them all.
        source: a server or a transport.
        number: of requests.
    """
    if harness.many_in_flight:
        return [source.client()] * number
    return [source.client() for _ in range(number)]


def make_transport(harness: TransportHarness, **options: Any) -> Any:
    """A transport for the requests of this file."""
    return harness.make(request_spec(), response_spec(), **options)


@contextmanager
def serving(
    harness: TransportHarness,
    policy: Callable[..., Any],
    specs: tuple[Any, Any] | None = None,
    *,
    options: dict[str, Any] | None = None,
    batch: int | None = None,
    **server_options: Any,
) -> Iterator[ThreadInferenceServer]:
    """A server in this process over a new transport; a gate is opened before it shuts down.

    Args:
        harness: makes the transport.
        policy: what is served.
        specs: of request and reply, by default those of this file.
        options: of the transport.
        batch: requests in each batch: it waits for so many, and takes no more.
        server_options: for the server.
    """
    if batch is not None:
        server_options |= {"max_batch_size": batch, "min_batch_size": batch}
        server_options["timeout"] = harness.patience
    request_like, response_like = specs or (request_spec(), response_spec())
    transport = harness.make(request_like, response_like, **(options or {}))
    with InferenceServer(policy, transport, **server_options) as server:
        try:
            yield server
        finally:
            if isinstance(policy, Gated):
                policy.gate.set()
