"""A policy whose output is its version, who asks it, and a trainer to be killed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

SECONDS = 20.0
"""For what must happen, but whose speed no test asserts."""

WEIGHTS = 8
"""Values in each answer: the smallest and the largest of each weight."""


class Versioned(torch.nn.Module):
    """Answers with the values of all its weights, which are its version, and the number of the pass."""

    def __init__(self, version: float = 0.0) -> None:
        super().__init__()
        self.large = torch.nn.Parameter(torch.zeros(48, 64))
        self.small = torch.nn.Parameter(torch.zeros(3))
        self.register_buffer("mean", torch.zeros(5))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.passes = 0
        self.set(version)

    def set(self, version: float) -> Versioned:
        with torch.no_grad():
            for each in (*self.parameters(), *self.buffers()):
                each.fill_(version)
        return self

    def forward(self, batch: TensorDictBase) -> TensorDict:
        self.passes += 1
        found = []
        for each in (self.large, self.small, self.mean, self.scratch):
            found += [each.min(), each.max()]
        rows = batch.batch_size[0]
        answer = {
            "values": torch.stack(found).expand(rows, -1),
            "pass": torch.full((rows,), self.passes),
        }
        return TensorDict(answer, batch.batch_size)


def request() -> TensorDict:
    return TensorDict({"x": torch.zeros(2)}, [])


def reply() -> TensorDict:
    return TensorDict(
        {"values": torch.zeros(WEIGHTS), "pass": torch.zeros((), dtype=torch.int64)}, []
    )


class Asker:
    """One client, flat out: notes each answer that is not what its version says."""

    def __init__(self, client: Any) -> None:
        self.versions: list[int] = []
        self.passes: list[int] = []
        self.wrong: list[Any] = []
        self.first = threading.Event()
        self._client = client
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self._thread.start()

    def _ask(self) -> None:
        with self._client as client:
            while not self._stop.is_set():
                try:
                    answer = client(request(), SECONDS)
                except Exception as error:
                    self.wrong.append(error)
                    return
                version = int(answer["policy_version"])
                if not bool((answer["values"] == version).all()):
                    self.wrong.append((version, answer["values"]))
                if self.versions and version < self.versions[-1]:
                    self.wrong.append((version, "after", self.versions[-1]))
                self.versions.append(version)
                self.passes.append(int(answer["pass"]))
                self.first.set()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


@contextmanager
def asking(server: Any, count: int) -> Iterator[list[Asker]]:
    """``count`` clients of ``server``, flat out; each has had an answer."""
    askers = [Asker(client) for client in server.clients(count)]
    try:
        for asker in askers:
            assert asker.first.wait(SECONDS), asker.wrong
        yield askers
    finally:
        for asker in askers:
            asker.stop()


def check_askers(askers: list[Asker]) -> None:
    """Every answer was of the weights that it names, and every pass of one version."""
    assert [asker.wrong for asker in askers] == [[]] * len(askers)
    version_of: dict[int, int] = {}
    for asker in askers:
        for number, version in zip(asker.passes, asker.versions, strict=True):
            assert version_of.setdefault(number, version) == version


def values_of(client: Any) -> tuple[int, set[float]]:
    """The version of one answer, and the different values in it."""
    answer = client(request(), SECONDS)
    return int(answer["policy_version"]), {float(value) for value in answer["values"]}


def train_until_killed(transport: Any, connection: Any) -> None:
    """In a process of its own: publish as fast as it goes."""
    model = Versioned()
    with transport.publisher(model) as publisher:
        for version in range(1, 1_000_000):
            model.set(version)
            publisher.publish()
            if version == 1:
                connection.send(None)
