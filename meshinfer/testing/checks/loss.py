"""Processes that are killed."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any

from meshinfer.errors import PeerLostError
from meshinfer.inference.protocol import InferenceClient
from meshinfer.server import InferenceServer
from meshinfer.testing.check import conformance_check
from meshinfer.testing.checks.replies import count
from meshinfer.testing.expect import raises
from meshinfer.testing.harness import TransportHarness, report
from meshinfer.testing.serving import (
    HELD,
    Gated,
    check_reply,
    request,
    request_spec,
    response_spec,
    serving,
)

__all__ = ["CHECKS"]

SECONDS = 5.0


@conformance_check("crosses_processes")
def a_killed_client_hinders_nobody(harness: TransportHarness) -> None:
    """When a client is killed with requests in flight, the others are served, and new ones can join."""
    policy = Gated(harness.patience)
    with serving(harness, policy, max_batch_size=4) as server:
        other = server.client()
        check_reply(other(request(0), harness.patience), 0)
        victim = harness.run_client(_submit_many, server.client())
        victim.next_report(harness.patience)
        policy.wait_entered()
        victim.kill()
        policy.gate.set()
        runs = [
            harness.run_client(count, client, 1000 * index, 50, None)
            for index, client in enumerate((other, server.client()))
        ]
        assert [run.result(harness.patience) for run in runs] == [50, 50]
    with raises(ChildProcessError):
        victim.result(harness.patience)


def _submit_many(client: InferenceClient) -> None:
    futures = [client.submit(request(HELD + value)) for value in range(20)]
    report()
    futures[0].result()


@conformance_check("crosses_processes")
def a_killed_server_is_noticed(harness: TransportHarness) -> None:
    """When the server's process is killed, waiting clients raise PeerLostError within seconds."""
    server = harness.run_client(_serve, None, harness.factory)
    clients = [pickle.loads(server.next_report(harness.patience)) for _ in range(3)]
    deadlines = (None, None, 60.0)
    runs = [
        harness.run_client(_lose_server, client, deadline)
        for client, deadline in zip(clients, deadlines, strict=True)
    ]
    for run in runs:
        run.next_report(harness.patience)
    server.kill()
    for run in runs:
        run.result(SECONDS)


def _serve(_: None, factory: Callable[..., Any]) -> None:
    transport = factory(request_spec(), response_spec())
    with InferenceServer(Gated(600.0), transport) as server:
        for client in server.clients(3):
            report(pickle.dumps(client))
        threading.Event().wait()


def _lose_server(client: InferenceClient, timeout: float | None) -> None:
    futures = [client.submit(request(HELD)), client.submit(request(2))]
    report()
    for future in futures:
        with raises(PeerLostError):
            future.result(timeout)


CHECKS = (a_killed_client_hinders_nobody, a_killed_server_is_noticed)
