"""Rows that follow their headers, over gloo: who may do what when, and what a death in between does.

Every channel is audited, see ``announced_audit``, in this process and in those of its clients and servers. Most are
deaf: they do not notice by themselves that the other end has gone, as channels of NCCL do not.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from announced_audit import Breach, Ledger, auditing
from announced_mischief import DEAF, Mischief, released
from announced_roles import (
    NEIGHBOUR,
    RANK,
    Doubler,
    ask,
    await_stop,
    begin_neighbour,
    check,
    client_at,
    connect,
    end_neighbour,
    hasten,
    leave,
    ledgers,
    planes_of,
    query,
    request,
    serve,
    serving,
    stop_at,
    thaw,
)
from announced_storm import no_more, weather
from failure_roles import SECONDS, Held, Worker, crew, port_of
from support import wait_until
from tensordict import TensorDictBase

from meshinfer import DistributedTransport, PeerLostError, ServerClosedError
from meshinfer.inference.distributed.announced import AnnouncedRows
from meshinfer.inference.distributed.pair import Pair
from meshinfer.inference.distributed.reception import Reception
from meshinfer.streams import PASSED

SLOW = 77
JOIN_SECONDS = 30.0
"""The longest that a server gives a client to join."""
SOON = 1.0
"""For rows to arrive, where the test waits for that to run out."""
TURNS = ("sending", "posting")
"""After a header has left and before its row has; after a header has come and before its row is awaited."""


@pytest.fixture
def report(tmp_path: Path) -> Iterator[str]:
    with auditing(tmp_path) as path:
        yield str(path)


# Clients that die or freeze.


@pytest.mark.parametrize("at", TURNS)
def test_a_client_killed_between_a_header_and_its_row_is_replaced(at: str, report: str) -> None:
    policy = Doubler()
    with serving(policy, DEAF) as server, crew(2) as workers:
        neighbour, victim = workers
        begin_neighbour(neighbour, report, server)
        stop_at(at, victim, report, server)
        assert policy.has_served(NEIGHBOUR)
        victim.kill()
        assert wait_until(lambda: server.stats().clients == 1, SECONDS)
        workers.append(Worker())
        workers[-1].call(connect, report, port_of(server), RANK, rank=RANK)
        workers[-1].call(query, 3)
        end_neighbour(neighbour)


@pytest.mark.parametrize("at", TURNS)
def test_a_frozen_client_is_given_up_and_may_come_back(
    at: str, report: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It does not send the row that it has announced, or does not take its reply."""
    policy = Doubler()
    with serving(policy, DEAF) as server, crew(2) as (neighbour, victim):
        begin_neighbour(neighbour, report, server)
        stop_at(at, victim, report, server)
        assert policy.has_served(NEIGHBOUR)
        (plane,) = planes_of(server, RANK)
        assert plane._timeout == server.transport.timeout
        hasten(plane, SOON)
        assert wait_until(lambda: server.stats().clients == 1, SECONDS)
        assert f"did not get through within {SOON:g} s" in caplog.text
        assert policy.has_served(NEIGHBOUR)
        thaw(victim.pid)
        with pytest.raises(PeerLostError):
            victim.outcome().get()
        victim.call(query, 3)
        end_neighbour(neighbour)


def test_a_frozen_client_that_was_replaced_does_not_come_back(report: str) -> None:
    """The word that it was replaced lies behind a row that never comes."""
    with serving(None, DEAF) as server, crew(2) as (old, new):
        stop_at("posting", old, report, server)
        new.call(connect, report, port_of(server), RANK, rank=RANK)
        thaw(old.pid)
        for _ in range(2):
            with pytest.raises(PeerLostError, match="a newer session"):
                old.outcome().get()
            old.begin(query, 3)
        new.call(query, 4)


def test_a_row_that_is_merely_late_is_waited_for(
    report: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Until the watch has looked; both ways."""
    looks: list[Pair] = []

    def look(pair: Pair, probe: Any = Pair.probe) -> None:
        probe(pair)
        looks.append(pair)
        released.set()

    monkeypatch.setattr(Pair, "probe", look)
    # Acts of both sides are counted together: the first row is that of a request, the fourth that of a reply.
    first, fourth = (Mischief(at="sending", what="hang", skip=skip) for skip in (0, 3))
    with serving(None, fourth) as server, client_at(port_of(server), first) as client:
        for number in range(2):
            looks.clear()
            released.clear()
            ask(client, number)
            assert looks
        assert server.stats().clients == 1
    assert "was lost" not in caplog.text


def test_a_row_arrives_while_the_policy_computes_for_the_same_client(report: str) -> None:
    """Who computes must not be who has to receive what the same client has announced meanwhile."""
    go_on = threading.Event()

    def slow(batch: TensorDictBase) -> TensorDictBase:
        if SLOW in batch["x"]:
            assert go_on.wait(2 * SECONDS)
        return Doubler()(batch)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with more, a thread that receives never computes
    try:
        before = ledgers()
        with serving(slow) as server, client_at(port_of(server)) as client:
            ask(client, 1)
            both = [each for each in ledgers() if each not in before]
            values = (SLOW, 2, 3)
            futures = [client.submit(request(value)) for value in values]
            arrived = wait_until(lambda: any(each.arrived == 3 for each in both), SECONDS)
            go_on.set()
            assert arrived
            for future, value in zip(futures, values, strict=True):
                check(future.result(SECONDS), value)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("channel", [0, 1])
def test_a_client_killed_while_its_channels_are_built_is_given_up(
    channel: int, report: str
) -> None:
    with serving(timeout=JOIN_SECONDS) as server, crew(2) as (neighbour, victim):
        neighbour.call(connect, report, port_of(server), NEIGHBOUR)
        stopped = Mischief(at="building", what="stop", skip=channel)
        victim.begin(connect, report, port_of(server), RANK, stopped)
        await_stop(victim)
        victim.kill()
        neighbour.call(query, 2)
        neighbour.call(leave)
        assert isinstance(server.transport, DistributedTransport)
        assert server.transport.wait_until_left(1, timeout=JOIN_SECONDS / 2)


def test_a_client_killed_while_replies_are_prepared_leaves_no_thread_behind(
    report: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the session notices before the watch does, the thread that builds for it ends all the same."""
    monkeypatch.setattr(AnnouncedRows, "look", lambda *_: None)
    before = set(threading.enumerate())

    def building() -> bool:
        new = set(threading.enumerate()) - before
        return any(thread.name == "meshinfer-rows" for thread in new)

    with serving(timeout=JOIN_SECONDS) as server, crew(1) as (victim,):
        stopped = Mischief(at="building", what="stop", skip=1)
        victim.begin(connect, report, port_of(server), RANK, stopped)
        await_stop(victim)
        assert wait_until(building, SECONDS)
        victim.kill()
        assert wait_until(lambda: not building(), JOIN_SECONDS / 2)


def test_many_clients_that_die_leave_nothing_at_the_server(report: str) -> None:
    held: list[Held] = []
    with serving(None, DEAF) as server:
        for round_ in range(6):
            with crew(1) as (victim,):
                stop_at(TURNS[round_ % 2], victim, report, server)
                victim.kill()
                assert wait_until(lambda: server.stats().clients == 0, SECONDS)
            held.append(Held.by(server))
        assert wait_until(lambda: no_more(server, held[1]), SECONDS), held


def test_a_storm_of_delays_kills_and_freezes(tmp_path: Path) -> None:
    seed = int(time.time())
    print("seed", seed)
    weather(2.0, seed, tmp_path)


# Servers that die, freeze or shut down.


@pytest.mark.parametrize("at", TURNS)
def test_a_server_killed_with_a_row_under_way_is_noticed_at_once(at: str, report: str) -> None:
    """Between the header of a reply and its row, or after the header of a request has come."""
    with crew(1) as (server,):
        port = server.call(serve, report, Mischief(at=at, what="stop", skip=2))
        with client_at(port, DEAF) as first, client_at(port, DEAF) as second:
            ask(first, 1)
            ask(second, 1)
            futures = [first.submit(request(2))]
            await_stop(server)
            futures.append(second.submit(request(2)))
            server.kill()
            for future in futures:
                with pytest.raises(PeerLostError, match="has gone or was cut off"):
                    future.result(SECONDS)


@pytest.mark.parametrize("at", TURNS)
def test_a_server_frozen_with_a_row_under_way_is_given_up(at: str, report: str) -> None:
    with crew(1) as (server,):
        port = server.call(serve, report, Mischief(at=at, what="stop", skip=1))
        with client_at(port, DEAF) as client:
            ask(client, 1)
            future = client.submit(request(2))
            await_stop(server)
            assert client._connection is not None
            assert client._connection._plane._timeout == client._timeout  # type: ignore[attr-defined]
            hasten(client._connection._plane, SOON)
            with pytest.raises(PeerLostError, match=f"did not get through within {SOON:g} s"):
                future.result(SECONDS)
            server.signal(signal.SIGCONT)
            ask(client, 3)


def test_a_server_shuts_down_with_rows_under_way(
    report: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who was answered gets the reply, who was not learns that the server has closed."""
    monkeypatch.setattr(Reception.close, "__defaults__", (SECONDS,))  # none is cut off
    late = Mischief(at="sending", what="dawdle", delay=0.3, once=False)
    with serving(None, late) as server:
        clients = [client_at(port_of(server), DEAF) for _ in range(3)]
        futures = [client.submit(request(n)) for client in clients for n in range(4)]
        assert wait_until(lambda: server.stats().requests > 2, SECONDS)
        server.shutdown()
        errors = [future.exception(SECONDS) for future in futures]
        assert {type(error) for error in errors} <= {type(None), ServerClosedError}
        assert None in errors
        for client in clients:
            client.close()


# The audit itself.


def breaks_the_rules(plane: AnnouncedRows, how: str) -> None:
    """Make one plane do what none may."""
    send, receive = plane.send, plane.receive

    def prefetch(frame: Any) -> None:
        receive(frame)
        plane._incoming.receive(frame.row.tensor, PASSED)  # type: ignore[union-attr]

    kept: list[Any] = []

    def swap(frame: Any) -> None:
        kept.append(frame)
        if len(kept) == 2:
            for each in reversed(kept):
                send(each)

    def send_here(frame: Any) -> None:
        plane._channels[0].send(frame.row.tensor, PASSED)

    if how == "prefetch":
        plane.receive = prefetch  # type: ignore[method-assign]
    else:
        plane.send = {"swap": swap, "twice": lambda x: (send(x), send(x)), "here": send_here}[how]  # type: ignore


def break_rules(station: Any, how: str) -> None:
    breaks_the_rules(station.client._connection._plane, how)


def submit(station: Any, count: int, report: Path) -> None:
    """Until a breach is written down, or all is answered."""
    for future in [station.client.submit(request(n)) for n in range(count)]:
        assert wait_until(lambda future=future: future.done() or report.read_text(), SECONDS)


@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("prefetch", r"receive \d is posted after \d headers"),
        ("swap", r"row \d is sent after header \d"),
        ("twice", "a row is sent before its header has left"),
        ("here", "a channel is used by two threads"),
    ],
)
def test_the_audit_reports_a_breach_in_another_process(how: str, what: str, tmp_path: Path) -> None:
    rules = rf"(?s)protocol was broken:\n{what}.*innermost.*innermost"
    with pytest.raises(AssertionError, match=rules):
        serve_a_client_that_breaks_the_rules(how, tmp_path)


def serve_a_client_that_breaks_the_rules(how: str, directory: Path) -> None:
    with auditing(directory) as report, serving() as server, crew(1) as (worker,):
        worker.call(connect, str(report), port_of(server), 1)
        worker.call(break_rules, how)
        worker.begin(submit, 1 if how == "twice" else 2, report)
        worker.outcome()
        assert wait_until(report.read_text, SECONDS)


def test_the_audit_notices_a_row_that_follows_another_header() -> None:
    ledger = Ledger()
    row = torch.zeros(16, dtype=torch.uint8)
    ledger.note_come(0)
    ledger.row_arrived(row, ledger.row_awaited())
    ledger.note_come(1)
    with pytest.raises(Breach, match="row 0 arrives after header 1"):
        ledger.row_arrived(row, ledger.row_awaited())
