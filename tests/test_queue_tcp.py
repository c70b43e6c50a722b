"""The queue at a TCP address: who comes, strangers that stay, hosts that vanish, and large payloads."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import queue_roles as roles
import torch
from mesh_jobs import run
from support import unavailable, unused_port, wait_until
from tcp_transport import NO_NAMESPACES, SECONDS, TcpTransport, numbers
from tensordict import TensorDict, TensorDictBase

from meshinfer import InferenceServer, PeerLostError, RefusedError, ServerClosedError
from meshinfer.inference.queues import address as addresses
from meshinfer.inference.queues import door, silence
from meshinfer.inference.queues.address import TcpAddress
from meshinfer.inference.queues.client import QueueClient
from meshinfer.inference.queues.locate import FixedPlace
from meshinfer.inference.queues.proof import HELLO_BYTES, REPLY_BYTES
from meshinfer.testing import raises


@pytest.fixture
def transport() -> Iterator[TcpTransport]:
    with TcpTransport() as made:
        yield made


@pytest.fixture
def server(transport: TcpTransport) -> Iterator[InferenceServer]:
    with InferenceServer(roles.echo, transport) as running:
        yield running


def stranger(transport: TcpTransport) -> socket.socket:
    connection = socket.create_connection(
        (transport.address.host, transport.address.port), timeout=SECONDS
    )
    assert len(connection.recv(HELLO_BYTES, socket.MSG_WAITALL)) == HELLO_BYTES
    return connection


def ended(connection: socket.socket) -> bool:
    """Whether the other end has cut the stream, whatever it said before."""
    try:
        while connection.recv(1000):
            pass
    except ConnectionResetError:
        pass
    return True


# Where it listens.


def test_it_listens_on_one_interface_and_no_request_waits_for_another(
    transport: TcpTransport, server: InferenceServer
) -> None:
    mine = [each for each in psutil.Process().net_connections("tcp") if each.status == "LISTEN"]
    found = [each.laddr for each in mine if each.laddr.port == transport.address.port]
    assert [address.ip for address in found] == ["127.0.0.1"]
    client = server.client()
    client(numbers(1), SECONDS)
    connection = client._connection._socket  # type: ignore[attr-defined]
    assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1


def test_a_port_that_is_taken_and_an_address_of_nobody(transport: TcpTransport) -> None:
    with raises(ValueError, f"127.0.0.1:{transport.address.port}", "in use", "port="):
        TcpTransport(transport.address.port)
    nowhere = TcpAddress("203.0.113.1", 0, b"")  # for documentation only
    with raises(ValueError, "203.0.113.1", "host="):
        nowhere.listen()


def test_a_server_comes_back_at_its_port() -> None:
    transport = TcpTransport(unused_port())
    with InferenceServer(roles.echo, transport) as server:
        client = server.client()
        client(numbers(1), SECONDS)
    with raises(ServerClosedError):
        client(numbers(1), SECONDS)
    with InferenceServer(roles.echo, TcpTransport(transport.address.port)):
        assert int(client(numbers(2), SECONDS)["x"]) == 2
        client.close()


# Who comes.


def test_another_secret_is_refused_at_either_end(
    transport: TcpTransport, server: InferenceServer
) -> None:
    wrong = TcpAddress("127.0.0.1", transport.address.port, b"another")
    with (
        QueueClient(FixedPlace(wrong), SECONDS) as client,
        raises(RefusedError, "secret", str(wrong.port)),
    ):
        client(numbers(1), SECONDS)
    assert transport.num_clients == 0
    assert "another" not in repr(client)


@pytest.mark.parametrize(
    "bytes_sent", [b"GET / HTTP/1.1\r\n" * 10, bytes(REPLY_BYTES), os.urandom(1 << 16)]
)
def test_garbage_is_cut_off_and_hinders_nobody(
    transport: TcpTransport, server: InferenceServer, bytes_sent: bytes
) -> None:
    client = server.client()
    client(numbers(1), SECONDS)
    with stranger(transport) as connection:
        connection.sendall(bytes_sent)
        assert ended(connection)
    assert int(client(numbers(2), SECONDS)["x"]) == 2
    assert (transport.num_clients, transport.num_lost) == (1, 0)


@pytest.mark.parametrize("said", [b"", b"mi-queue00000001 and then silence"])
def test_strangers_that_stay_silent_keep_no_descriptor(
    transport: TcpTransport,
    server: InferenceServer,
    said: bytes,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    client = server.client()
    client(numbers(1), SECONDS)
    monkeypatch.setattr(door, "_JOIN_SECONDS", 0.3)
    before = len(os.listdir("/proc/self/fd"))
    strangers = [stranger(transport) for _ in range(20)]
    for each in strangers:
        each.sendall(said)
    assert int(client(numbers(2), SECONDS)["x"]) == 2
    assert all(map(ended, strangers))
    for each in strangers:
        each.close()
    assert wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before, SECONDS)
    told = "did not prove itself within 0.3 s"
    assert wait_until(lambda: caplog.text.count(told) == 20, SECONDS)
    assert int(client(numbers(3), SECONDS)["x"]) == 3, "who has proved itself stays"


def test_a_port_that_connects_to_itself_is_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """On Linux a connection to an unused local port may get that very port as its own, and hear itself."""
    connection = socket.socket()
    connection.bind(("127.0.0.1", 0))
    host, port = connection.getsockname()
    connection.connect((host, port))
    monkeypatch.setattr(addresses, "_connected", lambda *_: connection)
    with pytest.raises(ConnectionRefusedError):
        TcpAddress(host, port, b"").call(SECONDS)
    assert connection.fileno() == -1, "it is closed"


# Hosts that vanish.


def test_patience_with_a_vanished_host() -> None:
    idle, pause, count = (
        silence._KEEP_ALIVE[option]
        for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
    )
    assert idle + pause * count < 15
    assert silence._UNANSWERED_MS / 1000 + silence.LOOK_SECONDS < 15
    assert idle + pause < silence._UNANSWERED_MS / 1000, "an idle connection is no silent one"


def test_a_host_that_vanishes_is_missed_and_one_that_is_slow_is_not(tmp_path: Path) -> None:
    done = run(tmp_path, [sys.executable, str(Path(__file__).with_name("tcp_transport.py"))])
    if done.code == NO_NAMESPACES:
        unavailable(f"no network namespace of its own: {done.stdout.strip()}")
    assert done.code == 0, done
    lines = done.stdout.splitlines()
    assert [each.split()[0] for each in lines] == [
        "PeerLostError",
        "PeerLostError",
        "lost",
        "again",
    ]
    assert "does not answer" in lines[0]
    assert lines[2:] == ["lost 3", "again 0"]


# Payloads.


def test_20_mb_both_ways_while_others_are_served(server: InferenceServer) -> None:
    large, small = server.clients(2)
    sent = TensorDict({"x": torch.randint(0, 256, (20 << 20,), dtype=torch.uint8)})
    futures = [large.submit(sent) for _ in range(4)]
    assert int(small(numbers(7), SECONDS)["x"]) == 7
    assert all(future.result(SECONDS)["x"].equal(sent["x"]) for future in futures)


def test_many_clients_in_one_batch(transport: TcpTransport) -> None:
    sizes: list[int] = []

    def echo(batch: TensorDictBase) -> TensorDictBase:
        sizes.append(len(batch))
        return batch.clone()

    with InferenceServer(
        echo, transport, max_batch_size=64, min_batch_size=64, timeout=SECONDS
    ) as server:
        clients = server.clients(64)
        futures = [client.submit(numbers(value)) for value, client in enumerate(clients)]
        assert [int(future.result(SECONDS)["x"]) for future in futures] == list(range(64))
        assert transport.num_clients == 64
    assert sizes == [64]


def test_half_a_request_of_a_client_that_goes_is_dropped(
    transport: TcpTransport, server: InferenceServer, caplog: pytest.LogCaptureFixture
) -> None:
    client, other = server.clients(2)
    client(numbers(1), SECONDS)
    connection = client._connection  # type: ignore[attr-defined]
    connection._socket.sendall(bytes(range(8)) + bytes(8))  # a header has more bytes
    connection._socket.shutdown(socket.SHUT_WR)
    assert wait_until(lambda: transport.num_lost == 1, SECONDS)
    assert wait_until(lambda: "in the midst of a message" in caplog.text, SECONDS)
    assert int(other(numbers(2), SECONDS)["x"]) == 2


def test_a_server_that_ends_without_a_goodbye(transport: TcpTransport) -> None:
    client = transport.client()
    future = client.submit(numbers(1))
    assert transport.wait_for_work(SECONDS)
    waiting = threading.Timer(0.05, lambda: [each.cut() for each in transport._server()._all()])
    waiting.start()
    began = time.monotonic()
    with raises(PeerLostError, str(transport.address.port)):
        future.result()
    assert time.monotonic() - began < SECONDS
    waiting.join()
