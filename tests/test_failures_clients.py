"""Clients that die, freeze, come back, or give up: what the server and the other clients notice."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from failure_roles import (
    HELD,
    SECONDS,
    SPOILED,
    WHO,
    Doubler,
    Held,
    Worker,
    ask,
    check,
    client_at,
    connect,
    crew,
    keep_in_flight,
    leave,
    port_of,
    query,
    query_again_and_again,
    request,
    serving,
    store_keys,
)
from support import no_more, wait_until

from meshinfer import PeerLostError, TransportError
from meshinfer.inference.distributed import DistributedClient, reception
from meshinfer.inference.distributed import client as client_module
from meshinfer.inference.distributed.join import (
    _EXCHANGES,
    JOIN_QUEUE,
    Hello,
    Identity,
    answer_queue,
    seal,
)
from meshinfer.inference.distributed.pair import CLIENT, SERVER
from meshinfer.inference.distributed.reception import Reception
from meshinfer.rendezvous import connect_store

OTHERS = (1, 2)
RANK = 7
LONG = 600.0
"""Seconds for a join that never ends by itself in a test."""


def put_in_flight(victim: Worker, policy: Doubler, pumping: bool) -> None:
    """Have ``victim`` wait for a reply: one of many, or one that is being computed."""
    if pumping:
        victim.begin(keep_in_flight, 4)
        assert policy.has_served(RANK, timeout=SECONDS)
    else:
        victim.begin(query, HELD)
        assert policy.computing.wait(SECONDS)
        policy.computing.clear()


@pytest.mark.slow
@pytest.mark.parametrize("inline", [True, False])
def test_a_killed_client_is_replaced_again_and_again_while_the_others_go_on(inline: bool) -> None:
    policy = Doubler()
    with serving(policy, inline=inline) as server, crew(len(OTHERS)) as workers:
        for who, other in zip(OTHERS, workers, strict=True):
            other.call(connect, port_of(server), who=who)
            other.begin(query_again_and_again)
        after_first: Held | None = None
        for round_ in range(8):
            victim = Worker()
            workers.append(victim)
            victim.call(connect, port_of(server), who=RANK, rank=RANK)
            pumping = round_ % 2 == 0
            put_in_flight(victim, policy, pumping)
            victim.kill()
            policy.go_on.set()
            for who in OTHERS:
                assert policy.has_served(who, timeout=SECONDS), (
                    f"client {who} starves in round {round_}"
                )
            policy.go_on.clear()
            workers.remove(victim)
            victim.close()
            assert wait_until(lambda: server.stats().clients == len(OTHERS), SECONDS)
            if round_ == 1:
                after_first = Held.by(server)
        assert after_first is not None
        assert wait_until(lambda: no_more(astuple(Held.by(server)), astuple(after_first)), SECONDS)
        for other in workers:
            other.tell()
            count, longest = other.outcome().get()
            assert count > 20
            assert longest < SECONDS


def test_a_killed_client_that_the_server_has_not_missed_yet_is_replaced() -> None:
    """The old session is still there, idle, when the new one of the same rank comes."""
    policy = Doubler()
    with serving(policy) as server, crew(2) as (old, new):
        old.call(connect, port_of(server), who=RANK, rank=RANK)
        old.signal(signal.SIGSTOP)
        new.call(connect, port_of(server), who=RANK, rank=RANK)
        assert server.stats().clients == 1
        new.call(query, 5)
        old.kill()
        new.call(query, 6)


def test_serve_waits_for_an_expected_rank_that_was_killed() -> None:
    """Whoever starts it again must not find that the server has ended as if all were done."""
    with serving(Doubler(), expected_ranks=[RANK]) as server, crew(2) as (old, new):
        old.call(connect, port_of(server), who=RANK, rank=RANK)
        old.kill()
        assert wait_until(lambda: server.stats().clients == 0, SECONDS)
        with pytest.raises(TimeoutError):
            server.serve(timeout=0.3)
        new.call(connect, port_of(server), who=RANK, rank=RANK)
        new.call(leave)
        server.serve(timeout=SECONDS)


def test_serve_gives_up_an_expected_rank_that_does_not_come_back() -> None:
    with (
        mock.patch.object(reception, "_RETURN_SECONDS", 0.3),
        serving(Doubler(), expected_ranks=[RANK]) as server,
        crew(1) as (victim,),
    ):
        victim.call(connect, port_of(server), who=RANK, rank=RANK)
        victim.kill()
        lost = rf"rank {RANK} was lost and has not come back within 0\.3 s.*(closed|reset) by peer"
        with pytest.raises(PeerLostError, match=lost):
            server.serve(timeout=SECONDS)


@pytest.mark.parametrize("connected", [True, False])
@pytest.mark.parametrize(
    ("kind", "why"), [(RuntimeError, "boom"), (SystemExit, 3), (SystemExit, 0)]
)
def test_a_rank_whose_work_ends_with_an_exception_counts_as_lost(
    kind: type[BaseException], why: object, connected: bool
) -> None:
    """Whatever starts it again must find the server; a rank that has done its work has left."""
    with (
        mock.patch.object(reception, "_RETURN_SECONDS", 0.2),
        mock.patch.object(client_module, "_GOODBYE_SECONDS", SECONDS),
        serving(Doubler(), expected_ranks=[RANK]) as server,
    ):
        with pytest.raises(kind):
            _work_until(kind(why), client_at(port_of(server), rank=RANK), connected)
        if why == 0:
            server.serve(timeout=SECONDS)
        else:
            with pytest.raises(PeerLostError, match=f"rank {RANK} .* an exception ended its work"):
                server.serve(timeout=SECONDS)


def _work_until(failure: BaseException, client: DistributedClient, connected: bool) -> None:
    with client:
        if connected:
            client(request(1))
        raise failure


@pytest.mark.parametrize("inline", [True, False])
def test_a_stopped_client_holds_nobody_up_and_learns_that_it_was_replaced(inline: bool) -> None:
    policy = Doubler()
    with serving(policy, inline=inline) as server, crew(3) as (old, other, new):
        port = port_of(server)
        old.call(connect, port, who=RANK, rank=RANK)
        other.call(connect, port, who=1)
        put_in_flight(old, policy, pumping=False)
        old.signal(signal.SIGSTOP)
        policy.go_on.set()
        for n in range(20):
            other.call(query, WHO + n)
        new.call(connect, port, who=RANK, rank=RANK)
        new.call(query, 3)
        assert server.stats().clients == 2
        old.signal(signal.SIGCONT)
        error = old.outcome().error
        old.begin(query, 4)
        later = old.outcome().error
        new.call(query, 5)
    # Its reply had been sent before it was replaced, so that request may have been answered.
    assert error is None or isinstance(error, PeerLostError)
    assert isinstance(later, PeerLostError)
    assert "newer session" in str(later)


def test_a_client_that_is_stopped_before_its_reply_raises_when_it_was_replaced() -> None:
    policy = Doubler()
    with serving(policy) as server, crew(2) as (old, new):
        port = port_of(server)
        old.call(connect, port, who=RANK, rank=RANK)
        put_in_flight(old, policy, pumping=False)
        old.signal(signal.SIGSTOP)
        new.begin(connect, port, who=RANK, rank=RANK)
        assert wait_until(lambda: server.transport.num_waiting == 1, SECONDS)
        old.signal(signal.SIGCONT)
        error = old.outcome().error
        policy.go_on.set()
        new.outcome().get()
    assert isinstance(error, PeerLostError)
    assert "newer session" in str(error)


def test_a_stopped_client_goes_on_after_a_pause() -> None:
    policy = Doubler()
    with serving(policy) as server, crew(2) as (paused, other):
        paused.call(connect, port_of(server), who=1)
        other.call(connect, port_of(server), who=2)
        paused.begin(query_again_and_again)
        assert policy.has_served(1, timeout=SECONDS)
        paused.signal(signal.SIGSTOP)
        for n in range(50):
            other.call(query, n)
        paused.signal(signal.SIGCONT)
        assert policy.has_served(1, timeout=SECONDS)
        paused.tell()
        paused.outcome().get()


# Clients that die while they join.


def vanish(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_while_joining(station: SimpleNamespace, port: int, owner: str, name: str) -> None:
    """Killed by the kernel where a join calls ``owner.name``."""
    with mock.patch.object(getattr(client_module, owner), name, vanish):
        connect(station, port, rank=RANK)


@pytest.mark.parametrize(
    ("owner", "name"),
    [("Joining", "build_pair"), ("DistributedClient", "_prove"), ("Pair", "__init__")],
    ids=["between hello and pair", "between pair and proof", "at the pair"],
)
def test_a_client_that_dies_half_joined_delays_nobody_and_leaves_no_key(
    owner: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Doubler()
    nonces = noted_nonces(monkeypatch)
    with serving(policy) as server, crew(3) as (victim, other, newcomer):
        other.call(connect, port_of(server), who=1)
        # Whoever waits at the new pair is told by gloo; the others have to see their time run out.
        with joining_within(SECONDS if name == "_prove" else 1.0):
            victim.begin(die_while_joining, port_of(server), owner, name)
            assert wait_until(lambda: not victim.process.is_alive(), SECONDS)
        other.call(query, 1)
        newcomer.call(connect, port_of(server), rank=RANK)
        newcomer.call(query, 2)
        assert wait_until(lambda: not server.transport._reception._attendance.joining, SECONDS)
        assert server.stats().clients == 2
        assert len(nonces) == 3
        assert not left_in_store(server, nonces)


@contextmanager
def joining_within(seconds: float) -> Iterator[None]:
    """So long the next client has to join, at servers of this process; all others have the time they had."""
    start, started = Reception._start_session, []

    def start_session(reception: Reception, hello: Hello) -> None:
        kept = reception._join_timeout
        reception._join_timeout = kept if started else seconds
        started.append(hello)
        try:
            start(reception, hello)
        finally:
            reception._join_timeout = kept

    with mock.patch.object(Reception, "_start_session", start_session):
        yield


def noted_nonces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The nonce of each hello that a server of this process receives from now on."""
    nonces: list[str] = []
    original = Hello.from_json

    def noting(fields: Any) -> Hello:
        hello = original(fields)
        nonces.append(hello.nonce)
        return hello

    monkeypatch.setattr(Hello, "from_json", noting)
    return nonces


def left_in_store(server: Any, nonces: list[str]) -> list[str]:
    """Queues of these joins that still exist. A store does not list its queues, so it is asked for each."""
    address = server.transport.address
    store = connect_store(address.host, address.port, SECONDS, awaited="the server")
    queues = [answer_queue(nonce) for nonce in nonces]
    for nonce, name, side in product(nonces, _EXCHANGES, (SERVER, CLIENT)):
        queues.append(f"pair/{nonce}/{name}/{side}")
    return [name for name in queues if store.queue_len(name)] + store_keys(server)


def push_hello(reception: Reception, identity: Identity) -> str:
    """A hello as a real client seals it, from somebody who then does nothing; its nonce."""
    hello = Hello.of(identity, reception.request_layout, reception.response_layout)
    address = reception.address
    store = connect_store(address.host, address.port, SECONDS, awaited="the server")
    store.queue_push(JOIN_QUEUE, seal(address.secret, "hello", hello.to_json()))
    return hello.nonce


def test_many_half_joined_clients_freeze_neither_joins_nor_exceptions() -> None:
    policy = Doubler()
    with serving(policy) as server, server.client() as early:
        ask(early, 1)
        reception = server.transport._reception
        threads = Held.by(server).threads
        reception._join_timeout = LONG
        nonces = [push_hello(reception, Identity(100 + index)) for index in range(20)]
        with server.client() as late:
            ask(late, 2, SECONDS)
            for client in (early, late):
                with pytest.raises(ValueError, match="spoiled"):
                    client(request(SPOILED), SECONDS)
                ask(client, 3, SECONDS)
        assert wait_until(lambda: len(reception._attendance.joining) == 20, SECONDS)
        for session in list(reception._attendance.joining):
            assert session._joining is not None
            session._joining.give_up("gloo")
        assert wait_until(lambda: not reception._attendance.joining, SECONDS)
        assert not left_in_store(server, nonces)
        assert wait_until(lambda: Held.by(server).threads <= threads, SECONDS)


def test_a_half_joined_rank_joins_at_once_when_it_comes_again() -> None:
    with serving(Doubler()) as server, crew(1) as (again,):
        server.transport._reception._join_timeout = LONG
        push_hello(server.transport._reception, Identity(RANK))
        again.call(connect, port_of(server), rank=RANK)
        again.call(query, 1)


def test_a_server_with_half_joined_clients_shuts_down_at_once() -> None:
    with serving(Doubler()) as server:
        reception = server.transport._reception
        reception._join_timeout = LONG
        for index in range(5):
            push_hello(reception, Identity(index))
        assert wait_until(lambda: len(reception._attendance.joining) == 5, SECONDS)
        began = time.monotonic()
        server.shutdown()
        assert time.monotonic() - began < SECONDS


# Clients that give up.


def test_a_cancelled_request_disturbs_nobody() -> None:
    policy = Doubler()
    with serving(policy) as server, server.client() as client, server.client() as other:
        ask(client, 1)
        ask(other, 1)
        computed = client.submit(request(HELD))
        assert policy.computing.wait(SECONDS)
        on_the_wire = client.submit(request(2))
        queued = client.submit(request(3))
        for future in (computed, on_the_wire, queued):
            assert future.cancel()
            assert future.done()
            with pytest.raises(TransportError, match="cancelled"):
                future.result()
        policy.go_on.set()
        for n in range(10):
            ask(client, n, SECONDS)
            ask(other, n, SECONDS)
        assert client.in_flight == 0


def test_requests_given_up_leave_nothing_behind_and_never_answer_a_later_one() -> None:
    class Slow(Doubler):
        def __call__(self, batch: Any) -> Any:
            if self.computing.is_set():
                assert self.go_on.wait(SECONDS)
            return super().__call__(batch)

    policy = Slow()
    with serving(policy) as server, server.client() as client:
        ask(client, 0)
        policy.computing.set()
        for n in range(100):
            policy.go_on.clear()  # whatever is computed from here on waits until this request is given up
            with pytest.raises(TimeoutError):
                client(request(n), timeout=0.002)
            policy.go_on.set()
        policy.computing.clear()
        for n in range(300):
            ask(client, 1000 + n, SECONDS)
        assert client.in_flight == 0


def test_a_timed_out_result_can_be_asked_for_again() -> None:
    policy = Doubler()
    with serving(policy) as server, server.client() as client:
        ask(client, 0)
        future = client.submit(request(HELD))
        for _ in range(3):
            with pytest.raises(TimeoutError):
                future.result(0.05)
        policy.go_on.set()
        check(future.result(SECONDS), HELD)
        ask(client, 1)


def test_an_incarnation_never_gets_the_reply_of_the_one_before() -> None:
    policy = Doubler()
    with serving(policy) as server, crew(2) as (old, new):
        old.call(connect, port_of(server), who=RANK, rank=RANK)
        put_in_flight(old, policy, pumping=False)
        old.kill()
        new.begin(connect, port_of(server), who=RANK, rank=RANK)
        policy.go_on.set()
        new.outcome().get()
        for n in range(20):
            new.call(query, n)


@pytest.mark.parametrize("closing", ["close", "collect"])
def test_a_client_that_leaves_with_requests_in_flight_disturbs_nobody(closing: str) -> None:
    policy = Doubler()
    with serving(policy) as server, server.client() as other:
        ask(other, 0)
        client = server.client()
        ask(client, 0)
        futures = [client.submit(request(HELD))] + [client.submit(request(n)) for n in range(5)]
        assert policy.computing.wait(SECONDS)
        leave: Callable[[], None] = client.close if closing == "close" else lambda: None
        leave()
        if closing == "collect":
            futures.clear()
            del client, leave
        for future in futures:
            assert future.done()
            with pytest.raises(TransportError, match="closed"):
                future.result()
        policy.go_on.set()
        ask(other, 1, SECONDS)
        assert wait_until(lambda: server.stats().clients == 1, SECONDS)
