"""Announced rows over gloo whose channels fail, and which clients and servers go together."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from announced_audit import auditing
from announced_mischief import DEAF, Mischief, released
from announced_roles import (
    LARGE,
    NEIGHBOUR,
    RANK,
    Doubler,
    ask,
    begin_neighbour,
    check,
    client_at,
    connect,
    end_neighbour,
    query,
    reply,
    request,
    serving,
    stop_at,
)
from failure_roles import SECONDS, crew, port_of
from support import wait_until

from meshinfer import DistributedTransport, PeerLostError, RefusedError
from meshinfer.inference.distributed import watch
from meshinfer.inference.distributed.announced import AnnouncedRows
from meshinfer.inference.distributed.pair import CLIENT
from meshinfer.testing import GlooRows

SOON = 1.0
"""For channels to be built, where the test waits for that to run out."""


@pytest.fixture
def report(tmp_path: Path) -> Iterator[str]:
    with auditing(tmp_path) as path:
        yield str(path)


# Channels that fail.


@pytest.mark.parametrize("channel", [0, 1])
def test_a_channel_that_a_client_cannot_build(channel: int, report: str) -> None:
    broken = Mischief(at="building", what="raise", skip=channel)
    with serving() as server, client_at(port_of(server)) as neighbour:
        ask(neighbour, 1)
        with client_at(port_of(server), broken) as client:
            with pytest.raises(PeerLostError, match=r"no way for rows .* mischief while building"):
                ask(client, 1)
            ask(neighbour, 2)
            ask(client, 2)


@pytest.mark.parametrize("channel", [0, 1])
def test_a_channel_that_a_server_cannot_build(channel: int, report: str) -> None:
    broken = Mischief(at="building", what="raise", skip=2 + channel)
    with serving(None, broken) as server, client_at(port_of(server), DEAF) as neighbour:
        ask(neighbour, 1)
        with client_at(port_of(server), DEAF) as client:
            with pytest.raises(PeerLostError, match="no way for rows"):
                ask(client, 1)
            ask(neighbour, 2)
            ask(client, 2)


@contextmanager
def hurrying() -> Iterator[None]:
    """A client that joins meanwhile has ``SOON`` for its channels, and all of its timeout for what comes before."""
    init = AnnouncedRows.__init__

    def hurried(
        plane: AnnouncedRows, backend: Any, pair: Any, joining: Any, timeout: float
    ) -> None:
        if joining.rank == CLIENT:
            joining._deadline = min(joining._deadline, time.monotonic() + SOON)
        init(plane, backend, pair, joining, timeout)

    with mock.patch.object(AnnouncedRows, "__init__", hurried):
        yield


@pytest.mark.parametrize("side", ["client", "server"])
def test_a_channel_that_is_never_built_costs_a_client_its_timeout(side: str, report: str) -> None:
    stuck = Mischief(at="building", what="hang", skip=0 if side == "client" else 2)
    mischief = {side: stuck}
    with (
        serving(None, mischief.get("server")) as server,
        client_at(port_of(server)) as neighbour,
    ):
        ask(neighbour, 1)
        with client_at(port_of(server), mischief.get("client", DEAF)) as client:
            never = pytest.raises(TimeoutError, match=r"channel for rows|requests address")
            with hurrying(), never:
                ask(client, 1)
            assert not released.is_set()
            ask(neighbour, 2)
            ask(client, 2)
        released.set()


@pytest.mark.parametrize("side", ["client", "server"])
@pytest.mark.parametrize("at", ["sending", "posting", "waiting"])
def test_a_channel_that_breaks_costs_its_client_a_request(at: str, side: str, report: str) -> None:
    broken = Mischief(at=at, what="raise", skip=1, deaf=True)
    mischief = {side: broken}
    with serving(None, mischief.get("server", DEAF)) as server:
        with client_at(port_of(server), mischief.get("client", DEAF)) as client:
            ask(client, 1)
            why = f"mischief while {at}" if side == "client" else "has gone or was cut off"
            with pytest.raises(PeerLostError, match=why):
                ask(client, 2)
            ask(client, 3)
        assert wait_until(lambda: server.stats().clients == 0, SECONDS)


def test_nobody_waits_for_an_abort_that_takes_long(
    report: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_ABORT_SECONDS", 0.1)
    stuck = Mischief(at="aborting", what="hang", deaf=True)
    policy = Doubler()
    with serving(policy, stuck) as server, crew(2) as (neighbour, victim):
        begin_neighbour(neighbour, report, server)
        stop_at("sending", victim, report, server)
        victim.kill()
        assert policy.has_served(NEIGHBOUR)
        with client_at(port_of(server), rank=RANK) as client:
            ask(client, 4)
        end_neighbour(neighbour)
        server.shutdown()
        assert not released.is_set()
        released.set()


# Who goes with whom.


def test_a_client_is_told_that_its_backend_is_not_the_servers(report: str) -> None:
    with serving(rows="gloo") as server, client_at(port_of(server)) as client:
        both = (
            "client has backend='announced-gloo' and the server backend='gloo'.*give both the same"
        )
        with pytest.raises(RefusedError, match=both):
            ask(client, 1)
    with (
        serving(rows=GlooRows("one")) as server,
        client_at(port_of(server), rows=GlooRows("other")) as client,
        pytest.raises(RefusedError, match=r"backend='other' .* backend='one'"),
    ):
        ask(client, 1)


def test_clients_with_and_without_channels_meet_in_one_batch(report: str) -> None:
    config = {"min_batch_size": 2, "timeout": SECONDS}
    with serving(config=config) as server:
        transport = server.transport
        assert isinstance(transport, DistributedTransport)
        with transport.client() as announced, transport.client(backend="gloo") as framed:
            futures = [client.submit(request(n)) for n, client in enumerate((announced, framed))]
            for n, future in enumerate(futures):
                check(future.result(SECONDS), n)
        assert server.stats().batch_sizes == {2: 1}


def test_rows_that_take_more_than_one_read(report: str) -> None:
    with serving(width=LARGE) as server, client_at(port_of(server), DEAF, width=LARGE) as client:
        futures = [client.submit(request(n, LARGE)) for n in range(6)]
        for n, future in enumerate(futures):
            check(future.result(SECONDS), n)


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"backend": GlooRows(), "window": 3}, "window=3: at most 2"),
        ({"backend": GlooRows(), "device": "cpu"}, "a ready backend has its own"),
        ({"device": "cuda:0"}, "give backend='nccl' too"),
        ({"backend": "mpi"}, "expected 'gloo' or 'nccl'"),
    ],
)
def test_arguments_that_do_not_go_together(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ValueError, match=what):
        DistributedTransport(request(0), reply(), **options)


def test_a_forked_child_has_channels_of_its_own(report: str) -> None:
    with serving() as server, crew(1) as (worker,):
        worker.call(connect, report, port_of(server), NEIGHBOUR)
        assert worker.call(fork_and_ask) == 0
        assert wait_until(lambda: server.stats().clients == 1, SECONDS)
        worker.call(query, 4)


def fork_and_ask(station: SimpleNamespace) -> int:
    """Both processes go on with the client that one of them had; how the child has ended."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        status = 1
        try:
            for n in range(10):
                query(station, n)
            status = 0
        finally:
            os._exit(status)
    for n in range(10):
        query(station, n)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
