"""Where the time of a `process_slot` request goes: `python -m benchmarks.profile_slots [requests]`.

One client, one server process, clocks read around the calls that each side makes. On Linux `time.perf_counter` is the
same clock in every process. Medians do not add up exactly.
"""

from __future__ import annotations

import multiprocessing
import statistics
import sys
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

import torch
from tensordict import TensorDict
from torch import nn

import meshinfer
from meshinfer.inference.shared import ProcessSlotTransport
from meshinfer.semaphore import Semaphore

from .policy import make_policy, observation, specs
from .workload import VECTOR_1

_WARMUP = 500
_STEPS = (
    ("client: pack", "called", "asked"),
    ("server wakes", "asked", "woken"),
    ("server: drain", "woken", "gather"),
    ("server: gather", "gather", "gathered"),
    ("server: TensorDict around the module", "gathered", "forward"),
    ("server: forward", "forward", "forwarded"),
    ("server: TensorDict around the module", "forwarded", "scatter"),
    ("server: scatter", "scatter", "answered"),
    ("client wakes", "answered", "read"),
    ("client: unpack", "read", "returned"),
    ("all", "called", "returned"),
)

Stamps = dict[str, float]


class TimedPolicy(nn.Module):
    """The benchmarks' policy, which notes when it computes."""

    def __init__(self, now: Stamps) -> None:
        super().__init__()
        self.compute = _stamped(make_policy(), now, "forward", "forwarded")

    def forward(self, *leaves: torch.Tensor) -> torch.Tensor:
        return self.compute(*leaves)


def _stamped(function: Callable[..., Any], now: Stamps, begin: str, end: str) -> Callable[..., Any]:
    def timed(*arguments: Any, **options: Any) -> Any:
        now[begin] = perf_counter()
        result = function(*arguments, **options)
        now[end] = perf_counter()
        return result

    return timed


def _note_rings(now: Stamps, name: str) -> None:
    ring = Semaphore.post

    def noted(semaphore: Semaphore) -> None:
        now[name] = perf_counter()
        ring(semaphore)

    Semaphore.post = noted  # type: ignore[method-assign]


def _serve(make_transport: Callable[[], Any], pipe: Connection) -> None:
    transport, now, passes = make_transport(), {}, []
    _note_rings(now, "answered")
    transport.wait_for_work = _stamped(transport.wait_for_work, now, "waiting", "woken")
    transport.gather_requests = _stamped(transport.gather_requests, now, "gather", "gathered")
    resolve = _stamped(transport.resolve_batch, now, "scatter", "scattered")

    def resolve_batch(*arguments: Any, **options: Any) -> None:
        resolve(*arguments, **options)
        passes.append(dict(now))

    transport.resolve_batch = resolve_batch
    keys = {"in_keys": ["observation"], "out_keys": ["action"]}
    with meshinfer.InferenceServer(TimedPolicy(now), transport, share_weights=True, **keys):
        pipe.send("serving")
        pipe.recv()
    pipe.send(passes)


def _ask(client: Any, requests: int) -> list[Stamps]:
    request, now, calls = TensorDict(observation(VECTOR_1, 0), []), {}, []
    _note_rings(now, "asked")
    client.read = _stamped(client.read, now, "read", "copied")
    for _ in range(requests):
        now["called"] = perf_counter()
        client(request)
        now["returned"] = perf_counter()
        calls.append(dict(now))
    return calls


def measure(requests: int) -> list[Stamps]:
    """When each step of each of `requests` began, in seconds."""
    transport = ProcessSlotTransport(*specs(VECTOR_1), num_slots=1)
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    arguments = (transport.serve_elsewhere(), theirs)
    server = context.Process(target=_serve, args=arguments, daemon=True)
    server.start()
    theirs.close()
    pipe.recv()
    with transport.client() as client:
        calls = _ask(client, _WARMUP + requests)
    pipe.send("stop")
    passes = pipe.recv()
    server.join()
    transport.close()
    return [{**call, **served} for call, served in zip(calls, passes, strict=True)][_WARMUP:]


def main(arguments: Sequence[str]) -> None:
    """Print the median of each step."""
    torch.set_num_threads(1)
    rounds = measure(int(arguments[0]) if arguments else 5000)
    for name, begin, end in _STEPS:
        microseconds = 1e6 * statistics.median(stamps[end] - stamps[begin] for stamps in rounds)
        print(f"{name:38}{microseconds:8.1f} us")


if __name__ == "__main__":
    main(sys.argv[1:])
