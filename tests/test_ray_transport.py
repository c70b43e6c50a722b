"""The transport of Ray, with servers and clients wherever Ray may have them."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray_roles as roles
from mesh_jobs import run
from ray_roles import HELD, SECONDS, number, ray_transport
from support import PRELOADED, wait_until

import meshinfer
from meshinfer import (
    InferenceServer,
    PeerLostError,
    RefusedError,
    ServerClosedError,
    TransportConfig,
)
from meshinfer.testing import ActorPool, WorkerPool, raises

NOTICED = 60.0
"""Seconds within which a client learns that its server is dead: that it does not wait for ever."""


@pytest.fixture(autouse=True)
def nothing_left_behind(ray_actors: ActorPool, nothing_left_behind: None) -> None:
    """The actors outlive each test: those that the last one killed are replaced before it is looked around."""


@pytest.fixture
def transport(ray_cluster: Any) -> Iterator[Any]:
    with ray_transport(timeout=SECONDS) as made:
        yield made


@pytest.fixture
def server(transport: Any) -> Iterator[InferenceServer]:
    policy = roles.Holding()
    with InferenceServer(policy, transport) as running:
        yield running
        policy.gate.set()


def actor(ray: Any, kind: type, *arguments: Any, **options: Any) -> Any:
    return ray.remote(kind).options(num_cpus=0, **options).remote(*arguments)


@contextmanager
def killed_at_the_end(ray: Any, handle: Any) -> Iterator[int]:
    """Its process; the actor is killed at the end."""
    try:
        yield ray.get(handle.pid.remote(), timeout=SECONDS)
    finally:
        ray.kill(handle)


# The server in the driver.


def test_it_listens_where_ray_has_its_node(ray_cluster: Any, transport: Any) -> None:
    assert transport.host == ray_cluster.util.get_node_ip_address() == "127.0.0.1"
    mine = psutil.Process().net_connections("tcp")
    listening = [each.laddr for each in mine if each.status == psutil.CONN_LISTEN]
    assert [each.ip for each in listening if each.port == transport.port] == ["127.0.0.1"]


def test_many_clients_in_actors(server: InferenceServer, ray_actors: ActorPool) -> None:
    transport: Any = server.transport
    runs = [ray_actors.run(roles.many, server.clients(32), 5) for _ in range(2)]
    for each in runs:
        each.result(SECONDS)
    assert transport.wait_until_left(64, SECONDS)
    assert transport.num_lost == 0


def test_20_mb_to_an_actor_and_back(server: InferenceServer, ray_actors: ActorPool) -> None:
    exchange = ray_actors.run(roles.exchange_large, server.client(), 20)
    roles.count(server.client(), 0, 50)
    exchange.result(SECONDS)


def test_clients_that_ray_pickles(ray_cluster: Any, server: InferenceServer) -> None:
    """As an argument and inside an object."""
    ask = ray_cluster.remote(num_cpus=0)(roles.count)
    client, other = server.clients(2)
    stored = ray_cluster.put([other])
    again = ray_cluster.get(stored)[0]
    shown = ray_cluster.get(ask.remote(client, 3, 10), timeout=SECONDS)
    assert "connected" in shown
    assert roles.count(again, 5, 3)
    again.close()


def test_a_plain_process_may_be_a_client(server: InferenceServer) -> None:
    """It knows nothing of Ray, and dies in the midst of a request."""
    transport: Any = server.transport
    with WorkerPool(1, preload=PRELOADED) as pool:
        pool.run(roles.count, server.client(), 7, 20).result(SECONDS)
        victim = pool.run(roles.send_half, server.client())
        victim.next_report(SECONDS)
        victim.kill()
        assert wait_until(lambda: transport.num_lost == 1, SECONDS)
    roles.count(server.client(), 1, 5)


def test_another_secret_is_refused(transport: Any) -> None:
    there = ray_transport(role="client", host=transport.host, port=transport.port, secret="x")
    with there, raises(RefusedError, "secret", str(transport.port)):
        there.client()(number(1), SECONDS)
    assert transport.num_clients == 0


def test_the_secret_is_never_shown(ray_cluster: Any) -> None:
    with ray_transport(secret="hush-hush") as transport:
        shown = f"{transport} {transport.client()!r} {transport.serve_elsewhere()!r}"
    assert "hush" not in shown
    assert transport.secret == b"hush-hush"


# The server in an actor.


def test_a_server_in_an_actor_that_ray_starts_again(
    ray_cluster: Any, ray_actors: ActorPool
) -> None:
    serving = actor(ray_cluster, roles.Serving, max_restarts=1)
    with killed_at_the_end(ray_cluster, serving) as pid:
        client = ray_cluster.get(serving.client.remote())
        assert "another name" in ray_cluster.get(serving.second.remote())
        waiting = ray_actors.run(roles.ask_in_vain, client)
        waiting.next_report(SECONDS)
        future = client.submit(number(HELD))
        began = time.time()
        os.kill(pid, signal.SIGKILL)
        with raises(PeerLostError, "Serving", serving._actor_id.hex()):
            future.result()
        assert time.time() - began < NOTICED
        kind, text, when = waiting.result(SECONDS)
        assert kind == "PeerLostError"
        assert serving._actor_id.hex() in text
        assert when - began < NOTICED
        roles.count(client, 1, 3)
        assert ray_cluster.get(serving.pid.remote()) != pid
        roles.count(ray_cluster.get(serving.client.remote()), 1, 3)

        future = client.submit(number(HELD))
        began = time.time()
        ray_cluster.kill(serving)
        with raises(PeerLostError, serving._actor_id.hex(), "killed by `ray.kill`"):
            future.result()
        with raises(PeerLostError, serving._actor_id.hex(), "killed by `ray.kill`"):
            client(number(1))
        assert time.time() - began < NOTICED


def test_a_server_elsewhere_is_found_by_clients_made_before_and_after(
    ray_cluster: Any, ray_actors: ActorPool
) -> None:
    """In an async actor, where the driver's transport said that there would be one; then in another."""
    transport = ray_transport(timeout=SECONDS)
    early = transport.client()
    opener = transport.serve_elsewhere()
    with raises(ValueError, "role='server'"):
        transport.drain(1)
    with raises(ValueError, "actor_options", "no actor"):
        opener()
    with raises(ValueError, "actor_options", "an actor named ''"):
        ray_actors.run(open_here, opener).result(SECONDS)
    waiting = ray_actors.run(roles.count, transport.client(), 1, 5)
    serving = actor(ray_cluster, roles.AsyncServing, **transport.actor_options)
    try:
        pid = ray_cluster.get(serving.start.remote(opener), timeout=SECONDS)
        for client in (early, transport.client(), ray_cluster.get(serving.client.remote())):
            roles.count(client, 1, 3)
        assert "AsyncServing" in waiting.result(SECONDS)
        future = early.submit(number(HELD))
        began = time.time()
        os.kill(pid, signal.SIGKILL)
        with raises(PeerLostError, "AsyncServing", transport.actor_options["name"]):
            future.result()
        assert time.time() - began < NOTICED
    finally:
        ray_cluster.kill(serving)
    opener = transport.serve_elsewhere()
    second = actor(ray_cluster, roles.Serving, opener, **transport.actor_options)
    with killed_at_the_end(ray_cluster, second):
        roles.count(early, 4, 3)
        ray_cluster.get(second.shutdown.remote())
        with raises(ServerClosedError):
            early(number(1), SECONDS)
    transport.close()
    early.close()


def open_here(opener: Any) -> None:
    opener()


def test_a_server_in_a_task(ray_cluster: Any) -> None:
    task = ray_cluster.remote(roles.serve_in_a_task)
    said = task.options(num_cpus=0, num_returns="streaming").remote()
    client = ray_cluster.get(next(said), timeout=SECONDS)
    roles.count(client, 1, 10)
    client.close()
    assert ray_cluster.get(next(said), timeout=SECONDS) != os.getpid()


# The end.


def test_sigterm_ends_a_worker_that_waits_for_a_reply(
    ray_cluster: Any, server: InferenceServer
) -> None:
    transport: Any = server.transport
    waiting = actor(ray_cluster, roles.Waiting)
    with killed_at_the_end(ray_cluster, waiting) as pid:
        call = waiting.wait.remote(server.client())
        assert wait_until(lambda: transport.num_clients == 1, SECONDS)
        os.kill(pid, signal.SIGTERM)
        assert wait_until(lambda: not psutil.pid_exists(pid), NOTICED)
        with raises(ray_cluster.exceptions.RayActorError):
            ray_cluster.get(call, timeout=SECONDS)
    assert wait_until(lambda: transport.num_clients == 0, SECONDS)


def test_shutting_ray_down_with_requests_pending(ray_cluster: Any, tmp_path: Path) -> None:
    """In a driver of its own, with a server and with clients of one."""
    address = ray_cluster.get_runtime_context().gcs_address
    program = Path(__file__).with_name("ray_driver.py")
    done = run(tmp_path, [sys.executable, str(program), address])
    assert done.code == 0, done
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    expected = ["shutdown", "told", "PeerLostError", "PeerLostError", "later"]
    assert [word for word, _ in lines] == expected, done
    assert all(float(seconds) < NOTICED for _, seconds in lines[:2])
    assert "has gone" in lines[2][1]


# Arguments.


def test_ray_is_initialised_by_the_user(ray_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_cluster, "is_initialized", lambda: False)
    with raises(ValueError, "ray.init()"):
        ray_transport()
    monkeypatch.undo()
    monkeypatch.setattr(ray_cluster.util.client.ray, "is_connected", lambda: True)
    with raises(ValueError, "ray://", "actor"):
        ray_transport()


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"role": "both"}, ValueError, ("role", "'both'", "'server'")),
        ({"timeout": 0}, ValueError, ("timeout",)),
        ({"port": "80"}, TypeError, ("port", "str")),
        ({"port": 70000}, ValueError, ("port", "70000", "65535")),
        ({"host": "0.0.0.0"}, ValueError, ("0.0.0.0", "one address")),
        ({"host": "203.0.113.1"}, ValueError, ("203.0.113.1", "host=")),
        ({"secret": ""}, ValueError, ("secret",)),
        ({"name": ""}, ValueError, ("name",)),
        ({"name": 5}, TypeError, ("name", "int")),
        ({"role": "client"}, ValueError, ("host", "port", "secret")),
        ({"role": "client", "host": "127.0.0.1", "secret": "s"}, ValueError, ("port",)),
    ],
)
def test_arguments_that_cannot_work(
    ray_cluster: Any, options: dict[str, Any], kind: type[Exception], words: tuple[str, ...]
) -> None:
    with raises(kind, *words):
        ray_transport(**options)


def test_it_is_made_and_known_by_its_kind(ray_cluster: Any) -> None:
    made: Any = meshinfer.make_inference_transport(
        TransportConfig("ray", {"timeout": 3.0}), policy_backend="ray"
    )
    with made:
        assert meshinfer.inference_transport_kind(made) == "ray"
        assert made.timeout == 3.0
        with raises(TypeError, "client()", "serve_elsewhere()"):
            pickle.dumps(made)
    there = ray_transport(role="client", host="127.0.0.1", port=9, secret="s")
    with there, raises(ValueError, "role='client'"):
        there.serve_elsewhere()
