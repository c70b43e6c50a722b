"""The queue between processes that are killed, stopped, forked and started again."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
import queue_roles as roles
import torch
from queue_roles import MIB, SECONDS, image, number
from support import wait_until
from tensordict import TensorDictBase

from meshinfer import InferenceServer, MPTransport, PeerLostError
from meshinfer.testing import ProcessHarness, raises

PATIENCE = 60.0
"""Seconds for what includes the start of a process on a busy machine."""


@pytest.fixture(scope="module")
def processes() -> Iterator[ProcessHarness]:
    with ProcessHarness(MPTransport, workers=5) as harness:
        harness.run_client(len, []).result(2 * PATIENCE)  # torch has been imported
        yield harness


@pytest.fixture
def ready_workers(processes: ProcessHarness) -> None:
    processes.replenish()


@pytest.fixture(autouse=True)
def nothing_left_behind(ready_workers: None, nothing_left_behind: None) -> None:
    """The workers outlive each test: those that the last one killed are replaced before it is looked around."""


@pytest.fixture
def transport() -> Iterator[MPTransport]:
    with MPTransport(timeout=SECONDS) as made:
        yield made


@pytest.fixture
def server(transport: MPTransport) -> Iterator[InferenceServer]:
    with InferenceServer(roles.echo, transport) as running:
        yield running


@contextmanager
def stopped(pid: int, *, by_us: bool = True) -> Iterator[None]:
    """The process is stopped inside, by us or by itself, and continues afterwards."""
    if by_us:
        os.kill(pid, signal.SIGSTOP)
    assert wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED, SECONDS)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def soon(seconds: float) -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < seconds


# Clients that go away.


def test_clients_killed_while_they_send_50_mb_hinder_nobody(
    server: InferenceServer, processes: ProcessHarness
) -> None:
    transport: Any = server.transport
    other = server.client()
    for turn in range(1, 6):
        victim = processes.run_client(roles.send_large, server.client(), 50)
        victim.next_report(PATIENCE)
        roles.count([other], 1)
        victim.kill()
        with soon(SECONDS):
            roles.count([other], 20)
        assert wait_until(lambda: transport.num_clients == 1, SECONDS)
        assert wait_until(lambda: transport.num_lost == turn, SECONDS)  # noqa: B023


def test_half_a_message_of_a_killed_client_is_dropped(
    server: InferenceServer, processes: ProcessHarness, caplog: pytest.LogCaptureFixture
) -> None:
    transport: Any = server.transport
    other = server.client()
    for _ in range(3):
        victim = processes.run_client(roles.send_half, server.client(), 50, "killed")
        victim.next_report(PATIENCE)
        roles.count([other], 20)
        victim.kill()
        roles.count([other], 20)
    assert wait_until(lambda: transport.num_lost == 3, SECONDS)
    assert wait_until(lambda: caplog.text.count("in the midst of a message") == 3, SECONDS)
    assert transport.num_waiting == 0
    assert wait_until(lambda: server.stats().requests == 3 + 6 * 20, SECONDS)


def test_a_client_that_stops_in_the_midst_of_a_message_may_go_on_later(
    server: InferenceServer, processes: ProcessHarness
) -> None:
    other = server.client()
    victim = processes.run_client(roles.send_half, server.client(), 50, "stopped")
    with stopped(victim.next_report(PATIENCE), by_us=False):
        roles.count([other], 100)
    victim.result(PATIENCE)


def test_replies_do_not_wait_for_a_stopped_client(
    server: InferenceServer, processes: ProcessHarness
) -> None:
    other = server.client()
    victim = processes.run_client(roles.send_and_stop, server.client(), 40)
    pid = victim.next_report(PATIENCE)
    with stopped(pid, by_us=False):
        assert wait_until(lambda: server.stats().requests == 41, SECONDS)
        with soon(SECONDS):
            roles.count([other], 100)
    victim.result(PATIENCE)  # all that waited for it arrives


def test_a_stopped_client_does_not_hold_up_the_end(
    transport: MPTransport, processes: ProcessHarness
) -> None:
    gate = threading.Event()

    def hold_images(batch: TensorDictBase) -> TensorDictBase:
        if batch["x"].dtype is torch.uint8:
            gate.wait(SECONDS)
        return batch.clone()

    with InferenceServer(hold_images, transport) as server:
        victim = processes.run_client(roles.send_and_stop, server.client(), 40)
        pid = victim.next_report(PATIENCE)
        with stopped(pid, by_us=False):
            gate.set()
            assert wait_until(lambda: server.stats().requests == 41, SECONDS)
            with soon(SECONDS):
                server.shutdown()
    with raises(PeerLostError):
        victim.result(PATIENCE)


# Servers that go away.


def served_elsewhere(
    transport: MPTransport, processes: ProcessHarness, role: Callable[..., None], *args: Any
) -> tuple[Any, Any]:
    """A server in a process of its own, and what it reported."""
    run = processes.run_client(role, None, transport.serve_elsewhere(), *args)
    return run, run.next_report(PATIENCE)


def test_a_server_that_was_killed_is_found_again_at_its_address(
    transport: MPTransport, processes: ProcessHarness
) -> None:
    here, elsewhere = transport.client(), transport.client()
    server, _ = served_elsewhere(transport, processes, roles.serve)
    roles.count([here], 5)
    server.kill()
    assert wait_until(lambda: "not connected" in repr(here), SECONDS)
    with soon(SECONDS), raises(PeerLostError, transport.address):
        here(number(1), 0.5)
    for _ in range(2):
        server, _ = served_elsewhere(transport, processes, roles.serve_nobody)
        lost = here.submit(number(2))
        server.kill()
        with soon(SECONDS), raises(PeerLostError):
            lost.result()
    server, _ = served_elsewhere(transport, processes, roles.serve)
    roles.count([here], 5)
    processes.run_client(roles.count, [elsewhere], 5).result(PATIENCE)
    server.kill()


def test_clients_elsewhere_outlive_their_server(
    transport: MPTransport, processes: ProcessHarness
) -> None:
    client = transport.client()
    server, _ = served_elsewhere(transport, processes, roles.serve_holding)
    run = processes.run_client(roles.outlive_the_server, client)
    run.next_report(PATIENCE)
    server.kill()
    run.next_report(SECONDS)
    server, _ = served_elsewhere(transport, processes, roles.serve)
    assert run.result(2 * PATIENCE) >= 1
    server.kill()


def test_deadlines_hold_with_a_stopped_server(
    transport: MPTransport, processes: ProcessHarness
) -> None:
    client, fresh = transport.client(), transport.client()
    server, pid = served_elsewhere(transport, processes, roles.serve)
    roles.count([client], 1)
    large = image(50, 3)
    with stopped(pid):
        for payload in (number(1), large, number(2), large):
            with soon(SECONDS), raises(TimeoutError):
                client(payload, 0.3)
        with soon(SECONDS), raises(TimeoutError, "stopped"):
            fresh(number(3), 0.3)
    roles.count([client, fresh], 5)
    assert client(large, SECONDS)["x"].equal(large["x"])
    assert client.in_flight == 0
    server.kill()


def test_after_serve_elsewhere_this_side_makes_clients_only(
    transport: MPTransport, processes: ProcessHarness
) -> None:
    client = transport.client()
    lost = client.submit(number(1))
    assert transport.wait_for_work(SECONDS)
    server, _ = served_elsewhere(transport, processes, roles.serve)
    with raises(PeerLostError):
        lost.result(SECONDS)
    with raises(ValueError, "another process"):
        transport.drain(1)
    roles.count([client, transport.client()], 2)
    server.kill()


def test_a_server_without_descriptors_left_says_so_and_goes_on(
    transport: MPTransport, processes: ProcessHarness
) -> None:
    clients = [transport.client() for _ in range(4)]
    server, _ = served_elsewhere(transport, processes, roles.serve_with_few_descriptors, 3)
    roles.count(clients[:3], 2)
    with raises(TimeoutError, "descriptors"):
        clients[3](number(1), 1.0)
    roles.count(clients[:3], 2)
    clients.pop(0).close()
    roles.count(clients, 2)
    server.kill()


# Many, and from everywhere.


def test_64_clients_in_four_processes(server: InferenceServer, processes: ProcessHarness) -> None:
    transport: Any = server.transport
    groups = [server.clients(16) for _ in range(4)]
    runs = [processes.run_client(roles.count, group, 30) for group in groups]
    for run in runs:
        run.result(2 * PATIENCE)
    assert transport.wait_until_left(64, SECONDS)
    assert transport.num_lost == 0
    assert wait_until(lambda: server.stats().requests == 64 * 30, SECONDS)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_clients_go_to_processes_however_they_are_started(
    server: InferenceServer, method: str
) -> None:
    transport: Any = server.transport
    context: Any = multiprocessing.get_context(method)
    used, *unused = server.clients(3)
    roles.count([used], 1)
    process = context.Process(target=roles.ask, args=([used, *unused],))
    process.start()
    process.join(PATIENCE)
    assert process.exitcode == 0
    process.close()
    roles.count([used, *unused], 1)
    assert transport.num_lost == 0


def test_a_client_works_on_both_sides_of_a_fork(
    server: InferenceServer, processes: ProcessHarness
) -> None:
    processes.run_client(roles.fork_and_ask, server.client()).result(PATIENCE)


def test_a_fork_does_not_hide_that_a_client_was_killed(
    server: InferenceServer, processes: ProcessHarness
) -> None:
    transport: Any = server.transport
    victim = processes.run_client(roles.fork_and_wait, server.client())
    child = victim.next_report(PATIENCE)
    try:
        victim.kill()
        assert wait_until(lambda: transport.num_lost == 1, SECONDS)
        assert psutil.pid_exists(child)
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_fork_does_not_hide_that_the_server_was_killed(
    transport: MPTransport, processes: ProcessHarness
) -> None:
    client = transport.client()
    server = processes.run_client(roles.serve_and_fork, None, transport.serve_elsewhere())
    future = client.submit(number(1))
    _, child = server.next_report(PATIENCE)
    try:
        server.kill()
        with soon(SECONDS), raises(PeerLostError):
            future.result(SECONDS)
        with soon(SECONDS), raises(PeerLostError):
            client(number(2), 0.5)
        assert psutil.pid_exists(child)
        again = MPTransport(address=transport.address, secret=transport.secret)
        with InferenceServer(roles.echo, again):
            roles.count([client], 1)
    finally:
        os.kill(child, signal.SIGKILL)


def test_large_requests_of_many_clients_at_once(
    server: InferenceServer, processes: ProcessHarness
) -> None:
    runs = [processes.run_client(exchange_images, server.client(), 8, value) for value in range(4)]
    for run in runs:
        run.result(2 * PATIENCE)


def exchange_images(client: Any, megabytes: int, value: int) -> None:
    for turn in range(5):
        sent = image(megabytes, 10 * turn + value)
        assert client(sent, SECONDS)["x"].equal(sent["x"])
        assert sent["x"].numel() == megabytes * MIB
