"""A server that dies, freezes or shuts down: what its clients get, and when."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any
from unittest import mock

import pytest
from failure_roles import (
    HELD,
    SECONDS,
    Doubler,
    ask,
    collect,
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
    submit,
    submit_and_collect,
    wait_until_computing,
)
from support import unused_port, wait_until

from meshinfer import (
    ClosedError,
    DistributedClient,
    DistributedTransport,
    PeerLostError,
    ServerClosedError,
)
from meshinfer.inference.distributed import client as client_module
from meshinfer.inference.distributed.reception import Reception
from meshinfer.inference.distributed.session import Session

LARGE = 1 << 20
"""int64 values: 8 MiB, more than sockets buffer."""
LONG = 600.0
"""Seconds that no test has."""


@pytest.fixture
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers of this process wait for goodbyes however long they take."""
    monkeypatch.setattr(Reception.close, "__defaults__", (SECONDS,))


def test_every_client_of_a_killed_server_raises_at_once() -> None:
    """Without a deadline, with one, and for requests that have not left: long before their patience ends."""
    with crew(5) as (server, *clients):
        port = server.call(serve, max_batch_size=1)
        for who, client in enumerate(clients):
            client.call(connect, port, who=who)
        clients[0].call(submit, [HELD])
        assert server.call(wait_until_computing)
        for client, count in zip(clients[1:], (1, 10, 10), strict=True):
            client.call(submit, [1] * count)
        for client, timeout in zip(clients, (None, 60.0, None, 60.0), strict=True):
            client.begin(collect, timeout)
        server.kill()
        found = [client.outcome().get() for client in clients]
        assert found == [["PeerLostError"] * count for count in (1, 1, 10, 10)]


def test_a_client_of_a_killed_server_finds_the_next_one_at_the_same_place() -> None:
    port = unused_port()
    with crew(3) as (server, successor, client):
        server.call(serve, port=port)
        client.call(connect, port)
        server.kill()
        client.begin(query, 1)
        assert isinstance(client.outcome().error, PeerLostError | TimeoutError)
        successor.call(serve, port=port)
        client.call(query, 2)


def test_calls_after_the_server_was_killed_do_not_hang() -> None:
    with crew(2) as (server, client):
        port = server.call(serve)
        client.call(connect, port)
        client.call(wait_for_others, returning=LONG, asking=LONG)
        server.kill()
        for _ in range(2):
            client.begin(query, 1, timeout=1.0)
            assert isinstance(client.outcome().error, PeerLostError | TimeoutError)


@pytest.mark.slow
def test_a_stopped_server_is_noticed_at_the_deadline_and_serves_on_afterwards() -> None:
    with crew(4) as (server, with_deadline, without, large):
        port = server.call(serve, width=LARGE)
        for client in (with_deadline, without, large):
            patience = 1.5 if client is without else LONG
            client.call(connect, port, width=LARGE, timeout=patience, first=None)
            client.call(query, 1, timeout=SECONDS)
        without.call(wait_for_others, asking=3.0)
        server.signal(signal.SIGSTOP)
        with_deadline.begin(query, 1, timeout=1.0)
        large.begin(submit_and_collect, [1] * 5, timeout=0.5)  # more than the wire takes
        without.begin(query, 1)
        outcome = with_deadline.outcome()
        assert isinstance(outcome.error, TimeoutError)
        assert outcome.seconds > 0.9
        assert large.outcome().get() == ["TimeoutError"] * 5
        with_deadline.begin(query, 1, timeout=0.5)  # a second call does not wait behind the first
        assert isinstance(with_deadline.outcome().error, TimeoutError)
        outcome = without.outcome()
        assert isinstance(outcome.error, PeerLostError)
        assert "not answer" in str(outcome.error)
        server.signal(signal.SIGCONT)
        with_deadline.call(query, 2, timeout=SECONDS)
        without.call(query, 3, timeout=SECONDS)


def wait_for_others(station: Any, *, asking: float, returning: float = 5.0) -> None:
    """At a client: so long for a sign of life, and for a server that was lost to come back."""
    client_module._PROBE_SECONDS, client_module._RETURN_SECONDS = asking, returning


def test_a_client_that_joins_a_stopped_server_keeps_its_deadline() -> None:
    with crew(2) as (server, client):
        port = server.call(serve)
        server.signal(signal.SIGSTOP)
        client.call(connect, port, first=None)
        client.begin(query, 1, timeout=1.0)
        assert isinstance(
            client.outcome().error, TimeoutError
        )  # not after the 60 s of its transport
        server.signal(signal.SIGCONT)
        client.call(query, 2, timeout=SECONDS)


def test_a_slow_policy_is_not_a_dead_server() -> None:
    """A waiter without a deadline asks for a sign of life again and again, and waits on."""
    with crew(2) as (server, client):
        port = server.call(serve)
        client.call(connect, port, timeout=0.5, first=None)
        client.call(query, 1, timeout=SECONDS)
        client.begin(query, HELD)
        assert server.call(wait_until_computing)
        with pytest.raises(AssertionError, match="no outcome"):
            client.outcome(1.3)
        server.call(go_on)
        client.outcome().get()


def test_idling_is_never_a_timeout() -> None:
    with serving(Doubler(), timeout=0.8) as server, server.client() as client:
        assert wait_until(lambda: joined(client), SECONDS)
        assert not wait_until(lambda: server.stats().clients == 0, 2.0)
        ask(client, 2)
        ask(client, 3, SECONDS)


def joined(client: DistributedClient) -> bool:
    """Whether it has: a server gives it its own timeout, which may be too little on a busy machine."""
    try:
        client(request(1), SECONDS)
    except (TimeoutError, PeerLostError):
        return False
    return True


# Shutting down.


def test_every_queued_request_is_answered_or_told_that_the_server_has_closed() -> None:
    with crew(4) as (server, *clients):
        port = server.call(serve, max_batch_size=2)
        for client in clients:
            client.call(connect, port)
        clients[0].call(submit, [HELD, *range(1, 200)])
        assert server.call(wait_until_computing)
        for client in clients[1:]:
            client.call(submit, list(range(1, 200)))
        server.begin(shut_down_while_computing)
        for client in clients:
            client.begin(collect)
            found = client.outcome().get()
            assert set(found) <= {"reply", "ServerClosedError"}
            assert "ServerClosedError" in found
        server.outcome().get()


def shut_down_while_computing(station: Any) -> None:
    """Let the held batch end only when the shutdown has begun."""
    Reception.close.__defaults__ = (SECONDS,)
    stopping = threading.Thread(target=station.server.shutdown, args=(SECONDS,))
    stopping.start()
    assert wait_until(lambda: station.server._batcher._stopping, SECONDS)
    station.policy.go_on.set()
    stopping.join()


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
        stopping = threading.Thread(target=server.shutdown, args=(SECONDS,))
        stopping.start()
        assert wait_until(lambda: server._closed, SECONDS)
        policy.go_on.set()
        client.outcome().get()
        for other in others:
            error = other.outcome().error  # a reply, if it was served before the end was known
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
        assert time.monotonic() - began < SECONDS / 2, "it waited until the policy was done"
        for worker in (client, *others):
            assert isinstance(worker.outcome().error, ServerClosedError | PeerLostError)
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
            assert time.monotonic() - began < SECONDS
        closed = pytest.raises(ServerClosedError)
        with mock.patch.object(client_module, "connect_store", look_for_it), closed:
            ask(client, 1)
        worker.begin(query_without_looking, 1)
        assert isinstance(worker.outcome().error, ServerClosedError)
        for user in (client, late):
            user.close()
            with pytest.raises(ClosedError):
                ask(user, 1)
        with pytest.raises(ClosedError):
            server.client()
        with pytest.raises(ClosedError):
            server.start()
        server.shutdown()


def look_for_it(*_: object, **__: object) -> None:
    raise AssertionError("nobody should look for a server that has said goodbye")


def query_without_looking(station: Any, value: int) -> None:
    with mock.patch.object(client_module, "connect_store", look_for_it):
        query(station, value)


def test_a_server_restarted_on_the_same_port_serves_new_clients() -> None:
    port = unused_port()
    for _ in range(5):
        with serving(Doubler(), port=port) as server, server.client() as client:
            assert port_of(server) == port
            ask(client, 1, SECONDS)


def test_serve_returns_when_every_client_has_come_and_left() -> None:
    with serving(Doubler()) as server, crew(3) as workers:
        for worker in workers[:2]:
            worker.call(connect, port_of(server))
        with pytest.raises(TimeoutError, match="clients"):
            server.serve(timeout=0.2)
        workers[0].kill()
        workers[1].call(leave)
        server.serve(timeout=SECONDS)
        with pytest.raises(TimeoutError):
            server.serve(num_clients=3, timeout=0.2)
        workers[2].call(connect, port_of(server))
        workers[2].kill()
        server.serve(num_clients=3, timeout=SECONDS)


@pytest.mark.usefixtures("unhurried")
def test_a_loaded_server_shuts_down_at_once() -> None:
    with serving(Doubler()) as server, crew(3) as workers:
        for who, worker in enumerate(workers):
            worker.call(connect, port_of(server), who=who)
            worker.begin(query_again_and_again)
        began = time.monotonic()
        server.shutdown()
        assert time.monotonic() - began < SECONDS, "somebody did not say goodbye"
        for worker in workers:
            assert isinstance(worker.outcome().error, ServerClosedError)


def test_a_stopped_client_does_not_hold_up_a_shutdown() -> None:
    policy = Doubler()
    with serving(policy) as server, crew(1) as (client,):
        client.call(connect, port_of(server))
        client.begin(query_again_and_again)
        assert policy.has_served(0, timeout=SECONDS)
        client.signal(signal.SIGSTOP)
        began = time.monotonic()
        server.shutdown()
        assert time.monotonic() - began < SECONDS
        client.signal(signal.SIGCONT)
        assert isinstance(client.outcome().error, ServerClosedError | PeerLostError)


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
        assert isinstance(client.outcome().error, ServerClosedError)


@pytest.mark.usefixtures("unhurried")
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
