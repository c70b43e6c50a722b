"""A peer that dies when one of its messages, larger than what sockets buffer, has come in part."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from failure_roles import (
    SECONDS,
    Doubler,
    Worker,
    client_at,
    connect,
    crew,
    port_of,
    query,
    request,
    serve,
    serving,
)
from support import wait_until
from torch import Tensor

from meshinfer import PeerLostError
from meshinfer.inference.distributed import plane as plane_module
from meshinfer.inference.distributed.frames import Frame
from meshinfer.layout import PayloadLayout

LARGE = 1 << 23
"""int64 values: 64 MiB."""


def kill_when(worker: Worker, begun: Callable[[], bool]) -> None:
    """Kill it when a message of its has begun to arrive."""
    deadline = time.monotonic() + SECONDS
    while not begun():
        assert time.monotonic() < deadline
    worker.kill()


def again_and_again(attempt: Callable[[], bool]) -> None:
    """Until a message came in part: on a busy machine, one that is killed may have sent all of it by then."""
    assert any(attempt() for _ in range(20))


def test_a_server_that_dies_while_it_sends_a_large_reply_is_lost_at_once() -> None:
    again_and_again(lose_a_server)


def lose_a_server() -> bool:
    """Whether it was lost before its reply had come."""
    with crew(1) as (server,):
        port = server.call(serve, width=LARGE, max_batch_size=1)
        with client_at(port, width=LARGE) as client:
            client.submit(request(0, LARGE)).result(SECONDS)
            assert client._connection is not None
            rows = [each.frame.row.tensor for each in client._connection._replies]
            future = client.submit(request(1, LARGE))
            kill_when(server, lambda: any(row[0] for row in rows))
            error = future.exception(SECONDS)  # not when its client's patience ends
            assert error is None or isinstance(error, PeerLostError)
            return error is not None


def test_a_client_that_dies_while_it_sends_a_large_request_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows: list[Tensor] = []

    def noted(layout: PayloadLayout) -> Frame:
        frame = Frame(layout)
        rows.append(frame.row.tensor)
        return frame

    monkeypatch.setattr(plane_module, "Frame", noted)
    again_and_again(lambda: lose_a_client(rows))


def lose_a_client(rows: list[Tensor]) -> bool:
    """Whether it was lost before its request had come; ``rows``, where it comes to, of other tries are forgotten."""
    rows.clear()
    with serving(Doubler(), width=LARGE, max_batch_size=1) as server, crew(1) as (client,):
        client.call(connect, port_of(server), width=LARGE, first=None)
        client.begin(query, 1)
        kill_when(client, lambda: any(row[0] for row in rows))
        assert wait_until(lambda: server.stats().clients == 0, SECONDS)
        in_part = not any(row[-8] for row in rows)
        assert not in_part or server.stats().requests == 0
        return in_part
