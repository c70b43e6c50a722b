"""Waiting: deadlines, retries, looking without waiting, giving up, several waiters."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from meshinfer.inference.protocol import InferenceClient
from meshinfer.testing.check import conformance_check
from meshinfer.testing.checks.replies import count
from meshinfer.testing.expect import raises
from meshinfer.testing.harness import AT_ONCE, ClientRun, TransportHarness, report, within
from meshinfer.testing.serving import (
    HELD,
    AddOne,
    Gated,
    check_reply,
    clients_for,
    request,
    serving,
)

__all__ = ["CHECKS"]

LONG = 60.0
"""Seconds for a request that is answered soon."""


def _run_at_gate(
    harness: TransportHarness, function: Callable[..., Any], in_flight: int, **server_options: Any
) -> None:
    """Run ``function``, which has so many requests in flight; one is held until it has reported."""
    policy = Gated(harness.patience)
    with serving(harness, policy, **server_options) as server:
        clients = clients_for(harness, server, in_flight)
        run = harness.run_client(function, clients[0] if in_flight == 1 else clients)
        run.next_report(harness.patience)
        policy.gate.set()
        run.result(harness.patience)


@conformance_check()
def a_timeout_leaves_the_request_in_flight(harness: TransportHarness) -> None:
    """When ``result`` times out it raises TimeoutError, and can be called again for the reply."""
    _run_at_gate(harness, _time_out_and_retry, 1)


def _time_out_and_retry(client: InferenceClient) -> None:
    future = client.submit(request(HELD))
    for timeout in (0.05, 0.0, 0.01):
        with within(AT_ONCE, "result(timeout)"), raises(TimeoutError):
            future.result(timeout)
    report()
    check_reply(future.result(), HELD)
    check_reply(future.result(0.0), HELD)
    check_reply(client(request(1)), 1)


@conformance_check()
def a_burst_of_timeouts_does_no_damage(harness: TransportHarness) -> None:
    """After many requests were given up in time-outs and cancellations, each later one gets its own reply."""
    _run_at_gate(harness, _give_up_many, 2)


def _give_up_many(clients: list[InferenceClient]) -> None:
    holder, other = clients
    held = holder.submit(request(HELD))
    given_up = 0
    while given_up < 100:  # some may be answered while the held one is on its way
        try:
            check_reply(other(request(given_up), 0.003), given_up)
        except TimeoutError:
            given_up += 1
    at_once = 100 if other is holder else 1
    for _ in range(0, 100, at_once):
        for future in [other.submit(request(value)) for value in range(at_once)]:
            assert future.cancel()
    report()
    check_reply(held.result(), HELD)
    count(other, 1000, 200, LONG)


@conformance_check()
def a_cancelled_request_is_over(harness: TransportHarness) -> None:
    """``cancel`` ends a request that is in flight, and is refused by one that has its reply."""
    _run_at_gate(harness, _cancel, 2, max_batch_size=1)


def _cancel(clients: list[InferenceClient]) -> None:
    held, queued = clients[0].submit(request(HELD)), clients[1].submit(request(1))
    with within(AT_ONCE, "cancel()"):
        assert queued.cancel(), "a request in flight could not be cancelled"
    assert queued.done()
    with within(AT_ONCE, "result() of a cancelled request"), raises(Exception) as caught:
        queued.result()
    assert not isinstance(caught.error, TimeoutError), "a cancelled request is not a late one"
    report()
    check_reply(held.result(), HELD)
    assert not held.cancel(), "an answered request was cancelled"
    check_reply(held.result(), HELD)
    check_reply(clients[-1](request(2)), 2)


@conformance_check()
def done_turns_true_without_waiting(harness: TransportHarness) -> None:
    """``done`` never waits, is false before the reply, and turns true although nobody waits."""
    _run_at_gate(harness, _look_only, 1)


def _look_only(client: InferenceClient) -> None:
    future = client.submit(request(HELD))
    with within(AT_ONCE, "done()"):
        assert not future.done(), "done() before there was a reply"
    report()
    pause, deadline = threading.Event(), time.monotonic() + LONG
    while not future.done():
        assert time.monotonic() < deadline, "done() stayed false"
        pause.wait(0.001)
    with within(AT_ONCE, "result() after done()"):
        check_reply(future.result(0.0), HELD)


@conformance_check()
def futures_can_be_awaited(harness: TransportHarness) -> None:
    """Futures can be awaited in asyncio, many at once, and the event loop goes on meanwhile."""
    _run_at_gate(harness, _await, 31)


def _await(clients: list[InferenceClient]) -> None:
    asyncio.run(_await_many(clients))


async def _await_many(clients: list[InferenceClient]) -> None:
    async def ask(client: InferenceClient, value: int) -> None:
        future: Any = client.submit(request(value))
        check_reply(await future, value)

    values = [HELD, *range(len(clients) - 1)]
    pairs = zip(clients, values, strict=True)
    tasks = [asyncio.create_task(ask(client, value)) for client, value in pairs]
    await asyncio.sleep(0)  # they are all waiting now, and we are here all the same
    assert not tasks[0].done()
    report()
    await asyncio.gather(*tasks)


@conformance_check("shared_clients", "many_in_flight")
def threads_may_share_a_client(harness: TransportHarness) -> None:
    """Threads that share one client each get their own replies."""
    with serving(harness, AddOne()) as server:
        harness.run_client(_share, server.client()).result(harness.patience)


def _share(client: InferenceClient) -> None:
    with ThreadPoolExecutor(4) as pool:
        runs = [pool.submit(count, client, 1000 * index, 100, None) for index in range(3)]
        runs.append(pool.submit(count, client, 9000, 100, LONG))
        assert [run.result() for run in runs] == [100] * 4


@conformance_check("shared_clients")
def nobody_waits_behind_another_waiter(harness: TransportHarness) -> None:
    """While one thread waits, ``done``, ``result(timeout)`` and the result of an answered request do not."""
    _run_at_gate(harness, _wait_beside, 2, max_batch_size=1)


def _wait_beside(clients: list[InferenceClient]) -> None:
    answered = clients[0].submit(request(1))
    while not answered.done():
        time.sleep(0.001)
    held = clients[1].submit(request(HELD))
    waiter = ClientRun()
    started = threading.Event()

    def wait() -> None:
        started.set()
        check_reply(held.result(), HELD)
        waiter.finish(None)

    threading.Thread(target=wait, name="conformance-waiter", daemon=True).start()
    started.wait()
    with within(AT_ONCE, "result() of an answered request"):
        check_reply(answered.result(), 1)
    with within(AT_ONCE, "result(timeout) beside a waiter"), raises(TimeoutError):
        held.result(0.05)
    with within(AT_ONCE, "done() beside a waiter"):
        assert not held.done()
        assert answered.done()
    report()
    waiter.result(LONG)


@conformance_check()
def abandoned_futures_are_freed(harness: TransportHarness) -> None:
    """A future that was dropped is freed once its reply has come, and hinders nobody."""
    with serving(harness, AddOne()) as server:
        harness.run_client(_abandon, server.client()).result(harness.patience)


def _abandon(client: InferenceClient) -> None:
    dropped = [weakref.ref(client.submit(request(value))) for value in range(50)]
    count(client, 100, 60, None)
    gc.collect()
    kept = sum(reference() is not None for reference in dropped)
    assert kept == 0, f"{kept} of 50 abandoned futures are still held"


CHECKS = (
    a_timeout_leaves_the_request_in_flight,
    a_burst_of_timeouts_does_no_damage,
    a_cancelled_request_is_over,
    done_turns_true_without_waiting,
    futures_can_be_awaited,
    threads_may_share_a_client,
    nobody_waits_behind_another_waiter,
    abandoned_futures_are_freed,
)
