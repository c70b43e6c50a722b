"""A server that dies, freezes or shuts down: what its clients get, and when."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import pytest
from failure_roles import (
    HELD,
    SECONDS,
    Doubler,
    ask,
    connect,
    crew,
    go_on,
    leave,
    port_of,
    query,
    query_again_and_again,
    request,
    serve,
    serving,
    shut_down,
    submit_and_collect,
    wait_until_computing,
)
from support import wait_until

from meshinfer import ClosedError, DistributedTransport, PeerLostError, ServerClosedError
from meshinfer.inference.distributed import client as client_module
from meshinfer.inference.distributed.reception import Reception
from meshinfer.inference.distributed.session import Session

LARGE = 1 << 20
"""int64 values: 8 MiB, more than sockets buffer."""


def test_every_client_of_a_killed_server_raises_within_five_seconds() -> None:
    with crew(5) as (server, *clients):
        port = server.call(serve, max_batch_size=1)
        for who, client in enumerate(clients):
            client.call(connect, port, who=who)
        first, second, third, fourth = clients
        first.begin(query, HELD)
        assert server.call(wait_until_computing)
        second.begin(query, 1, timeout=60.0)
        third.begin(submit_and_collect, [1] * 10)
        fourth.begin(submit_and_collect, [1] * 10, timeout=60.0)
        # All four have asked before the server dies: their functions run, and nothing is answered.
        server.kill()
        killed = time.monotonic()
        outcomes = [client.outcome(10.0) for client in clients]
        assert max(outcome.ended for outcome in outcomes) - killed < 5.0
        assert isinstance(outcomes[0].error, PeerLostError)
        assert isinstance(outcomes[1].error, PeerLostError)
        assert outcomes[2].get() == outcomes[3].get() == ["PeerLostError"] * 10


def test_a_client_of_a_killed_server_finds_the_next_one_at_the_same_place() -> None:
    with crew(3) as (server, successor, client):
        port = server.call(serve)
        client.call(connect, port)
        server.kill()
        client.begin(query, 1)
        assert isinstance(client.outcome(10.0).error, PeerLostError | TimeoutError)
        successor.call(serve, port=port)
        client.call(query, 2, within=15.0)


def test_calls_after_the_server_was_killed_do_not_hang() -> None:
    with crew(2) as (server, client):
        port = server.call(serve)
        client.call(connect, port)
        server.kill()
        for _ in range(2):
            client.begin(query, 1, timeout=1.0)
            outcome = client.outcome(10.0)
            assert isinstance(outcome.error, PeerLostError | TimeoutError)
            assert outcome.seconds < 4.0


@pytest.mark.slow
def test_a_stopped_server_is_noticed_at_the_deadline_and_serves_on_afterwards() -> None:
    with crew(4) as (server, with_deadline, without, large):
        port = server.call(serve, width=LARGE)
        for client in (with_deadline, without, large):
            client.call(connect, port, width=LARGE, timeout=1.5, first=None)
            client.call(query, 1, timeout=20.0)
        without.call(ask_for_a_sign_of_life_within, 3.0)
        server.signal(signal.SIGSTOP)
        with_deadline.begin(query, 1, timeout=1.0)
        large.begin(submit_and_collect, [1] * 5, timeout=0.5)  # more than the wire takes
        without.begin(query, 1)
        outcome = with_deadline.outcome(10.0)
        assert isinstance(outcome.error, TimeoutError)
        assert 0.9 < outcome.seconds < 3.0
        outcome = large.outcome(30.0)
        assert outcome.get() == ["TimeoutError"] * 5
        assert outcome.seconds < 6.5
        with_deadline.begin(query, 1, timeout=0.5)  # a second call does not wait behind the first
        outcome = with_deadline.outcome(10.0)
        assert isinstance(outcome.error, TimeoutError)
        assert outcome.seconds < 2.5
        outcome = without.outcome(40.0)
        assert isinstance(outcome.error, PeerLostError)
        assert "not answer" in str(outcome.error)
        assert outcome.seconds < 10.0  # its timeout, and as long again as asking may take
        server.signal(signal.SIGCONT)
        with_deadline.call(query, 2, timeout=SECONDS)
        without.call(query, 3, timeout=SECONDS)


def ask_for_a_sign_of_life_within(station: Any, seconds: float) -> None:
    """At a client: not as long as a slow name server may need."""
    client_module._PROBE_SECONDS = seconds


def test_a_client_that_joins_a_stopped_server_keeps_its_deadline() -> None:
    with crew(2) as (server, client):
        port = server.call(serve)
        server.signal(signal.SIGSTOP)
        client.call(connect, port, first=None)
        client.begin(query, 1, timeout=1.0)
        outcome = client.outcome(20.0)
        assert isinstance(outcome.error, TimeoutError)
        assert outcome.seconds < 3.0 + 5.0, "the 5 s are for a slow name server"
        server.signal(signal.SIGCONT)
        client.call(query, 2, timeout=SECONDS)


def test_a_slow_policy_is_not_a_dead_server() -> None:
    """A waiter without a deadline asks for a sign of life again and again, and waits on."""
    with crew(2) as (server, client):
        port = server.call(serve)
        client.call(connect, port, timeout=20.0)
        client.call(connect, port, timeout=0.5, first=None)
        client.call(query, 1, timeout=20.0)
        client.begin(query, HELD)
        assert server.call(wait_until_computing)
        with pytest.raises(AssertionError, match="no outcome"):
            client.outcome(1.3)
        server.call(go_on)
        client.outcome(10.0).get()


def test_idling_is_never_a_timeout() -> None:
    with serving(Doubler(), timeout=0.8) as server, server.client() as client:
        client(request(1), SECONDS)
        assert not wait_until(lambda: server.stats().clients == 0, 2.0)
        ask(client, 2)
        ask(client, 3, 1.0)


# Shutting down.


def test_every_queued_request_is_answered_or_told_that_the_server_has_closed() -> None:
    with crew(4) as (server, *clients):
        port = server.call(serve, max_batch_size=2)
        for client in clients:
            client.call(connect, port)
        clients[0].begin(submit_and_collect, [HELD, *range(1, 200)])
        assert server.call(wait_until_computing)
        for client in clients[1:]:
            client.begin(submit_and_collect, list(range(1, 200)))
        server.begin(shut_down_while_computing)
        for client in clients:
            found = client.outcome(10.0).get()
            assert set(found) <= {"reply", "ServerClosedError"}
            assert "ServerClosedError" in found
        server.outcome(10.0).get()


def shut_down_while_computing(station: Any) -> None:
    """Let the held batch end only when the shutdown has begun."""
    release = threading.Timer(0.5, station.policy.go_on.set)
    release.start()
    station.server.shutdown(5.0)
    release.join()


@pytest.mark.parametrize("inline", [True, False])
def test_the_batch_that_is_being_computed_is_answered(inline: bool) -> None:
    policy = Doubler()
    with serving(policy, inline=inline) as server, crew(3) as (client, *others):
        for worker in (client, *others):
            worker.call(connect, port_of(server))
        client.begin(query, HELD)
        assert policy.computing.wait(SECONDS)
        for other in others:
            other.begin(query, 2)
        # Inline, the thread that computes may be the one that receives from one of the others.
        assert wait_until(lambda: server.transport.num_waiting > 0, SECONDS)
        stopping = threading.Thread(target=server.shutdown)
        stopping.start()
        assert wait_until(lambda: server._closed, SECONDS)
        policy.go_on.set()
        client.outcome(10.0).get()
        for other in others:
            error = other.outcome(10.0).error  # a reply, if it was served before the end was known
            assert error is None or isinstance(error, ServerClosedError)
        stopping.join(SECONDS)
        assert not stopping.is_alive()


@pytest.mark.parametrize("inline", [True, False])
def test_a_policy_that_is_stuck_is_reported_and_its_clients_are_told(inline: bool) -> None:
    policy = Doubler()
    with serving(policy, inline=inline) as server, crew(3) as (client, *others):
        for worker in (client, *others):
            worker.call(connect, port_of(server))
        client.begin(query, HELD)
        assert policy.computing.wait(SECONDS)
        for other in others:
            other.begin(query, 1)
        assert wait_until(lambda: server.transport.num_waiting > 0, SECONDS)
        began = time.monotonic()
        with pytest.raises(TimeoutError, match="still computing"):
            server.shutdown(0.5)
        assert time.monotonic() - began < 8.0
        for worker in (client, *others):
            assert isinstance(worker.outcome(5.0).error, ServerClosedError | PeerLostError)
        policy.go_on.set()


def test_requests_after_the_end_raise_at_once() -> None:
    policy = Doubler()
    with crew(1) as (worker,):
        with serving(policy) as server:
            client, late = server.client(), server.client()
            ask(client, 1)
            worker.call(connect, port_of(server))
        for user in (client, late):
            began = time.monotonic()
            with pytest.raises((ServerClosedError, PeerLostError, TimeoutError)):
                user(request(1), 1.5)
            assert time.monotonic() - began < 4.5
        began = time.monotonic()
        with pytest.raises(ServerClosedError):
            ask(client, 1)
        assert time.monotonic() - began < 1.0
        worker.begin(query, 1)
        outcome = worker.outcome(10.0)
        assert isinstance(outcome.error, ServerClosedError)
        assert outcome.seconds < 1.0
        for user in (client, late):
            user.close()
            with pytest.raises(ClosedError):
                ask(user, 1)
        with pytest.raises(ClosedError):
            server.client()
        with pytest.raises(ClosedError):
            server.start()
        server.shutdown()


def test_a_server_restarted_on_the_same_port_serves_new_clients() -> None:
    port = 0
    for _ in range(5):
        with serving(Doubler(), port=port) as server, server.client() as client:
            port = port_of(server)
            ask(client, 1, SECONDS)


def test_serve_returns_when_every_client_has_come_and_left() -> None:
    with serving(Doubler()) as server, crew(3) as workers:
        for worker in workers[:2]:
            worker.call(connect, port_of(server))
        with pytest.raises(TimeoutError, match="clients"):
            server.serve(timeout=0.2)
        workers[0].kill()
        workers[1].call(leave)
        server.serve(timeout=5.0)
        with pytest.raises(TimeoutError):
            server.serve(num_clients=3, timeout=0.2)
        workers[2].call(connect, port_of(server))
        workers[2].kill()
        server.serve(num_clients=3, timeout=5.0)


def test_a_loaded_server_shuts_down_at_once() -> None:
    with serving(Doubler()) as server, crew(3) as workers:
        for who, worker in enumerate(workers):
            worker.call(connect, port_of(server), who=who)
            worker.begin(query_again_and_again)
        began = time.monotonic()
        server.shutdown()
        assert time.monotonic() - began < 5.0
        for worker in workers:
            assert isinstance(worker.outcome(5.0).error, ServerClosedError)


def test_a_stopped_client_does_not_hold_up_a_shutdown() -> None:
    policy = Doubler()
    with serving(policy) as server, crew(1) as (client,):
        client.call(connect, port_of(server))
        client.begin(query_again_and_again)
        assert policy.has_served(0)
        client.signal(signal.SIGSTOP)
        began = time.monotonic()
        server.shutdown()
        assert time.monotonic() - began < 8.0
        client.signal(signal.SIGCONT)
        assert isinstance(client.outcome(10.0).error, ServerClosedError | PeerLostError)


def test_shutting_down_twice_and_from_several_threads_is_one_shutdown() -> None:
    with serving(Doubler()) as server, server.client() as client:
        ask(client, 1)
        threads = [threading.Thread(target=server.shutdown) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        assert not any(thread.is_alive() for thread in threads)
        assert not server.is_alive
        with pytest.raises(ServerClosedError):
            ask(client, 1)


def test_shut_down_by_a_worker_ends_both_sides() -> None:
    with crew(2) as (server, client):
        port = server.call(serve)
        client.call(connect, port)
        server.call(shut_down)
        client.begin(query, 1)
        assert isinstance(client.outcome(10.0).error, ServerClosedError)


def test_requests_that_arrive_while_a_server_closes_do_not_hold_up_its_goodbye(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    transport = DistributedTransport(request(0), request(0))
    with transport.client() as client:
        first = client.submit(request(1))
        assert transport.wait_for_work(SECONDS)
        transport.resolve(transport.drain(1)[1][0], request(1))
        first.result(SECONDS)
        arrived, said = threading.Event(), threading.Event()
        cut: list[Any] = []
        ready, close, abort = Reception.ready, Session.close, Session.abort

        def late(reception: Reception, received: Any) -> None:
            arrived.set()
            assert said.wait(SECONDS)
            ready(reception, received)

        def closing(session: Session) -> None:
            for number in range(2):
                client.submit(request(number))
            assert arrived.wait(SECONDS)
            close(session)
            said.set()

        def cutting(session: Session, *kind: Any) -> None:
            cut.append(session)
            abort(session, *kind)

        monkeypatch.setattr(Reception, "ready", late)
        monkeypatch.setattr(Session, "close", closing)
        monkeypatch.setattr(Session, "abort", cutting)
        transport.close()
        assert cut == []
