"""The queue between processes, as far as one process shows it: who joins, limits, the end, arguments."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import pickle
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support import no_more, wait_until
from tensordict import TensorDict, TensorDictBase

import meshinfer
from meshinfer import (
    ClosedError,
    InferenceServer,
    MPTransport,
    PeerLostError,
    RefusedError,
    ServerClosedError,
)
from meshinfer.inference.queues.proof import HELLO_BYTES
from meshinfer.inference.queues.wire import (
    Kind,
    header_of,
)
from meshinfer.testing.expect import raises

SECONDS = 20.0
MIB = 1 << 20


def echo(batch: TensorDictBase) -> TensorDictBase:
    return batch.clone()


@pytest.fixture
def transport() -> Iterator[MPTransport]:
    with MPTransport(timeout=SECONDS) as made:
        yield made


@pytest.fixture
def server(transport: MPTransport) -> Iterator[InferenceServer]:
    with InferenceServer(echo, transport, policy_version=3) as running:
        yield running


# Who may join.


def connected(transport: MPTransport) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(SECONDS)
    connection.connect(f"\0{transport.address}")
    return connection


def received(connection: socket.socket) -> bytes:
    """All that comes until the other end cuts the stream."""
    data = b""
    while True:
        try:
            piece = connection.recv(1000)
        except ConnectionResetError:
            return data
        if not piece:
            return data
        data += piece


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def test_nothing_is_unpickled_before_the_secret_is_proved(
    server: InferenceServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    transport: Any = server.transport
    data = pickle.dumps(Bomb(tmp_path / "gone off"))
    frames = header_of(Kind.LAYOUT, 0, len(data), 0) + data
    frames += header_of(Kind.REQUEST, 1, len(data)) + data
    with connected(transport) as connection:
        hello = connection.recv(HELLO_BYTES, socket.MSG_WAITALL)
        connection.sendall(hello + bytes(32) + frames)
        answer = received(connection)
    assert answer.startswith(b"refused.")
    assert server.client()(TensorDict({"x": torch.ones(1)}), SECONDS)["x"].item() == 1
    assert not (tmp_path / "gone off").exists()
    assert "does not hold the secret" in caplog.text


def test_a_client_with_another_secret_is_refused(server: InferenceServer) -> None:
    address = server.transport.address  # type: ignore[attr-defined]
    stranger = MPTransport(role="client", address=address, secret="another")
    with stranger, raises(RefusedError, "secret"):
        stranger.client()(TensorDict({"x": torch.ones(1)}), SECONDS)
    assert server.transport.num_clients == 0  # type: ignore[attr-defined]


def test_a_server_with_another_secret_gets_nothing_from_a_client(transport: MPTransport) -> None:
    name = transport.address
    client = transport.client()
    transport.close()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        got: list[bytes] = []

        def pose() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"mi-queue00000001" + bytes(32))
                got.append(connection.recv(1000))
                connection.sendall(b"welcome." + bytes(32))
                got.append(connection.recv(1000))

        impostor = threading.Thread(target=pose, daemon=True)
        impostor.start()
        with raises(RefusedError, "does not hold our secret"):
            client(TensorDict({"x": torch.ones(1)}), SECONDS)
        impostor.join(SECONDS)
    assert [len(data) for data in got] == [80, 0]
    assert transport.secret not in got[0]


def test_a_connection_that_says_nothing_hinders_nobody(server: InferenceServer) -> None:
    silent = [connected(server.transport) for _ in range(3)]  # type: ignore[arg-type]
    assert server.client()(TensorDict({"x": torch.ones(1)}), SECONDS)["x"].item() == 1
    assert server.transport.num_clients <= 1  # type: ignore[attr-defined]
    for connection in silent:
        connection.close()


def test_who_sends_nonsense_is_cut_off_and_nobody_else(
    server: InferenceServer, caplog: pytest.LogCaptureFixture
) -> None:
    other, transport = server.client(), server.transport
    payload = TensorDict({"x": torch.ones(1)})
    frames = (
        header_of(99),
        header_of(Kind.REQUEST, 1, 4, 5) + bytes(4),
        header_of(Kind.LAYOUT, 0, 3, 0) + b"abc",
    )
    for number, nonsense in enumerate(frames, start=1):
        client: Any = server.client()
        client(payload, SECONDS)
        connection = client._connection
        connection._socket.sendall(nonsense)
        connection._thread.join(SECONDS)
        assert isinstance(connection.error, PeerLostError)
        assert wait_until(lambda: transport.num_lost == number, SECONDS)  # type: ignore[attr-defined] # noqa: B023
        assert other(payload, SECONDS)["x"].item() == 1
        assert client(payload, SECONDS)["x"].item() == 1  # it joins anew
    assert caplog.text.count("nonsense") == 3


def test_the_secret_is_never_shown(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    with MPTransport(secret="hush-hush") as transport:
        server = InferenceServer(echo, transport).start()
        client = server.client()
        client(TensorDict({"x": torch.ones(1)}), SECONDS)
        opener = transport.serve_elsewhere
        shown = f"{transport} {transport!r} {client!r} {server!r} {client._whereabouts!r}"
        server.shutdown()
        with raises(ClosedError):
            opener()
    with MPTransport(secret="hush-hush") as another:
        shown += repr(another.serve_elsewhere())
    assert "hush" not in shown + caplog.text
    assert pickle.loads(pickle.dumps(another.secret)) == b"hush-hush"


# Limits.


def test_a_client_that_sends_without_end_is_held_up_and_loses_nothing(
    transport: MPTransport,
) -> None:
    """At 64 MiB that nobody drains the server stops reading; then sending waits, and times out."""
    client = transport.client()
    futures, size = [], 4 * MIB
    with raises(TimeoutError, "did not take"):
        for value in range(60):
            payload = TensorDict({"x": torch.full((size,), value, dtype=torch.uint8)})
            sure = len(futures) * size < 64 * MIB
            futures.append(client.submit(payload, SECONDS if sure else 1.0))
    assert 64 <= len(futures) * size / MIB <= 80
    assert client.in_flight == len(futures)
    found = 0
    while found < len(futures):
        assert transport.wait_for_work(SECONDS)
        for payload, handle in zip(*transport.drain(3), strict=True):
            assert payload["x"].unique().tolist() == [found]
            transport.resolve(handle, TensorDict({"y": payload["x"][0].clone()}))
            found += 1
    assert [future.result(SECONDS)["y"].item() for future in futures] == list(range(len(futures)))
    again = client.submit(
        TensorDict({"x": torch.ones(1)})
    )  # completes the message that was given up
    transport.wait_for_work(SECONDS)
    wait_until(lambda: transport.num_waiting == 2, SECONDS)
    payloads, handles = transport.drain(3)
    assert [payload["x"].numel() for payload in payloads] == [size, 1]
    for handle in handles:
        transport.resolve(handle, payloads[1])
    assert again.result(SECONDS)["x"].item() == 1


def test_descriptors_and_threads_of_a_server_of_64_clients(transport: MPTransport) -> None:
    gc.collect()
    me, others = psutil.Process(), {*threading.enumerate()}
    open_before = {each.fd for each in me.net_connections("unix")}

    def new() -> tuple[int, int]:
        """Unix sockets and threads: what an earlier test has left may go meanwhile."""
        sockets = {each.fd for each in me.net_connections("unix")} - open_before
        return len(sockets), len({*threading.enumerate()} - others)

    payload = TensorDict({"x": torch.ones(1)})
    clients = [transport.client() for _ in range(64)]
    futures = [client.submit(payload) for client in clients]
    wait_until(lambda: transport.num_waiting == 64, SECONDS)
    assert transport.num_clients == 64
    # Both ends are here; a client has one thread, all of them together have one at the server.
    assert wait_until(lambda: new() == (2 * 64, 64), SECONDS), new()
    payloads, handles = transport.drain(100)
    for handle in handles:
        transport.resolve(handle, payloads[0])
    assert all(future.result(SECONDS)["x"].item() == 1 for future in futures)
    for client in clients:
        client.close()
    assert transport.wait_until_left(64, SECONDS)
    assert wait_until(lambda: new() == (0, 0), SECONDS), new()


def test_rounds_of_joining_and_leaving_leave_nothing(server: InferenceServer) -> None:
    transport: Any = server.transport
    payload = TensorDict({"x": torch.ones(1)})

    def held() -> tuple[int, int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count(), transport.num_clients

    server.client()(payload, SECONDS)
    wait_until(lambda: transport.num_clients == 0, SECONDS)
    before = held()
    for number in range(100):
        client = server.client()
        assert client(payload, SECONDS)["x"].item() == 1
        if number % 2:
            client.close()
        del client
    assert wait_until(lambda: no_more(held(), before), SECONDS), (held(), before)
    assert transport.num_lost == 0


# The end, and the next beginning.


def test_after_a_goodbye_calls_raise_at_once_until_somebody_listens_again() -> None:
    payload = TensorDict({"x": torch.ones(1)})
    transport = MPTransport(timeout=3 * SECONDS)
    with InferenceServer(echo, transport) as server:
        client = server.client()
        client(payload)
    for _ in range(2):
        began = time.monotonic()
        with raises(ServerClosedError):
            client(payload)
        assert time.monotonic() - began < SECONDS, "it was waited for"
    again = MPTransport(address=transport.address, secret=transport.secret)
    with InferenceServer(echo, again):
        assert client(payload, SECONDS)["x"].item() == 1
        client.close()


def test_a_client_waits_for_its_server_and_says_for_whom() -> None:
    payload = TensorDict({"x": torch.ones(1)})
    name = f"meshinfer-test-{uuid.uuid4().hex}"
    with MPTransport(role="client", address=name, secret="s") as transport:
        with raises(TimeoutError, f"@{name}", "no policy server", " s; is it started?"):
            transport.client()(payload, 0.2)
        waiting = transport.client()
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(waiting(payload, SECONDS)))
        thread.start()
        late = MPTransport(address=name, secret="s")
        with InferenceServer(echo, late):
            thread.join(SECONDS)
    assert [result["x"].item() for result in results] == [1]
    waiting.close()


def test_closing_ends_a_client_that_still_looks_for_its_server() -> None:
    name = f"meshinfer-test-{uuid.uuid4().hex}"
    with MPTransport(role="client", address=name, secret="s") as transport:
        client = transport.client()
        errors: list[BaseException] = []

        def call() -> None:
            try:
                client(TensorDict({"x": torch.ones(1)}))
            except ClosedError as error:
                errors.append(error)

        thread = threading.Thread(target=call)
        thread.start()
        client.close()
        thread.join(SECONDS)
        assert len(errors) == 1


def test_two_servers_cannot_share_an_address(transport: MPTransport) -> None:
    with raises(ValueError, transport.address, "another server"):
        MPTransport(address=transport.address)


def test_serving_until_the_clients_have_left(transport: MPTransport) -> None:
    with InferenceServer(echo, transport) as server:
        with raises(TimeoutError, "0.05"):
            server.serve(timeout=0.05)
        clients = server.clients(2)
        for client in clients:
            client(TensorDict({"x": torch.ones(1)}), SECONDS)
        clients.pop().close()
        with raises(TimeoutError):
            server.serve(2, timeout=0.05)
        clients.pop().close()
        server.serve(2, timeout=SECONDS)


def test_clients_join_while_a_policy_computes() -> None:
    """Even where an InferenceServer may compute in receiving threads: one receives for all clients here."""
    entered, gate = threading.Event(), threading.Event()

    def policy(batch: TensorDictBase) -> TensorDictBase:
        entered.set()
        gate.wait(SECONDS)
        return batch.clone()

    config = meshinfer.InferenceServerConfig(inline=True)
    with InferenceServer(policy, MPTransport(), server_config=config) as server:
        transport: Any = server.transport
        payload = TensorDict({"x": torch.ones(1)})
        first = server.client()
        futures = [first.submit(payload)]
        assert entered.wait(SECONDS)
        clients = server.clients(2)
        futures += [client.submit(payload) for client in clients]
        assert wait_until(lambda: transport.num_waiting == 2, SECONDS)
        gate.set()
        assert all(future.result(SECONDS)["x"].item() == 1 for future in futures)


# Arguments.


def test_the_start_method_is_kept_for_who_starts_the_server() -> None:
    with MPTransport() as default, MPTransport(ctx="fork") as named:
        assert default.ctx.get_start_method() == "spawn"
        assert named.ctx.get_start_method() == "fork"
    context = multiprocessing.get_context("forkserver")
    with MPTransport(ctx=context) as given_context:
        assert given_context.ctx is context


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"ctx": "threads"}, ValueError, ("ctx", "'threads'", "'spawn'")),
        ({"ctx": 3}, TypeError, ("ctx", "int")),
        ({"timeout": 0}, ValueError, ("timeout",)),
        ({"timeout": "1"}, TypeError, ("timeout",)),
        ({"role": "both"}, ValueError, ("role", "'both'", "'server'")),
        ({"address": ""}, ValueError, ("address",)),
        ({"address": "x" * 101}, ValueError, ("address", "100")),
        ({"address": "a\0b"}, ValueError, ("address", "NUL")),
        ({"address": 5}, TypeError, ("address", "int")),
        ({"secret": ""}, ValueError, ("secret",)),
        ({"secret": 5}, TypeError, ("secret", "int")),
        ({"role": "client"}, ValueError, ("address", "secret")),
        ({"role": "client", "address": "a"}, ValueError, ("secret",)),
    ],
)
def test_arguments_that_cannot_work(
    options: dict[str, Any], kind: type[Exception], words: tuple[str, ...]
) -> None:
    with raises(kind, *words):
        MPTransport(**options)


def test_the_secret_may_be_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MESHINFER_SECRET", "of the job")
    with MPTransport() as transport, InferenceServer(echo, transport):
        there = MPTransport(role="client", address=transport.address)
        with there:
            assert there.submit(TensorDict({"x": torch.ones(1)})).result(SECONDS)["x"].item() == 1


def test_only_the_serving_side_serves(transport: MPTransport) -> None:
    with MPTransport(role="client", address=transport.address, secret=transport.secret) as there:
        for use in (there.drain, there.wait_for_work):
            with raises(ValueError, "role='server'"):
                use(1)
    with raises(TypeError, "client()", "serve_elsewhere()"):
        pickle.dumps(transport)


def test_it_is_known_by_its_kind() -> None:
    with MPTransport() as transport:
        assert meshinfer.inference_transport_kind(transport) == "queue"
    made: Any = meshinfer.make_inference_transport(
        "queue", policy_backend="multiprocessing", transport_options={"timeout": 3.0}
    )
    with made:
        assert type(made) is MPTransport
        assert made.timeout == 3.0
