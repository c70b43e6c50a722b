"""Private stores, the interface they listen on, the directory, and what cannot be reached."""

from __future__ import annotations

import gc
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from mesh_jobs import plain, run, running
from mesh_ranks import REQUEST, RESPONSE, Plus, ask
from support import deaf_port, unused_port, wait_until
from torch.distributed import DistNetworkError, TCPStore

import meshinfer
from meshinfer import (
    DistributedTransport,
    InferenceServer,
    MeshError,
    ServerClosedError,
    rendezvous,
)
from meshinfer.rendezvous import (
    INTERFACE_VARIABLE,
    Directory,
    PrivateStore,
    ServerAddress,
    choose_address,
    connect_store,
    resolve,
)

TESTS = Path(__file__).resolve().parent
SOMEWHERE = ServerAddress("127.0.0.1", 1, b"secret")
SECONDS = 60.0
"""For what must happen, but whose speed no test asserts; deadlines that are shorter have been kept within so many."""


@pytest.fixture(autouse=True)
def no_interface_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(INTERFACE_VARIABLE, raising=False)


def listening() -> set[tuple[str, int]]:
    """Where this process listens."""
    return {
        (found.laddr.ip, found.laddr.port)
        for found in psutil.Process().net_connections("tcp")
        if found.status == psutil.CONN_LISTEN
    }


def outer_address() -> str | None:
    """An address of this host that is not loopback."""
    for name, addresses in psutil.net_if_addrs().items():
        for address in addresses:
            if address.family == socket.AF_INET and not address.address.startswith("127."):
                assert name
                return address.address
    return None


@contextmanager
def directory() -> Iterator[Directory]:
    store = PrivateStore("127.0.0.1")
    yield Directory(store.host, store.port, "test")
    store.close()


# --- Which address -------------------------------------------------------------------------------


def test_the_argument_wins_over_variable_and_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INTERFACE_VARIABLE, "no_such_interface")
    assert choose_address("127.0.0.2", reach=("192.0.2.1", 80)) == "127.0.0.2"
    assert choose_address("lo", reach=("192.0.2.1", 80)) == "127.0.0.1"


@pytest.mark.parametrize("value", ["lo", "lo,eth0", " lo "])
def test_the_variable_wins_over_the_route(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv(INTERFACE_VARIABLE, value)
    assert choose_address(reach=("192.0.2.1", 80)) == "127.0.0.1"


def test_the_route_to_the_master_is_taken() -> None:
    outer = outer_address()
    if outer is None:
        pytest.skip("this host has loopback only")
    assert choose_address(reach=(outer, 80)) == outer
    assert choose_address(reach=("127.0.0.1", 80)) == "127.0.0.1"


def test_an_empty_variable_is_no_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INTERFACE_VARIABLE, "")
    assert choose_address() == "127.0.0.1"


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "::"])
def test_a_wildcard_is_refused(monkeypatch: pytest.MonkeyPatch, wildcard: str) -> None:
    with pytest.raises(MeshError, match=f"{wildcard}.*one interface or one address"):
        choose_address(wildcard)
    monkeypatch.setenv(INTERFACE_VARIABLE, wildcard)
    with pytest.raises(MeshError, match=f"{INTERFACE_VARIABLE}.*one interface or one address"):
        choose_address()
    with pytest.raises(MeshError, match="one interface or one address"):
        DistributedTransport(REQUEST, RESPONSE, host=wildcard)


@pytest.mark.parametrize("wildcard", ["0.0.0.0", "::"])
def test_a_client_cannot_be_sent_to_the_wildcard(wildcard: str) -> None:
    error, seconds = ask_in_vain(wildcard, 5, timeout=SECONDS)
    assert isinstance(error, MeshError)
    assert seconds < SECONDS / 2, "it was tried"
    assert f"policy server cannot be reached at {wildcard}" in str(error)
    assert "give an address of its host" in str(error)


@pytest.mark.parametrize("name", ["no_such_nic", "an_interface_name_that_is_too_long"])
def test_an_unknown_interface_lists_those_that_exist(name: str) -> None:
    with pytest.raises(MeshError, match=rf"{name}.*there are: .*\blo\b"):
        choose_address(name)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.1.1", "::1", "lo"])
def test_loopback_cannot_span_hosts(address: str) -> None:
    with pytest.raises(MeshError, match=f"loopback.*interface=.*{INTERFACE_VARIABLE}"):
        choose_address(address, spans_hosts=True)
    with pytest.raises(MeshError, match="loopback"):
        choose_address(reach=("127.0.0.1", 80), spans_hosts=True)


def test_a_mesh_that_spans_hosts_refuses_a_loopback_master() -> None:
    mesh = meshinfer.init_mesh(
        rank=0, world_size=2, local_world_size=1, host="localhost", port=unused_port()
    )
    with pytest.raises(MeshError, match=f"loopback.*{INTERFACE_VARIABLE}"):
        mesh.transport(REQUEST, RESPONSE)
    mesh.close()


# --- What listens --------------------------------------------------------------------------------


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.5"])
def test_a_store_listens_on_one_address(host: str) -> None:
    before = listening()
    store = PrivateStore(host)
    assert listening() - before == {(host, store.port)}
    store.close()
    assert wait_until(lambda: listening() <= before, SECONDS)


def test_store_and_pairs_of_a_server_listen_on_one_address() -> None:
    before = listening()
    transport = DistributedTransport(REQUEST, RESPONSE, host="127.0.0.3", secret="job")
    opened = listening() - before
    assert {ip for ip, _ in opened} == {"127.0.0.3"}
    assert len(opened) == 2  # the store, and gloo's device
    with (
        InferenceServer(Plus(1.0), transport),
        DistributedTransport(
            REQUEST,
            RESPONSE,
            role="client",
            host="127.0.0.3",
            port=transport.address.port,
            secret="job",
            interface="127.0.0.4",
        ).client() as client,
    ):
        assert ask(client, 1) == [1.0] * 5
        assert {ip for ip, _ in listening() - before} == {"127.0.0.3", "127.0.0.4"}


def test_ipv6() -> None:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError as error:
        pytest.skip(f"no IPv6 loopback: {error}")
    before = listening()
    transport = DistributedTransport(REQUEST, RESPONSE, host="::1")
    with InferenceServer(Plus(1.0), transport), transport.client() as client:
        assert ask(client, 1) == [1.0] * 5
        assert {ip for ip, _ in listening() - before} == {"::1"}


def test_a_port_that_is_taken() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(MeshError, match=rf"cannot listen on 127\.0\.0\.1:{port}.*port=0"):
            DistributedTransport(REQUEST, RESPONSE, port=port)


def test_an_address_of_another_host() -> None:
    with pytest.raises(MeshError, match=r"cannot listen on 192\.0\.2\.1:0.*address of this host"):
        DistributedTransport(REQUEST, RESPONSE, host="192.0.2.1")


# --- What cannot be reached ----------------------------------------------------------------------


def ask_in_vain(host: str, port: int, timeout: float = 2.0) -> tuple[Exception, float]:
    transport = DistributedTransport(
        REQUEST, RESPONSE, role="client", host=host, port=port, secret="job", timeout=timeout
    )
    began = time.monotonic()
    with transport.client() as client, pytest.raises((TimeoutError, MeshError)) as caught:
        client(REQUEST)
    return caught.value, time.monotonic() - began


def test_nobody_listens() -> None:
    with deaf_port() as port:
        error, seconds = ask_in_vain("127.0.0.1", port)
    assert seconds < SECONDS
    assert f"127.0.0.1:{port}" in str(error)
    assert "policy server" in str(error)
    assert "refused" in str(error)


def test_what_is_left_of_a_timeout_is_told_in_round_numbers() -> None:
    with pytest.raises(TimeoutError, match=r"waited 0\.3 s for a store at"):
        connect_store("127.0.0.1", unused_port(), 0.299995, awaited="a store")


def test_a_host_that_does_not_resolve() -> None:
    error, seconds = ask_in_vain("no-such-host.invalid", 5)
    assert seconds < SECONDS
    assert "'no-such-host.invalid' does not resolve" in str(error)


def test_something_else_listens() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        error, seconds = ask_in_vain("127.0.0.1", port := silent.getsockname()[1])
    assert seconds < SECONDS
    assert f"127.0.0.1:{port}" in str(error)
    assert "something else listening" in str(error)


def test_a_stopped_server(tmp_path: Path) -> None:
    command = [sys.executable, str(TESTS / "mesh_stopped.py")]
    with running(tmp_path, command) as (job,):
        assert wait_until((job.folder / "server.json").exists, SECONDS)
        port = int((job.folder / "server.json").read_text().split(":")[1].strip(" }"))
        os.kill(job.process.pid, signal.SIGSTOP)
        error, seconds = ask_in_vain("127.0.0.1", port)
        assert seconds < SECONDS
        assert f"127.0.0.1:{port}" in str(error)
        assert "policy server" in str(error)


def test_the_jobs_store_cannot_be_reached() -> None:
    began = time.monotonic()
    with (
        deaf_port() as port,
        pytest.raises(TimeoutError, match=rf"job's store at 127\.0\.0\.1:{port}"),
    ):
        Directory("127.0.0.1", port, "test").lookup("policy", timeout=1.0, secret=None)
    assert time.monotonic() - began < SECONDS


def test_names_resolve_to_numbers() -> None:
    assert resolve("localhost") == "127.0.0.1"
    assert resolve("127.0.0.9", 5) == "127.0.0.9"


# --- The directory -------------------------------------------------------------------------------


def test_what_is_published_is_found() -> None:
    with directory() as known:
        known.publish("a", SOMEWHERE, timeout=SECONDS, with_secret=True)
        known.publish("b", SOMEWHERE, timeout=SECONDS, with_secret=False)
        assert known.lookup("a", timeout=SECONDS, secret=None) == SOMEWHERE
        mine = known.lookup("b", timeout=SECONDS, secret=b"mine")
        assert mine == ServerAddress(SOMEWHERE.host, SOMEWHERE.port, b"mine")
        with pytest.raises(MeshError, match=r"secret of its own.*MESHINFER_SECRET"):
            known.lookup("b", timeout=SECONDS, secret=None)


def test_a_lookup_waits_for_the_publication() -> None:
    with directory() as known, ThreadPoolExecutor(1) as pool:
        looking = pool.submit(known.lookup, "late", timeout=SECONDS, secret=None)
        for timeout in (0.2, 2.0, 20.0):  # a busy machine may need the first for the connection
            with pytest.raises(TimeoutError, match=r"store at 127\.0\.0\.1") as caught:
                known.lookup("late", timeout=timeout, secret=None)
            if "'late'" in str(caught.value):
                break
        assert "'late'" in str(caught.value)
        known.publish("late", SOMEWHERE, timeout=SECONDS, with_secret=True)
        assert looking.result(SECONDS) == SOMEWHERE


def test_what_is_withdrawn_has_closed() -> None:
    with directory() as known:
        known.publish("a", SOMEWHERE, timeout=SECONDS, with_secret=True)
        known.withdraw("a", timeout=SECONDS)
        with pytest.raises(ServerClosedError, match="'a' has shut down"):
            known.lookup("a", timeout=SECONDS, secret=None)
        known.publish("a", SOMEWHERE, timeout=SECONDS, with_secret=True)
        assert known.lookup("a", timeout=SECONDS, secret=None) == SOMEWHERE


def test_attempts_of_a_job_do_not_see_each_other() -> None:
    with directory() as known:
        known.publish("a", SOMEWHERE, timeout=SECONDS, with_secret=True)
        other = Directory(known.host, known.port, "attempt1")
        with pytest.raises(TimeoutError):
            other.lookup("a", timeout=0.2, secret=None)


def serving(known: Directory, constant: float) -> InferenceServer:
    return InferenceServer(
        Plus(constant), DistributedTransport(REQUEST, RESPONSE, directory=known)
    ).start()


def test_a_client_gets_over_a_stale_publication() -> None:
    """The server before left its address, but is not there any more."""
    with directory() as known, deaf_port() as port, ThreadPoolExecutor(1) as pool:
        stale = ServerAddress("127.0.0.1", port, b"old")
        known.publish("policy", stale, timeout=SECONDS, with_secret=True)
        client = DistributedTransport(
            REQUEST, RESPONSE, role="client", directory=known, timeout=SECONDS
        ).client()
        with client:
            asking = pool.submit(ask, client, 1)
            with pytest.raises(FutureTimeoutError):
                asking.result(0.5)
            with serving(known, 3.0):
                assert asking.result(SECONDS) == [3.0] * 5


def test_a_client_finds_a_server_that_came_back_elsewhere() -> None:
    with directory() as known:
        client = DistributedTransport(
            REQUEST, RESPONSE, role="client", directory=known, timeout=SECONDS
        ).client()
        with client:
            for constant in (1.0, 2.0):
                with serving(known, constant):
                    assert ask(client, 1) == [constant] * 5
                with pytest.raises(ServerClosedError):
                    client(REQUEST, timeout=SECONDS)


def test_a_server_outlives_the_directory() -> None:
    with directory() as known:
        server = serving(known, 1.0)
    server.shutdown()
    assert not server.is_alive


# --- Stores that come and go ---------------------------------------------------------------------


def test_a_closed_store_lets_go() -> None:
    store = PrivateStore("127.0.0.1")
    connection = connect_store(store.host, store.port, SECONDS, awaited="a store")
    connection.set("key", "value")
    assert store.is_open
    assert "key" in "".join(store.keys())
    del connection
    store.close()
    store.close()
    assert not store.is_open
    assert store.keys() == []
    with pytest.raises(TimeoutError, match="a store at"):
        connect_store(store.host, store.port, 0.3, awaited="a store")


def test_a_connection_that_torch_gives_up_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch asks a name server while it connects, and gives up when the answer comes late; here every second time."""
    turns = itertools.count()

    def connect(*arguments: Any, is_master: bool, **options: Any) -> TCPStore:
        if not is_master and next(turns) % 2 == 0:
            raise DistNetworkError("The client socket has timed out after 6000ms")
        return TCPStore(*arguments, is_master=is_master, **options)

    monkeypatch.setattr(rendezvous, "TCPStore", connect)
    transport = DistributedTransport(REQUEST, RESPONSE, host="127.0.0.1")
    with InferenceServer(Plus(7.0), transport) as server, ThreadPoolExecutor(4) as pool:
        clients = server.clients(4)
        assert list(pool.map(lambda client: ask(client, 1.0, 1), clients)) == [[7.0]] * 4
        for client in clients:
            client.close()


def test_a_store_that_cannot_be_reached_in_time_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    store = PrivateStore("127.0.0.1")

    def connect(*arguments: Any, **options: Any) -> TCPStore:
        raise DistNetworkError("The client socket has timed out after 6000ms")

    monkeypatch.setattr(rendezvous, "TCPStore", connect)
    with pytest.raises(
        TimeoutError, match=rf"127\.0\.0\.1:{store.port}.*within 0\.2 s.*name server"
    ):
        store.connect(0.2)
    store.close()
    with pytest.raises(TimeoutError, match="refused"):  # long before the 30 s are over
        store.connect(30.0)


@pytest.mark.slow
def test_no_port_is_lost_when_many_jobs_start_at_once(tmp_path: Path) -> None:
    ended = run(tmp_path, [sys.executable, str(TESTS / "mesh_storm.py"), "12", "2", "2"])
    assert ended.code == 0, str(ended)
    assert ended.results["storm"]["failed"] == [0, 0], str(ended)
    assert "Traceback" not in ended.stderr


def descriptors() -> int:
    return psutil.Process().num_fds()


def test_stores_come_and_go_in_many_threads() -> None:
    def client(address: ServerAddress, gate: threading.Barrier) -> list[float]:
        gate.wait(SECONDS)
        where: dict[str, Any] = {"port": address.port, "secret": address.secret}
        transport = DistributedTransport(REQUEST, RESPONSE, role="client", timeout=SECONDS, **where)
        with transport.client() as asking:
            return ask(asking, 1, times=1)

    def server(gate: threading.Barrier) -> None:
        gate.wait(SECONDS)
        with InferenceServer(Plus(5.0), DistributedTransport(REQUEST, RESPONSE)):
            return

    def one_round(pool: ThreadPoolExecutor) -> None:
        gate = threading.Barrier(17)
        with InferenceServer(Plus(2.0), DistributedTransport(REQUEST, RESPONSE)) as serving:
            address = serving.transport.address
            other = pool.submit(server, gate)
            asked = [pool.submit(client, address, gate) for _ in range(16)]
            assert [each.result(SECONDS) for each in asked] == [[2.0]] * 16
            other.result(SECONDS)

    with ThreadPoolExecutor(17) as pool:
        one_round(pool)
        gc.collect()
        threads, before = psutil.Process().num_threads(), descriptors()
        for _ in range(5):
            one_round(pool)
        gc.collect()
        assert wait_until(lambda: psutil.Process().num_threads() <= threads, SECONDS)
        assert wait_until(lambda: descriptors() <= before, SECONDS)


# --- Two hosts -----------------------------------------------------------------------------------


@contextmanager
def two_hosts() -> Iterator[list[str]]:
    """Two network namespaces joined by a cable; their names. Their ends are called as they are."""
    names = [f"mi{os.getpid()}{side}" for side in "ab"]
    commands = [f"ip netns add {name}" for name in names]
    commands.append(f"ip link add {names[0]} netns {names[0]} type veth peer {names[1]}")
    commands.append(f"ip link set {names[1]} netns {names[1]}")
    for number, name in enumerate(names, 1):
        commands.append(f"ip -n {name} address add 10.77.0.{number}/24 dev {name}")
        commands += [f"ip -n {name} link set {end} up" for end in (name, "lo")]
    try:
        for command in commands:
            done = subprocess.run(command.split(), capture_output=True, text=True, timeout=10)
            if done.returncode:
                pytest.skip(f"{command}: {done.stderr.strip()}")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=10)


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
@pytest.mark.skipif(shutil.which("ip") is None, reason="needs the ip command of iproute2")
def test_two_hosts(tmp_path: Path) -> None:
    with two_hosts() as hosts:
        commands = [
            plain("namespaced", str(rank), "10.77.0.1", "29777", host, f"10.77.0.{rank + 1}")
            for rank, host in enumerate(hosts)
        ]
        with running(tmp_path, *commands) as jobs:
            ended = [job.end() for job in jobs]
    assert [each.code for each in ended] == [0, 0], "\n".join(map(str, ended))
    server, client = (each.results[f"rank{rank}"] for rank, each in enumerate(ended))
    for way in ("default", "variable", "named", "numeric"):
        assert server[way] == "10.77.0.1"
        assert client[way] == [100.0] * 5
    assert "loopback" in server["loopback"]["error"]
    assert INTERFACE_VARIABLE in server["loopback"]["error"]
    assert client["loopback"]["error"]
    assert client["loopback"]["seconds"] < 15, "it was given 3 s, and a busy machine"
