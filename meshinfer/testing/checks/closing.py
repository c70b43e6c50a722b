"""The end: from either side, in any order, with requests in flight, or without anybody calling ``close``."""

from __future__ import annotations

import contextlib
import gc
import pickle
import threading
import time
import weakref
from typing import Any

from meshinfer.errors import ClosedError, ServerClosedError
from meshinfer.inference.protocol import InferenceClient
from meshinfer.server import InferenceServer
from meshinfer.testing.check import conformance_check
from meshinfer.testing.checks.driving import collect_handles
from meshinfer.testing.expect import raises
from meshinfer.testing.harness import AT_ONCE, TransportHarness, report, within
from meshinfer.testing.serving import (
    HELD,
    AddOne,
    Gated,
    check_reply,
    clients_for,
    make_transport,
    request,
    serving,
)

__all__ = ["CHECKS"]

SOON = 30.0


@conformance_check()
def waiting_clients_learn_that_the_server_closed(harness: TransportHarness) -> None:
    """``close`` makes clients that wait raise ServerClosedError, whether their request was drained or not."""
    for drained in (0, 2):
        transport = make_transport(harness)
        try:
            runs = [
                harness.run_client(_expect_closed, clients_for(harness, transport, 3), deadline)
                for deadline in (None, 60.0)
            ]
            assert transport.wait_for_work(harness.patience), "no request came"
            collect_handles(transport, drained, harness.patience)
            for run in runs:
                run.next_report(harness.patience)
        finally:
            with within(SOON, "close()"):
                transport.close()
        for run in runs:
            run.result(SOON)


def _expect_closed(clients: list[InferenceClient], timeout: float | None) -> None:
    futures = [client.submit(request(value)) for value, client in enumerate(clients)]
    report()
    for future in futures:
        with raises(ServerClosedError):
            future.result(timeout)
    with within(SOON, "a call after the server closed"), raises(ServerClosedError):
        clients[0](request(1))


@conformance_check()
def shutdown_answers_what_is_being_computed(harness: TransportHarness) -> None:
    """A shutdown answers the batch that is being computed; what waits behind it raises ServerClosedError."""
    policy = Gated(harness.patience)
    with serving(harness, policy, max_batch_size=1) as server:
        run = harness.run_client(_ask_for_held, clients_for(harness, server, 2))
        policy.wait_entered()
        run.next_report(harness.patience)
        ending = threading.Thread(
            target=server.shutdown, args=(harness.patience,), name="conformance-end", daemon=True
        )
        ending.start()
        policy.gate.set()
        run.result(harness.patience)
        ending.join(harness.patience)
        assert not server.is_alive


def _ask_for_held(clients: list[InferenceClient]) -> None:
    futures = [client.submit(request(HELD + index)) for index, client in enumerate(clients)]
    report()
    answered = 0
    for index, future in enumerate(futures):
        with contextlib.suppress(ServerClosedError):
            check_reply(future.result(), HELD + index)
            answered += 1  # both, if the gate was quicker
    assert answered > 0, "the batch that was being computed was not answered"


@conformance_check()
def use_after_close_raises_at_once(harness: TransportHarness) -> None:
    """A client, a transport and a server raise ClosedError at once when they are used after their own close."""
    with serving(harness, AddOne()) as server:
        transport, client, unused = server.transport, server.client(), server.client()
        check_reply(client(request(1), harness.patience), 1)
        if harness.own_client:
            check_reply(transport.submit(request(2)).result(harness.patience), 2)
        for closed in (client, unused):
            closed.close()
            _expect_closed_client(closed)
        server.shutdown()
        for use in (server.client, server.start, transport.client):
            with within(AT_ONCE, f"{use} after close"), raises(ClosedError):
                use()
        if harness.own_client:
            with within(AT_ONCE, "transport.submit() after close"), raises(ClosedError):
                transport.submit(request(3))


def _expect_closed_client(client: Any) -> None:
    for call in (client, client.submit):
        with within(AT_ONCE, "a call after close"), raises(ClosedError):
            call(request(3))
    with raises(ClosedError), client:
        pass


@conformance_check()
def closing_gives_up_what_is_in_flight(harness: TransportHarness) -> None:
    """A client's ``close`` makes its own waiters raise ClosedError, and the server goes on."""
    policy = Gated(harness.patience)
    with serving(harness, policy, max_batch_size=1) as server:
        clients = clients_for(harness, server, 10)
        harness.run_client(_close_in_flight, clients).result(harness.patience)
        policy.gate.set()
        check_reply(server.client()(request(1), harness.patience), 1)


def _close_in_flight(clients: list[InferenceClient]) -> None:
    futures = [client.submit(request(HELD + value)) for value, client in enumerate(clients)]
    for client in clients:
        threading.Timer(0.05, client.close).start()
    for future in futures:
        with raises(ClosedError):
            future.result()


@conformance_check()
def either_side_may_close_first_and_twice(harness: TransportHarness) -> None:
    """Clients and servers may be closed in any order, more than once, used or not."""
    for order in ("client server", "server client", "client client server server client"):
        for used in (True, False):
            _close_in_order(harness, order.split(), used)


def _close_in_order(harness: TransportHarness, order: list[str], used: bool) -> None:
    with serving(harness, AddOne()) as server:
        client = server.client()
        if used:
            check_reply(client(request(1), harness.patience), 1)
        for side in order:
            with within(SOON, f"closing the {side}"):
                client.close() if side == "client" else server.shutdown()
        server.transport.close()
        server.transport.close()


@conformance_check()
def a_client_is_a_context_manager(harness: TransportHarness) -> None:
    """``with client:`` gives the client, and closes it at the end, also when the block raises."""
    with serving(harness, AddOne()) as server:
        harness.run_client(_use_in_block, server.client()).result(harness.patience)
        harness.run_client(_fail_in_block, server.client()).result(harness.patience)


def _use_in_block(client: Any) -> None:
    with client as entered:
        assert entered is client
        check_reply(client(request(1)), 1)
    _expect_closed_client(client)


def _fail_in_block(client: Any) -> None:
    with raises(LookupError, "of the block"), client:
        raise LookupError("of the block")
    _expect_closed_client(client)


@conformance_check("crosses_processes")
def a_client_can_be_pickled(harness: TransportHarness) -> None:
    """A client can be pickled, used or not; the copy connects on its own and outlives the original."""
    with serving(harness, AddOne()) as server:
        original = server.client()
        fresh = pickle.loads(pickle.dumps(original))
        check_reply(original(request(1), harness.patience), 1)
        copy = pickle.loads(pickle.dumps(original))
        original.close()
        for client in (fresh, copy):
            harness.run_client(_pickle_again, client).result(harness.patience)


def _pickle_again(client: InferenceClient) -> None:
    check_reply(client(request(2)), 2)
    again = pickle.loads(pickle.dumps(client))
    client.close()
    check_reply(again(request(3)), 3)
    again.close()


@conformance_check()
def what_is_dropped_ends_by_itself(harness: TransportHarness) -> None:
    """A client, a server and a transport that are dropped without ``close`` are collected and leave no thread."""
    before = set(threading.enumerate())
    for serve in (True, False):
        dropped = _use_and_drop(harness, serve)
        deadline = time.monotonic() + harness.patience
        while kept := _still_there(
            dropped
        ):  # a thread that is about to end may hold one for a moment
            assert time.monotonic() < deadline, f"still there: {kept}"
            time.sleep(0.01)
    deadline = time.monotonic() + harness.patience
    for thread in set(threading.enumerate()) - before:
        thread.join(max(deadline - time.monotonic(), 0.0))
        assert not thread.is_alive(), f"{thread.name} was left behind"


def _still_there(dropped: list[weakref.ref[Any]]) -> list[str]:
    """In words: a reference would keep it there."""
    gc.collect()
    return [repr(reference()) for reference in dropped if reference() is not None]


def _use_and_drop(harness: TransportHarness, serve: bool) -> list[weakref.ref[Any]]:
    transport = make_transport(harness)
    server = InferenceServer(AddOne(), transport)
    client = transport.client()
    if serve:
        server.start()
        check_reply(client(request(1), harness.patience), 1)
        client.submit(request(2))
    return [weakref.ref(each) for each in (server, transport, client)]


CHECKS = (
    waiting_clients_learn_that_the_server_closed,
    shutdown_answers_what_is_being_computed,
    use_after_close_raises_at_once,
    closing_gives_up_what_is_in_flight,
    either_side_may_close_first_and_twice,
    a_client_is_a_context_manager,
    a_client_can_be_pickled,
    what_is_dropped_ends_by_itself,
)
