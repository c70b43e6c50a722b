"""A peer that dies when one of its messages, larger than what sockets buffer, has come in part."""

from __future__ import annotations

import signal
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


def kill_when(worker: Worker, begun: Callable[[], bool], ended: Callable[[], bool]) -> None:
    """Kill it when a message of its has begun to arrive; it must not have ended by then."""
    deadline = time.monotonic() + SECONDS
    while not begun():
        assert time.monotonic() < deadline
    worker.signal(signal.SIGSTOP)
    assert not ended()
    worker.kill()


def test_a_server_that_dies_while_it_sends_a_large_reply_is_lost_at_once() -> None:
    with crew(1) as (server,):
        port = server.call(serve, width=LARGE, max_batch_size=1)
        with client_at(port, width=LARGE) as client:
            client.submit(request(0, LARGE)).result(SECONDS)
            assert client._connection is not None
            rows = [each.frame.row.tensor for each in client._connection._replies]
            future = client.submit(request(1, LARGE))
            kill_when(
                server,
                lambda: any(row[0] for row in rows),
                lambda: any(row[-8] for row in rows),
            )
            killed = time.monotonic()
            assert isinstance(future.exception(SECONDS), PeerLostError)
            assert time.monotonic() - killed < 5.0


def test_a_client_that_dies_while_it_sends_a_large_request_has_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows: list[Tensor] = []

    def noted(layout: PayloadLayout) -> Frame:
        frame = Frame(layout)
        rows.append(frame.row.tensor)
        return frame

    monkeypatch.setattr(plane_module, "Frame", noted)
    with serving(Doubler(), width=LARGE, max_batch_size=1) as server, crew(1) as (client,):
        client.call(connect, port_of(server), width=LARGE, first=None)
        client.begin(query, 1)
        kill_when(client, lambda: any(row[0] for row in rows), lambda: any(row[-8] for row in rows))
        assert wait_until(lambda: server.stats().clients == 0, 5.0)
        assert server.stats().requests == 0
