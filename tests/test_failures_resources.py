"""What joining, leaving and waiting cost a server: nothing that stays."""

from __future__ import annotations

import errno
import gc
import os
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import psutil
import pytest
from failure_roles import (
    SECONDS,
    SECRET,
    Doubler,
    Held,
    ask,
    check,
    client_at,
    crew,
    port_of,
    reply,
    request,
    serve,
    serving,
)
from support import wait_until

from meshinfer import DistributedTransport, InferenceServer, RefusedError
from meshinfer.inference.distributed.client import _GOODBYE_SECONDS

MEBIBYTE = 1 << 20
ROUNDS = 15
LONG = 100.0
"""Seconds for what takes long on a busy machine, and for which no test waits."""


def resident(station: Any = None) -> int:
    gc.collect()
    return psutil.Process().memory_info().rss


def join_ask_leave(station: Any, port: int, rounds: int) -> None:
    """``rounds`` times a new client of the same rank, which makes ten requests."""
    for round_ in range(rounds):
        transport = DistributedTransport(
            request(0), reply(), role="client", port=port, secret=SECRET, rank=1
        )
        with transport.client() as client:
            for n in range(10):
                ask(client, 10 * round_ + n)


def no_more(server: InferenceServer, held: Held) -> bool:
    """Whether the server holds nothing beyond ``held``: what an earlier test has left may go meanwhile."""
    now = Held.by(server)
    return all(getattr(now, field.name) <= getattr(held, field.name) for field in fields(Held))


@pytest.mark.slow
def test_many_rounds_of_join_ask_leave_cost_nothing_that_stays() -> None:
    with serving(Doubler()) as server, crew(1) as (worker,):
        held, memory = [], []
        for _ in range(4):
            worker.call(join_ask_leave, port_of(server), ROUNDS, within=LONG)
            assert wait_until(lambda: server.stats().clients == 0, SECONDS)
            held.append(Held.by(server))
            memory.append((resident(), worker.call(resident)))
        assert wait_until(lambda: no_more(server, held[0]), SECONDS), (held, Held.by(server))
        for now in zip(*memory, strict=True):
            # What stays of a client stays of each; what else a process touches for the first time, it touches once.
            assert min(after - before for before, after in pairwise(now)) < ROUNDS * MEBIBYTE / 10


def test_leavers_in_one_process_leave_no_thread_and_no_descriptor() -> None:
    with serving(Doubler()) as server, server.client() as stays:
        ask(stays, 1)
        held = None
        for _ in range(3):
            for _ in range(5):
                with server.client() as client:
                    ask(client, 2)
            del client
            assert wait_until(lambda: server.stats().clients == 1, SECONDS)
            assert held is None or wait_until(lambda: no_more(server, held), SECONDS)  # noqa: B023
            held = Held.by(server)


def test_closing_gives_everything_back_although_the_objects_are_still_there() -> None:
    me = psutil.Process()
    with serving(Doubler()) as first, first.client() as client:
        ask(client, 1)
    del first, client
    gc.collect()
    threads, connections = me.num_threads(), len(me.net_connections("tcp"))
    # A goodbye of one side meets the last lines of the other's thread in few of these rounds.
    for _ in range(25):
        with serving(Doubler()) as server, server.client() as client:
            ask(client, 1)
        # What an earlier test has left may go meanwhile, so fewer are as good.
        assert wait_until(lambda: me.num_threads() <= threads, SECONDS)
        assert wait_until(lambda: len(me.net_connections("tcp")) <= connections, SECONDS)
        assert not server.is_alive
        assert client.in_flight == 0


def leave_descriptors(station: Any, count: int) -> None:
    """Let this process have ``count`` more than it has now."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + count, hard))


def join_until_one_cannot(station: Any, port: int) -> tuple[int, BaseException]:
    """How many joined, and what the next one raised."""
    station.clients = []
    for n in range(50):
        client = client_at(port)
        try:
            ask(client, n)
        except (OSError, RefusedError) as error:
            return n, error
        station.clients.append(client)
    raise AssertionError("all have joined")


def all_are_served(station: Any) -> None:
    for n, client in enumerate(station.clients):
        ask(client, n)


def one_leaves_and_one_joins(station: Any, port: int) -> None:
    station.clients.pop().close()
    station.clients.append(client_at(port))
    assert wait_until(lambda: joins(station.clients[-1]), SECONDS)


def joins(client: Any) -> bool:
    try:
        ask(client, 1)
    except (OSError, RefusedError):  # what the one before had is not free yet
        return False
    return True


@pytest.mark.parametrize("whose", ["server", "client"])
def test_who_has_no_descriptor_for_one_more_client_says_so_and_goes_on(whose: str) -> None:
    """gloo would end the process that a peer connects to then, and with it all others' work."""
    with crew(2) as (server, worker):
        port = server.call(serve)
        (server if whose == "server" else worker).call(leave_descriptors, 60)
        joined, error = worker.call(join_until_one_cannot, port)
        assert joined > 3
        assert "ulimit -n" in str(error)
        if whose == "server":
            assert isinstance(error, RefusedError)
            assert "the server's process has no room" in str(error)
        else:
            assert isinstance(error, OSError)
            assert error.errno == errno.EMFILE
        worker.call(all_are_served)
        worker.call(one_leaves_and_one_joins, port)


def test_closing_a_client_takes_no_time() -> None:
    with serving(Doubler()) as server:
        clients = server.clients(10)
        for client in clients:
            ask(client, 1)
        began = time.monotonic()
        for client in clients:
            client.close()
            client.close()
        assert time.monotonic() - began < len(clients) * _GOODBYE_SECONDS / 2


def reserve(station: Any, count: int) -> None:
    station.reserved = [station.server.client() for _ in range(count)]


def cpu_seconds(station: Any, idle: float) -> float:
    """Of this process, while it only waits for the pipe; of three such times, the one with the least beside it."""
    found = []
    for _ in range(3):
        began = time.process_time()
        assert not station.pipe.poll(idle)
        found.append(time.process_time() - began)
    return min(found)


def test_a_thousand_reserved_clients_cost_an_idle_server_nothing() -> None:
    with crew(1) as (server,):
        server.call(serve)
        without = server.call(cpu_seconds, 0.5)
        server.call(reserve, 1000)
        with_them = server.call(cpu_seconds, 0.5)
        assert with_them - without < 0.01 * 0.5


def join_all(station: Any, port: int, count: int) -> float:
    """``count`` clients, each from a thread; seconds until the last has its first reply."""
    transport = DistributedTransport(
        request(0), reply(), role="client", port=port, secret=SECRET, timeout=LONG
    )
    station.clients = [transport.client() for _ in range(count)]
    began = time.monotonic()
    with ThreadPoolExecutor(count) as threads:
        list(threads.map(ask, station.clients, range(count)))
    return time.monotonic() - began


def use_all(station: Any) -> None:
    futures = [client.submit(request(n)) for n, client in enumerate(station.clients)]
    for n, future in enumerate(futures):
        check(future.result(SECONDS), n)


def leave_all(station: Any) -> None:
    while station.clients:
        station.clients.pop().close()


@pytest.mark.slow
def test_256_clients_join_and_are_all_served_and_leave(record_property: Any) -> None:
    """Each costs the server a thread and at most five descriptors: two of its pair, three of ways into the store."""
    with serving(Doubler(), timeout=LONG) as server, crew(2) as workers:
        server.transport._reception._join_timeout = LONG  # type: ignore[attr-defined]
        workers[0].call(join_all, port_of(server), 1)
        workers[0].call(leave_all)
        assert wait_until(lambda: server.stats().clients == 0, SECONDS)
        before = Held.by(server)
        began = time.monotonic()
        for worker in workers:
            worker.begin(join_all, port_of(server), 128)
        for worker in workers:
            worker.outcome(LONG).get()
        seconds = time.monotonic() - began
        record_property("seconds_for_256_joins", seconds)
        print(f"256 clients joined in {seconds:.1f} s")
        assert server.stats().clients == 256
        most = replace(
            before, threads=before.threads + 256, descriptors=before.descriptors + 3 * 256
        )
        assert wait_until(lambda: no_more(server, most), SECONDS), (before, Held.by(server))
        for worker in workers:
            worker.begin(use_all)
        for worker in workers:
            worker.outcome(SECONDS).get()
        for worker in workers:
            worker.begin(leave_all)
        for worker in workers:
            worker.outcome(SECONDS).get()
        assert wait_until(lambda: server.stats().clients == 0, SECONDS)
        assert wait_until(lambda: no_more(server, before), SECONDS), (before, Held.by(server))
