"""Servers and policies in threads, for the tests of the transports between them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from meshinfer import InferenceServer, SlotTransport, ThreadingTransport

SECONDS = 20.0
SPECS: dict[str, Any] = {
    "request_spec": TensorDict({"x": torch.zeros(3)}),
    "response_spec": TensorDict({"y": torch.zeros(3)}),
}
TRANSPORTS: dict[str, Callable[..., Any]] = {
    "queue": ThreadingTransport,
    "slot": lambda: SlotTransport(8, **SPECS),
    "slot without specs": lambda: SlotTransport(8),
}


def request(value: float, size: int = 3) -> TensorDict:
    return TensorDict({"x": torch.full((size,), float(value))})


class Double:
    """``y = 2 x``; keeps the batches, and holds those with a value above 999 until its gate opens."""

    def __init__(self) -> None:
        self.batches: list[TensorDictBase] = []
        self.entered, self.gate = threading.Event(), threading.Event()

    def __call__(self, batch: TensorDictBase) -> TensorDict:
        self.batches.append(batch.clone())
        if batch["x"].numel() and batch["x"].max() > 999:
            self.entered.set()
            assert self.gate.wait(SECONDS)
        return TensorDict({"y": 2 * batch["x"]}, batch.batch_size)


HELD = 1000.0


@contextmanager
def serving(
    transport: Any, policy: Callable[..., Any], **options: Any
) -> Iterator[InferenceServer]:
    with InferenceServer(policy, transport, **options) as server:
        try:
            yield server
        finally:
            if isinstance(policy, Double):
                policy.gate.set()


def ask(clients: list[Any], payloads: list[Any]) -> list[Any]:
    """Each client sends one; the replies, or what was raised."""
    pairs = zip(clients, payloads, strict=True)
    futures = [client.submit(payload) for client, payload in pairs]
    return [future.exception(SECONDS) or future.result() for future in futures]
