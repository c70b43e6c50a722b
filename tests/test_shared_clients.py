"""Clients of both transports through shared memory: their slots, their futures, and what may befall a call."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import pytest
import torch
from failure_roles import (
    SECONDS,
    SPOILED,
    Doubler,
    ask,
    check,
    crew,
    leave,
    query,
    request,
)
from shared_roles import (
    KINDS,
    PATIENT,
    answer,
    check_rows,
    ended,
    forked,
    make,
    own,
    serving_slots,
    take,
    use_in_a_child,
    use_real_fence,
)
from shared_sweeps import (
    collect_garbage_at_any_line,
    fork_at_any_line,
)
from support import wait_until
from tensordict import TensorDict

from meshinfer import ClosedError, TransportError

BOTH = pytest.mark.parametrize("kind", list(KINDS))


# Slots and their clients.


def test_a_client_is_refused_in_a_second_process_until_the_first_has_left() -> None:
    with serving_slots(Doubler(), "process_slot") as server, crew(2) as (first, second):
        client = server.client()
        for worker in (first, second):
            worker.call(own, client)
        first.call(query, 1)
        for _ in range(2):
            with pytest.raises(TransportError, match=rf"slot 0 .* process {first.pid}\b"):
                second.call(query, 2)
        first.call(query, 3)
        first.call(leave)
        second.call(query, 4)
        second.kill()
        ask(client, 5, SECONDS)


def test_there_are_no_more_clients_than_slots() -> None:
    with serving_slots(Doubler(), "process_slot", 3) as server, crew(1) as (worker,):
        clients = server.clients(2)
        worker.call(own, server.client())
        worker.call(query, 1)
        for end in (clients[0].close, clients[1].close, worker.kill):
            with pytest.raises(ValueError, match=r"all 3 slots .* num_slots"):
                server.client()
            end()
            clients.append(server.client())
            ask(clients[-1], 2, SECONDS)


def test_a_client_that_was_never_used_gives_its_slot_back_as_well() -> None:
    with serving_slots(Doubler(), "process_slot", 1) as server:
        for value in range(3):
            with server.client() as client:
                pass
            client = server.client()
            ask(client, value, SECONDS)
            client.close()


def test_clients_are_counted_while_they_are_there() -> None:
    with serving_slots(Doubler(), "process_slot", 3) as server, crew(1) as (worker,):
        first, second, third = server.clients(3)
        assert server.transport.num_clients == 0
        for count, client in enumerate((first, second), start=1):
            ask(client, count, SECONDS)
            assert server.transport.num_clients == count
        worker.call(own, third)
        worker.call(query, 1)
        assert server.stats().clients == 3
        worker.kill()
        assert wait_until(lambda: server.transport.num_clients == 2, SECONDS)
        first.close()
        second.close()
        assert server.transport.num_clients == 0


def test_a_server_serves_until_its_clients_have_left() -> None:
    with serving_slots(Doubler(), "process_slot", 2) as server, crew(2) as (leaves, dies):
        with pytest.raises(TimeoutError, match="not come yet"):
            server.serve(timeout=0.1)
        for worker in (leaves, dies):
            worker.call(own, server.client())
            worker.call(query, 1)
        with ThreadPoolExecutor(1) as thread:
            serving = thread.submit(server.serve, 2, 2 * SECONDS)
            leaves.call(leave)
            with pytest.raises(FutureTimeoutError):
                serving.result(0.5)
            dies.kill()
            serving.result(SECONDS)
        with pytest.raises(TimeoutError, match="still connected, or had not come"):
            server.serve(3, 0.1)
        with server.client() as third:  # in the slot of one that has left
            ask(third, 1, SECONDS)
            assert not server.transport.wait_until_left(3, 0.1)
        server.serve(3, SECONDS)
        assert server.transport.wait_until_left(timeout=SECONDS)


# Rows are never seen half-written.


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("real_fence", [False, True])
def test_no_row_is_read_before_it_is_whole(
    kind: str, real_fence: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    width = 1 << 15
    if real_fence:
        use_real_fence(monkeypatch.setattr)
    policy = Whole()
    with serving_slots(policy, kind, 8, width=width) as server, crew(1) as (nursery,):
        nursery.call(check_rows, server.clients(8), width, 120, real_fence, within=100.0)
    assert policy.rows >= 8 * 120
    assert policy.broken == 0


class Whole:
    """A policy that counts the rows that are not all one value."""

    def __init__(self) -> None:
        self.rows = self.broken = 0

    def __call__(self, batch: Any) -> TensorDict:
        x = batch["x"].clone()
        whole = (x == x[:, :1]).all(1)
        self.rows += len(x)
        if (
            x[whole, 0] >= PATIENT
        ).any():  # nobody looks at a batch of which all have been given up
            self.broken += int((~whole).sum())
        return TensorDict({"y": 2 * x}, batch.batch_size)


# Futures.


@BOTH
def test_futures_can_be_awaited(kind: str) -> None:
    with serving_slots(Doubler(), kind, 50) as server:
        clients = server.clients(50)

        async def main() -> list[int]:
            futures = [client.submit(request(n)) for n, client in enumerate(clients)]
            replies = await asyncio.gather(*(wait_for(future) for future in futures))
            return [found["y"].item() for found in replies]

        assert asyncio.run(main()) == [2 * n for n in range(50)]


async def wait_for(future: Any) -> Any:
    return await future


@BOTH
def test_an_answered_future_is_not_awaited_behind_unanswered_ones(kind: str) -> None:
    with make(kind, 50) as transport:
        clients = [transport.client() for _ in range(50)]
        futures = [client.submit(request(n)) for n, client in enumerate(clients)]
        slots = take(transport, 50)

        async def main() -> None:
            others = [asyncio.ensure_future(wait_for(future)) for future in futures[:-1]]
            last = asyncio.ensure_future(wait_for(futures[-1]))
            await asyncio.sleep(0)  # all of them wait now
            transport.resolve(slots[-1], answer(49))
            check(await asyncio.wait_for(last, SECONDS), 49)
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(others[0], 0.1)
            assert not futures[0].done()  # given up by this task, not by everyone
            for other in others:
                other.cancel()

        asyncio.run(main())  # leaves although nobody answers the others
        transport.resolve(slots[0], answer(0))
        check(futures[0].result(SECONDS), 0)


@BOTH
def test_threads_wait_for_one_future_each_with_its_own_deadline(kind: str) -> None:
    with make(kind, 1) as transport, ThreadPoolExecutor(6) as threads:
        future = transport.client().submit(request(1))
        patient = [threads.submit(future.result, *args) for args in ((), (SECONDS,), (math.inf,))]
        hasty = [threads.submit(timed_out, future, timeout) for timeout in (0.0, 0.1, 0.3)]
        for waiting, timeout in zip(hasty, (0.0, 0.1, 0.3), strict=True):
            assert timeout <= waiting.result(SECONDS)
        assert not any(waiting.done() for waiting in patient)
        transport.resolve(take(transport, 1)[0], answer(1))
        for waiting in patient:
            check(waiting.result(SECONDS), 1)


def timed_out(future: Any, timeout: float) -> float:
    """How long ``result`` took to give up, in seconds."""
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        future.result(timeout)
    return time.monotonic() - began


@BOTH
def test_cancelling_wakes_those_who_wait_and_frees_the_slot(kind: str) -> None:
    with make(kind, 1) as transport, ThreadPoolExecutor(2) as threads:
        client = transport.client()
        future = client.submit(request(1))
        waiting = [threads.submit(future.result) for _ in range(2)]
        with pytest.raises(TimeoutError):
            future.result(0.1)
        assert future.cancel()
        for each in waiting:
            assert isinstance(each.exception(SECONDS), TransportError)
        assert future.cancel() is False
        assert client.in_flight == 0
        again = client.submit(request(2), SECONDS)
        transport.resolve(take(transport, 1)[0], answer(2))
        assert wait_until(again.done, SECONDS)
        assert again.cancel() is False
        check(again.result(0.0), 2)


@BOTH
def test_a_dropped_future_gives_its_slot_back(kind: str) -> None:
    with serving_slots(Doubler(), kind, 1) as server:
        client = server.client()
        for value in range(5):
            client.submit(request(value), SECONDS)
            assert client.in_flight == 0
        ask(client, 7, SECONDS)
        kept = client.submit(request(8))
        assert wait_until(kept.done, SECONDS)
        ask(client, 9, SECONDS)  # takes the reply out of the only slot
        check(kept.result(0.0), 8)


def test_a_second_request_in_flight_is_refused() -> None:
    with make("process_slot", 1) as transport, ThreadPoolExecutor(1) as thread:
        client = transport.client()
        future = client.submit(request(1))
        refused = pytest.raises(RuntimeError, match="one at a time")
        for call in (client, client.submit):
            with refused:
                call(request(2))
        transport.resolve(take(transport, 1)[0], answer(1))
        check(future.result(SECONDS), 1)
        calling = thread.submit(client, request(3))
        slots = take(transport, 1)
        for call in (client, client.submit):
            with refused:
                call(request(4))
        transport.resolve(slots[0], answer(3))
        check(calling.result(SECONDS), 3)


@BOTH
def test_closing_a_client_ends_what_its_threads_wait_for(kind: str) -> None:
    with make(kind, 2) as transport, ThreadPoolExecutor(2) as threads:
        clients = [transport.client() for _ in range(2)]
        future = clients[0].submit(request(1))
        waiting = [threads.submit(future.result), threads.submit(clients[1], request(2))]
        slots = take(transport, 2)
        for client, each in zip(clients, waiting, strict=True):
            client.close()
            assert isinstance(each.exception(SECONDS), ClosedError)
            with pytest.raises(ClosedError):
                client(request(3))
        again = [transport.client().submit(request(value), SECONDS) for value in (5, 6)]
        for slot in slots:
            transport.resolve(slot, answer(1))
        for slot, value in zip(take(transport, 2), (5, 6), strict=True):
            transport.resolve(slot, answer(value))
        for each, value in zip(again, (5, 6), strict=True):
            check(each.result(SECONDS), value)


@BOTH
def test_a_timeout_error_of_the_policy_is_not_the_clients_own(kind: str) -> None:
    policy = Doubler()
    policy.to_raise = lambda: TimeoutError("of the policy")
    with serving_slots(policy, kind, 1) as server:
        client = server.client()
        for timeout in (None, SECONDS):
            with pytest.raises(TimeoutError, match=r"^of the policy$"):
                client(request(SPOILED), timeout)
        with pytest.raises(TimeoutError, match=r"^of the policy$"):
            client.submit(request(SPOILED)).result(SECONDS)


@pytest.mark.parametrize("value", [request(1, 2), TensorDict({"z": torch.zeros(1)}, []), "text"])
@BOTH
def test_a_payload_that_does_not_fit_costs_nothing(kind: str, value: Any) -> None:
    with serving_slots(Doubler(), kind, 1) as server:
        client = server.client()
        for _ in range(3):
            with pytest.raises((TypeError, ValueError)):
                client.submit(value, SECONDS)
        ask(client, 1, SECONDS)


# What may happen to a client in the middle of a call.


def test_a_forked_child_and_its_parent_go_on_with_a_pool() -> None:
    with serving_slots(Doubler(), "shared_memory", 4) as server, crew(1) as (worker,):
        for _ in range(3):
            assert worker.call(use_in_a_child, server.client()) == 0


def test_a_forked_child_does_not_get_the_slot_of_its_parent() -> None:
    with serving_slots(Doubler(), "process_slot", 1) as server, crew(1) as (worker,):
        worker.call(be_refused_in_a_child, server.client())


def be_refused_in_a_child(station: Any, client: Any) -> None:
    future = client.submit(request(1))
    assert ended(forked(_be_refused, client, future, os.getpid())) == 0
    check(future.result(SECONDS), 1)
    check(client(request(2), SECONDS), 2)


def _be_refused(client: Any, future: Any, parent: int) -> None:
    with pytest.raises(TransportError, match=rf"process {parent}\b"):
        client(request(3), SECONDS)
    future.cancel()
    client.close()


@BOTH
def test_what_a_forked_child_drops_is_still_its_parents(kind: str) -> None:
    with crew(1) as (worker,):
        worker.call(drop_in_a_child, kind)


def drop_in_a_child(station: Any, kind: str) -> None:
    with make(kind, 2) as transport:
        clients = [transport.client() for _ in range(2)]
        futures = [client.submit(request(n)) for n, client in enumerate(clients)]
        assert ended(forked(_drop, clients, futures)) == 0
        for n, slot in enumerate(take(transport, 2)):
            transport.resolve(slot, answer(n))
        for n, future in enumerate(futures):
            check(future.result(SECONDS), n)
        del clients[:], futures[:]


def _drop(clients: list[Any], futures: list[Any]) -> None:
    futures.pop().cancel()
    futures.clear()
    for client in clients:
        client.close()
    clients.clear()
    gc.collect()


@BOTH
def test_the_garbage_collector_may_run_at_any_line(kind: str) -> None:
    with serving_slots(Doubler(), kind, 3) as server, crew(1) as (worker,):
        lines = worker.call(collect_garbage_at_any_line, server.clients(2), within=100.0)
        assert lines > 30


@pytest.mark.slow
@BOTH
def test_a_thread_may_fork_at_any_line_of_another(kind: str) -> None:
    own_lines = f"shared/{'pool' if kind == 'shared_memory' else kind}.py"
    parts = (own_lines, "shared/client.py", "shared/future.py", "meshinfer/memory.py")
    with serving_slots(Doubler(), kind, 4) as server, crew(1) as (worker,):
        lines = worker.call(fork_at_any_line, server.client(), parts, within=100.0)
        assert lines > 30
