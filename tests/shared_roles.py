"""Transports through shared memory, and what processes do with them, for the tests of both slot transports."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import multiprocessing
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from failure_roles import SECONDS, WHO, Doubler, check, reply, request
from support import wait_until
from tensordict import TensorDict

from meshinfer import (
    InferenceServer,
    InferenceServerConfig,
    PeerLostError,
    ServerClosedError,
)
from meshinfer.inference.shared import ProcessSlotTransport, SharedMemoryTransport
from meshinfer.semaphore import _make_fence

KINDS = {"process_slot": ProcessSlotTransport, "shared_memory": SharedMemoryTransport}


def make(kind: str, num_slots: int = 4, *, width: int = 1, **options: Any) -> Any:
    """``x``: int64[width] to ``y``: int64[width]."""
    return KINDS[kind](request(0, width), reply(width), num_slots=num_slots, **options)


@contextmanager
def serving_slots(
    policy: Callable[..., Any], kind: str, num_slots: int = 4, *, width: int = 1, **config: Any
) -> Iterator[InferenceServer]:
    """A server in this process."""
    transport = make(kind, num_slots, width=width)
    with InferenceServer(
        policy, transport, server_config=InferenceServerConfig(**config)
    ) as server:
        yield server


def answer(value: int, width: int = 1) -> TensorDict:
    """The right reply to ``request(value)``."""
    return TensorDict({"y": torch.full((width,), 2 * value, dtype=torch.int64)}, [])


def take(transport: Any, count: int, timeout: float = SECONDS) -> list[Any]:
    """``count`` requests, by hand."""
    found: list[Any] = []
    deadline = time.monotonic() + timeout
    while len(found) < count:
        assert transport.wait_for_work(max(0.0, deadline - time.monotonic())), found
        found += transport.drain_slots(count - len(found))
    return found


# Processes that a single-threaded worker forks, in a few milliseconds each.


def forked(function: Callable[..., object], *args: Any) -> int:
    """Run ``function`` in a child that ends with 0, or with 1 and a traceback; its process id."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        faulthandler.dump_traceback_later(SECONDS / 3)  # says where it hangs
        signal.alarm(int(SECONDS))  # ends what hangs, and the status says so
        function(*args)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def ended(pid: int) -> int:
    """Wait for a child: its exit status, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def endless() -> None:
    """In a child: no deadline, since what it waits for takes as long as others need; its parent ends what hangs."""
    faulthandler.cancel_dump_traceback_later()
    faulthandler.enable()
    signal.alarm(0)


def ended_within(pid: int, timeout: float) -> int:
    """As :func:`ended`; a child that is still there after ``timeout`` seconds says where, and is ended by SIGABRT."""
    if not wait_until(lambda: os.waitid(os.P_PID, pid, GONE), timeout):
        os.kill(pid, signal.SIGABRT)
    return ended(pid)


GONE = os.WEXITED | os.WNOHANG | os.WNOWAIT


# Roles of workers.


def own(station: SimpleNamespace, client: Any, who: int = 0, width: int = 1) -> None:
    """Use ``client`` in the roles to come."""
    station.client, station.who, station.width = client, who, width


def hold(station: SimpleNamespace, values: list[int], timeout: float | None = None) -> None:
    """Put requests in flight, and leave them there."""
    station.futures = [station.client.submit(request(value), timeout) for value in values]


def collect(station: SimpleNamespace, timeout: float = SECONDS) -> list[int]:
    """The replies to what :func:`hold` has sent, and let go of them."""
    return [future.result(timeout)["y"][0].item() for future in station.__dict__.pop("futures")]


def serve_slots(station: SimpleNamespace, serve: Callable[[], Any]) -> None:
    """Become the server."""
    station.policy = Doubler()
    station.server = InferenceServer(station.policy, serve())
    station.server.start()


def ask_for_ever(station: SimpleNamespace) -> None:
    """Requests one after another, until killed."""
    value = 0
    while True:
        value += 1
        check(station.client(request(value), SECONDS), value)


def speak_to(station: SimpleNamespace, path: str) -> None:
    """Write what this process and its children say, and complain about, into a file."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)


def own_transport(station: SimpleNamespace | None, kind: str, *methods: str) -> None:
    """Own and serve a transport whose clients ask, in processes of several kinds, until it ends."""
    transport, policy = make(kind), Doubler()
    for who, method in enumerate(methods):
        client = transport.client()
        context: Any = multiprocessing.get_context(method)
        context.Process(target=ask_until_the_end, args=(client, who), daemon=True).start()
    server = InferenceServer(policy, transport).start()
    _kept.append(server)
    for who in range(len(methods)):
        assert wait_until(lambda who=who: policy.served[who] > 2, 60.0), methods[who]


_kept: list[InferenceServer] = []
"""Nobody ends them in good order."""


def ask_until_the_end(client: Any, who: int) -> None:
    value = who * WHO
    try:
        while True:
            value += 1
            check(client(request(value), SECONDS), value)
    except ServerClosedError:
        return
    except PeerLostError:
        os.write(1, b"child PeerLostError\n")


def all_slots(station: SimpleNamespace, client: Any, count: int) -> None:
    """With a pool's client: ``count`` requests in flight at once, all of which are answered."""
    futures = [client.submit(request(value), SECONDS) for value in range(count)]
    for value, future in enumerate(futures):
        check(future.result(SECONDS), value)


def use_in_a_child(station: SimpleNamespace, client: Any) -> int:
    """Fork while a request is in flight; the child drops it, and uses the client. The child's exit status."""
    futures = [client.submit(request(1))]
    child = forked(_drop_and_use, client, futures)
    status = ended(child)
    check(futures[0].result(SECONDS), 1)
    check(client(request(3), SECONDS), 3)
    return status


def _drop_and_use(client: Any, futures: list[Any]) -> None:
    future = client.submit(request(2))
    futures.clear()
    gc.collect()
    check(future.result(SECONDS), 2)
    client.close()


# Requests whose rows would show it if they were read too early.


def check_rows(
    station: SimpleNamespace, clients: list[Any], width: int, count: int, real_fence: bool
) -> None:
    """A process for each client. All but two give up every other request, often while the server reads it."""
    gc.freeze()
    children = [
        forked(_check_rows, client, index, width, count, real_fence)
        for index, client in enumerate(clients)
    ]
    assert [ended(child) for child in children] == [0] * len(children)


def _check_rows(client: Any, index: int, width: int, count: int, real_fence: bool) -> None:
    if real_fence:
        use_real_fence(setattr)
    chance = random.Random(index)
    first = PATIENT if index < 2 else 0
    for value in range(first, first + count):
        signal.alarm(int(SECONDS))
        if value < PATIENT:
            given_up = client.submit(request(-value, width))
            with contextlib.suppress(TimeoutError):
                given_up.result(chance.uniform(0.0, 2e-3))
            given_up.cancel()
        found = client(request(value, width), SECONDS)["y"]
        assert (found == 2 * value).all(), (value, found.unique())


PATIENT = WHO
"""From here on are the values of requests that nobody gives up."""


def use_real_fence(set_attribute: Callable[[Any, str, Any], None]) -> None:
    """The memory fence of machines that reorder stores, on this one."""
    fence = _make_fence()
    for name, module in list(sys.modules.items()):
        if name.startswith("meshinfer.") and hasattr(module, "memory_fence"):
            set_attribute(module, "memory_fence", fence)
