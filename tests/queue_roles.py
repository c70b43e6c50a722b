"""What the processes of test_queue_processes.py do."""

from __future__ import annotations

import itertools
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase

from meshinfer import InferenceServer, MPTransport, PeerLostError
from meshinfer.inference.queues.wire import skip
from meshinfer.testing import raises, report

SECONDS = 20.0
MIB = 1 << 20
HELD = 10**9


def number(value: int) -> TensorDict:
    return TensorDict({"x": torch.tensor([value])})


def image(megabytes: int, value: int = 0) -> TensorDict:
    return TensorDict({"x": torch.full((megabytes * MIB,), value, dtype=torch.uint8)})


def echo(batch: TensorDictBase) -> TensorDictBase:
    return batch.clone()


# Servers.


def serve(_: None, opener: Callable[[], MPTransport]) -> None:
    with InferenceServer(echo, opener()):
        report(os.getpid())
        threading.Event().wait()


def hold(batch: TensorDictBase) -> TensorDictBase:
    """As :func:`echo`, but a batch with a request of :data:`HELD` is never answered."""
    if HELD in batch["x"]:
        threading.Event().wait()
    return batch.clone()


def serve_holding(_: None, opener: Callable[[], MPTransport]) -> None:
    with InferenceServer(hold, opener()):
        report(os.getpid())
        threading.Event().wait()


def serve_nobody(_: None, opener: Callable[[], MPTransport]) -> None:
    """Take requests, and answer none."""
    with opener():
        report(os.getpid())
        threading.Event().wait()


def serve_and_fork(_: None, opener: Callable[[], MPTransport]) -> None:
    """As :func:`serve_nobody`, with a child that lives on."""
    with opener() as transport:
        transport.wait_for_work(SECONDS)
        child = os.fork()
        if child == 0:
            _sleep_and_exit()
        report((os.getpid(), child))
        threading.Event().wait()


def serve_with_few_descriptors(_: None, opener: Callable[[], MPTransport], clients: int) -> None:
    with InferenceServer(echo, opener()):
        used = {fd for fd in map(int, os.listdir("/proc/self/fd")) if _is_open(fd)}
        limit = next(n for n in itertools.count() if len(set(range(n)) - used) == clients)
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        report(os.getpid())
        threading.Event().wait()


def _is_open(fd: int) -> bool:
    """Not so the one with which the directory was read."""
    return os.path.exists(f"/proc/self/fd/{fd}")


# Clients.


def count(clients: list[Any], rounds: int) -> None:
    """Each client has one request in flight."""
    for turn in range(rounds):
        values = [1000 * turn + index for index in range(len(clients))]
        futures = [client.submit(number(v)) for client, v in zip(clients, values, strict=True)]
        for value, future in zip(values, futures, strict=True):
            found = future.result(SECONDS)["x"].tolist()
            assert found == [value], f"{found} instead of {value}"


def send_large(client: Any, megabytes: int) -> None:
    count([client], 1)
    payload = image(megabytes)
    report()
    client.submit(payload)
    threading.Event().wait()


def send_half(client: Any, megabytes: int, then: str) -> None:
    """Send half of a large request; then wait to be killed, or stop, and send the rest when continued."""
    count([client], 1)
    connection = client._connection
    send = connection._send

    def send_in_halves(buffers: list[memoryview], deadline: float) -> None:
        connection._send = send
        half = sum(map(len, buffers)) // 2
        while half:
            sent = connection._socket.send(buffers[0][:half])
            buffers, half = skip(buffers, sent), half - sent
        report(os.getpid())
        if then == "killed":
            threading.Event().wait()
        os.kill(os.getpid(), signal.SIGSTOP)
        send(buffers, deadline)

    connection._send = send_in_halves
    reply = client(image(megabytes, 7), SECONDS)
    assert reply["x"].equal(image(megabytes, 7)["x"])


def send_and_stop(client: Any, requests: int) -> None:
    """Stop with replies of a megabyte pending; collect them when continued."""
    count([client], 1)
    futures = [client.submit(image(1, value)) for value in range(requests)]
    report(os.getpid())
    os.kill(os.getpid(), signal.SIGSTOP)
    for value, future in enumerate(futures):
        assert future.result(SECONDS)["x"].unique().tolist() == [value]


def outlive_the_server(client: Any) -> int:
    """Ask until the server is lost, and then until there is another; how often it took."""
    count([client], 1)
    held = client.submit(number(HELD))
    report()
    with raises(PeerLostError):
        held.result(SECONDS)
    report()
    deadline, calls = time.monotonic() + 3 * SECONDS, 0
    while True:
        calls += 1
        try:
            assert client(number(5), SECONDS)["x"].tolist() == [5]
            return calls
        except PeerLostError:
            assert time.monotonic() < deadline


def ask(clients: list[Any]) -> None:
    """For a process of its own."""
    for value, client in enumerate(clients):
        task = NonTensorData(f"task {value}")
        reply = client(TensorDict({"x": torch.tensor(value), "task": task}), SECONDS)
        assert (reply["x"].item(), reply["task"]) == (value, f"task {value}")
        client.close()


def fork_and_ask(client: Any) -> None:
    """Use one client on both sides of a fork."""
    count([client], 2)
    late = client.submit(number(3))
    child = os.fork()
    if child == 0:
        _exit_with(lambda: count([client], 3))
    count([client], 3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert late.result(SECONDS)["x"].tolist() == [3]
    count([client], 1)


def fork_and_wait(client: Any) -> None:
    """Leave a child behind that has a copy of the socket."""
    count([client], 1)
    child = os.fork()
    if child == 0:
        _sleep_and_exit()
    report(child)
    threading.Event().wait()


def _exit_with(function: Callable[[], object]) -> None:
    status = 1
    try:
        function()
        status = 0
    finally:
        os._exit(status)


def _sleep_and_exit() -> None:
    _exit_with(lambda: time.sleep(600))
