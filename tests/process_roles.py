"""Policies and factories for servers in processes of their own, and what their clients do elsewhere."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from meshinfer import InferenceClient, ProcessInferenceServer

HELD = -1.0
"""A request that is computed until its gate opens; for ever without one."""
SECONDS = 60.0
"""For what must happen, but whose speed no test asserts."""


def request(value: float) -> TensorDict:
    """``x``: float32[1]."""
    return TensorDict({"x": torch.tensor([float(value)])}, [])


def reply() -> TensorDict:
    """``y``: float32[1]; ``rows``, ``threads``: of the pass that computed it."""
    return TensorDict({"y": torch.zeros(1), "rows": torch.zeros(1), "threads": torch.zeros(1)}, [])


class Policy(torch.nn.Module):
    """``y = weight * x + offset``, a parameter and a buffer."""

    def __init__(self, gate: Path | None = None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("offset", torch.zeros(1))
        self.register_buffer("scratch", torch.zeros(1), persistent=False)
        self.gate = gate

    def forward(self, batch: TensorDictBase) -> TensorDict:
        x = batch["x"]
        if HELD in x:
            self.hold()
        facts = {"rows": len(x), "threads": torch.get_num_threads()}
        found = {name: torch.full_like(x, float(value)) for name, value in facts.items()}
        return TensorDict({"y": self.weight * x + self.offset, **found}, batch.batch_size)

    def hold(self) -> None:
        if self.gate is None:
            threading.Event().wait()
        else:
            self.gate.with_name("held").touch()
            self.gate.open("rb").close()  # a fifo: until somebody opens it to write

    def like(self, value: float) -> Policy:
        """Another one with this weight and offset."""
        other = Policy()
        with torch.no_grad():
            other.weight.fill_(value)
            other.offset.fill_(value)
        return other


def serving_options(**options: Any) -> dict[str, Any]:
    return {
        "num_slots": 8,
        "request_spec": request(0),
        "response_spec": reply(),
        "mp_context": "forkserver",
        **options,
    }


@contextmanager
def serving(
    kind: Any = "process_slot", factory: Any = Policy, **options: Any
) -> Iterator[ProcessInferenceServer]:
    """A server in a process of its own, started."""
    with ProcessInferenceServer(factory, kind, **serving_options(**options)) as server:
        yield server


def ask(client: InferenceClient, value: float = 2.0, timeout: float = SECONDS) -> TensorDictBase:
    """One request of a policy with its first weights; its reply must be its own."""
    answer = client(request(value), timeout)
    assert answer["y"].item() == value
    return answer


# Factories that do not come to a good end, or not soon.


class Unpicklable(Exception):
    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.lock = threading.Lock()


class NoPolicyError(KeyError):
    pass


def raising() -> Policy:
    raise NoPolicyError("no policy here")


def raising_unpicklable() -> Policy:
    raise Unpicklable("locked in")


def exiting() -> Policy:
    sys.exit("no policy today")


def exiting_at_once() -> Policy:
    os._exit(3)


def killed() -> Policy:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def never() -> Policy:
    threading.Event().wait()
    raise AssertionError


def failing_once(marker: Path) -> Policy:
    if marker.exists():
        return Policy()
    marker.touch()
    raise NoPolicyError("only the first time")


def not_a_policy() -> int:
    return 7


def doubling_function() -> Any:
    return double


def double(batch: TensorDictBase) -> TensorDict:
    return Policy()(TensorDict({"x": 2 * batch["x"]}, batch.batch_size))


def with_threads(number: int) -> Policy:
    torch.set_num_threads(number)
    return Policy()


def with_a_forked_process(report: Path) -> Policy:
    """Which inherits every pipe, and outlives the server."""
    pid = os.fork()
    if pid == 0:
        while True:
            signal.pause()
    report.write_text(str(pid))
    return Policy()


# Roles for workers. The first argument is the worker's station.


def become_client(station: SimpleNamespace, client: InferenceClient) -> None:
    station.client = client
    ask(client)


def submit_held(station: SimpleNamespace) -> None:
    station.future = station.client.submit(request(HELD))


def collect(station: SimpleNamespace) -> None:
    station.future.result(SECONDS)


def ask_again(station: SimpleNamespace) -> None:
    ask(station.client)


def ask_until_told(station: SimpleNamespace) -> list[tuple[float, int]]:
    """What each reply to ``x = 1`` was, and its version."""
    found = []
    while not station.pipe.poll():
        answer = station.client(request(1.0), SECONDS)
        found.append((answer["y"].item(), int(answer["policy_version"])))
    assert station.pipe.recv() is None
    return found


def leave(station: SimpleNamespace) -> None:
    station.client.close()
