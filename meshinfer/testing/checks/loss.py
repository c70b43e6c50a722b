"""Processes that are killed."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from typing import Any

from meshinfer.errors import PeerLostError
from meshinfer.inference.protocol import InferenceClient
from meshinfer.server import InferenceServer, InferenceServerConfig
from meshinfer.testing.check import conformance_check
from meshinfer.testing.checks.replies import count
from meshinfer.testing.expect import raises
from meshinfer.testing.harness import TransportHarness, report
from meshinfer.testing.serving import (
    HELD,
    Gated,
    check_reply,
    clients_for,
    request,
    request_spec,
    response_spec,
    serving,
)

__all__ = ["CHECKS"]

SECONDS = 30.0


@conformance_check("crosses_processes")
def a_killed_client_hinders_nobody(harness: TransportHarness) -> None:
    """When a client is killed with requests in flight, the others are served, and new ones can join."""
    policy = Gated(harness.patience)
    with serving(harness, policy, max_batch_size=4) as server:
        other = server.client()
        check_reply(other(request(0), harness.patience), 0)
        victim = harness.run_client(_submit_many, clients_for(harness, server, 20))
        victim.next_report(harness.patience)
        policy.wait_entered()
        victim.kill()
        policy.gate.set()
        newcomer = harness.run_client(count, server.client(), 1000, 50, None)
        count(other, 0, 50, harness.patience)
        newcomer.result(harness.patience)
    with raises(ChildProcessError):
        victim.result(harness.patience)


def _submit_many(clients: list[InferenceClient]) -> None:
    futures = [client.submit(request(HELD + value)) for value, client in enumerate(clients)]
    report()
    futures[0].result()


@conformance_check("crosses_processes")
def a_killed_server_is_noticed(harness: TransportHarness) -> None:
    """When the server's process is killed, waiting clients raise PeerLostError within seconds."""
    number = 1 if harness.many_in_flight else 2
    server = harness.run_client(_serve, None, harness.factory, 3 * number)
    runs = []
    for deadline in (None, None, 60.0):
        clients = [pickle.loads(server.next_report(harness.patience)) for _ in range(number)]
        runs.append(harness.run_client(_lose_server, clients, deadline))
    for run in runs:
        run.next_report(harness.patience)
    server.kill()
    for run in runs:
        run.result(SECONDS)


def _serve(_: None, factory: Callable[..., Any], number: int) -> None:
    transport = factory(request_spec(), response_spec())
    config = InferenceServerConfig(inline=False)  # who receives is free to let the others in
    with InferenceServer(Gated(600.0), transport, server_config=config) as server:
        for client in server.clients(number):
            report(pickle.dumps(client))
        threading.Event().wait()


def _lose_server(clients: list[InferenceClient], timeout: float | None) -> None:
    futures = [clients[0].submit(request(HELD)), clients[-1].submit(request(2))]
    report()
    for future in futures:
        with raises(PeerLostError):
            future.result(timeout)


CHECKS = (a_killed_client_hinders_nobody, a_killed_server_is_noticed)
