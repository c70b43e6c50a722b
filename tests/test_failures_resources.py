"""What joining, leaving and waiting cost a server: nothing that stays."""

from __future__ import annotations

import gc
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
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
    crew,
    port_of,
    reply,
    request,
    serve,
    serving,
)
from support import wait_until

from meshinfer import DistributedTransport, InferenceServer

MEBIBYTE = 1 << 20


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
        worker.call(join_ask_leave, port_of(server), 15, within=60.0)
        assert wait_until(lambda: server.stats().clients == 0, 5.0)
        held, memory = Held.by(server), resident()
        theirs = worker.call(resident)
        worker.call(join_ask_leave, port_of(server), 45, within=60.0)
        assert wait_until(lambda: server.stats().clients == 0, 5.0)
        assert wait_until(lambda: no_more(server, held), 30.0), (held, Held.by(server))
        assert resident() - memory < 5 * MEBIBYTE
        assert worker.call(resident) - theirs < 5 * MEBIBYTE


def test_leavers_in_one_process_leave_no_thread_and_no_descriptor() -> None:
    with serving(Doubler()) as server, server.client() as stays:
        ask(stays, 1)
        held = None
        for _ in range(3):
            for _ in range(5):
                with server.client() as client:
                    ask(client, 2)
            del client
            assert wait_until(lambda: server.stats().clients == 1, 30.0)
            assert held is None or wait_until(lambda: no_more(server, held), 30.0)  # noqa: B023
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
        assert wait_until(lambda: me.num_threads() <= threads, 30.0)
        assert wait_until(lambda: len(me.net_connections("tcp")) <= connections, 30.0)
        assert not server.is_alive
        assert client.in_flight == 0


def test_closing_a_client_takes_no_time() -> None:
    with serving(Doubler()) as server:
        clients = server.clients(10)
        for client in clients:
            ask(client, 1)
        began = time.monotonic()
        for client in clients:
            client.close()
            client.close()
        assert time.monotonic() - began < 2.0


def reserve(station: Any, count: int) -> None:
    station.reserved = [station.server.client() for _ in range(count)]


def cpu_seconds(station: Any, idle: float) -> float:
    """Of this process, while it only waits for the pipe."""
    began = time.process_time()
    assert not station.pipe.poll(idle)
    return time.process_time() - began


def test_a_thousand_reserved_clients_cost_an_idle_server_nothing() -> None:
    with crew(1) as (server,):
        server.call(serve)
        without = server.call(cpu_seconds, 1.5)
        server.call(reserve, 1000)
        with_them = server.call(cpu_seconds, 1.5)
        assert with_them - without < 0.01 * 1.5


def join_all(station: Any, port: int, count: int) -> float:
    """``count`` clients, each from a thread; seconds until the last has its first reply."""
    transport = DistributedTransport(
        request(0), reply(), role="client", port=port, secret=SECRET, timeout=SECONDS
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


def threads_and_descriptors(server: InferenceServer) -> tuple[int, int]:
    held = Held.by(server)
    return held.threads, held.descriptors


@pytest.mark.slow
def test_256_clients_join_and_are_all_served_and_leave(record_property: Any) -> None:
    with serving(Doubler(), timeout=SECONDS) as server, crew(2) as workers:
        threads, descriptors = threads_and_descriptors(server)
        began = time.monotonic()
        for worker in workers:
            worker.begin(join_all, port_of(server), 128)
        for worker in workers:
            worker.outcome(SECONDS).get()
        seconds = time.monotonic() - began
        record_property("seconds_for_256_joins", seconds)
        print(f"256 clients joined in {seconds:.1f} s")
        assert server.stats().clients == 256
        now_threads, now_descriptors = threads_and_descriptors(server)
        assert now_threads - threads <= 3 * 256
        assert now_descriptors - descriptors <= 4 * 256
        for worker in workers:
            worker.begin(use_all)
        for worker in workers:
            worker.outcome(SECONDS).get()
        for worker in workers:
            worker.begin(leave_all)
        for worker in workers:
            worker.outcome(SECONDS).get()
        assert wait_until(lambda: server.stats().clients == 0, 10.0)
        assert wait_until(lambda: threads_and_descriptors(server)[0] <= threads + 2, 10.0)
        assert wait_until(lambda: threads_and_descriptors(server)[1] <= descriptors + 8, 10.0)
