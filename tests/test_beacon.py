"""The beacon of rank 0: who finds it, who is passed over, and what is left when it goes out."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count

import psutil
import pytest
from support import wait_until

from meshinfer.errors import MeshError
from meshinfer.mesh.beacon import HEAD, MAGIC, Beacon, Key, candidate_ports
from meshinfer.mesh.knocking import Search

HOST = f"127.{64 + os.getpid() // 65536 % 64}.{os.getpid() // 256 % 256}.{os.getpid() % 256}"
"""A loopback address of this process: whatever listens elsewhere on the machine has other ones."""
SECONDS = 60.0
MINE, OTHER = Key("mine", None), Key("other", None)

_numbers = count()


@pytest.fixture
def ports() -> list[int]:
    """Ports that no other test has."""
    return candidate_ports(f"{os.getpid()}/{next(_numbers)}")


@contextmanager
def lit(key: Key, ports: list[int], *addresses: str, **content: object) -> Iterator[Beacon]:
    beacon = Beacon(key, addresses or (HOST,), ports, content)
    try:
        yield beacon
    finally:
        beacon.close()


@contextmanager
def stranger(port: int, answer: Callable[[socket.socket], None] | None = None) -> Iterator[None]:
    """Something else that listens: silent by default, else ``answer`` is called with each connection."""
    with ExitStack() as held, socket.create_server((HOST, port)) as listener:
        ended = threading.Event()

        def serve() -> None:
            while not ended.is_set():
                connection = held.enter_context(listener.accept()[0])
                if answer is not None and not ended.is_set():
                    answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            socket.create_connection((HOST, port)).close()
            thread.join()


def find(key: Key, ports: list[int], timeout: float = SECONDS) -> object:
    return Search(key, HOST, ports).run(timeout)


def descriptors() -> int:
    return psutil.Process().num_fds()


# --- Ports ---------------------------------------------------------------------------------------


def test_ports_follow_from_the_identity() -> None:
    ports = candidate_ports("a job")
    assert ports == candidate_ports("a job")
    assert len(ports) == len(set(ports)) == 8
    assert all(61000 <= port < 65536 for port in ports)
    assert ports != candidate_ports("another job")


def test_a_port_of_the_user_is_left_to_the_user() -> None:
    ports = candidate_ports("a job")
    without = candidate_ports("a job", [ports[0]])
    assert ports[0] not in without
    assert without[:7] == ports[1:], "a rank that does not know of it looks at the same ports"


# --- Finding -------------------------------------------------------------------------------------


def test_a_beacon_is_found_and_tells_its_content(ports: list[int]) -> None:
    before = descriptors()
    with lit(MINE, ports, port=7, host="x"):
        for _ in range(3):
            assert find(MINE, ports) == {"port": 7, "host": "x"}
    assert wait_until(lambda: descriptors() <= before, SECONDS)


def test_a_beacon_that_is_lit_later_is_waited_for(ports: list[int]) -> None:
    found: list[object] = []
    asking = threading.Thread(target=lambda: found.append(find(MINE, ports)))
    asking.start()
    with lit(MINE, ports, port=7):
        asking.join(SECONDS)
    assert found == [{"port": 7}]


def test_nobody_is_there(ports: list[int]) -> None:
    assert find(MINE, ports, timeout=0.1) is None
    search = Search(MINE, HOST, ports)
    began = time.monotonic()
    assert search.run(SECONDS, once=True) is None
    assert time.monotonic() - began < SECONDS / 2
    assert search.deserted
    assert str(search).startswith(f"nothing listens at {ports[0]}, ")


def test_two_jobs_on_the_same_ports_do_not_meet(ports: list[int]) -> None:
    with lit(MINE, ports, job=1) as mine, lit(OTHER, ports, job=2) as other:
        assert [beacon.addresses for beacon in (mine, other)] == [
            [(HOST, ports[0])],
            [(HOST, ports[1])],
        ]
        for _ in range(20):
            assert find(MINE, ports) == {"job": 1}
            assert find(OTHER, ports) == {"job": 2}
        assert find(Key("third", None), ports, timeout=0.3) is None


def garbage(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 100)


def half(connection: socket.socket) -> None:
    connection.sendall(HEAD.pack(MAGIC, bytes(32), bytes(32), 999) + b"{")


def echo(connection: socket.socket) -> None:
    connection.sendall(connection.recv(1000))


def forged(connection: socket.socket) -> None:
    content = b'{"job": 666}'
    connection.sendall(HEAD.pack(MAGIC, bytes(32), bytes(32), len(content)) + content)


def hang_up(connection: socket.socket) -> None:
    connection.close()


@pytest.mark.parametrize("answer", [None, garbage, half, echo, forged, hang_up])
def test_a_stranger_is_passed_over(
    ports: list[int], answer: Callable[[socket.socket], None] | None
) -> None:
    with stranger(ports[0], answer), stranger(ports[2]), lit(MINE, ports, job=1) as beacon:
        assert beacon.addresses == [(HOST, ports[1])]
        began = time.monotonic()
        assert find(MINE, ports) == {"job": 1}
        assert time.monotonic() - began < SECONDS / 4


def test_an_answer_to_somebody_else_proves_nothing(ports: list[int]) -> None:
    with lit(MINE, ports, job=1), socket.create_connection((HOST, ports[0])) as asking:
        asking.sendall(MAGIC + bytes(32))
        answer = asking.recv(1000)
    with stranger(ports[0], lambda connection: connection.sendall(answer)):
        assert find(MINE, ports, timeout=0.3) is None


@pytest.mark.parametrize(("mine", "theirs"), [(b"a", b"b"), (None, b"b"), (b"a", None)])
def test_another_secret_is_told(ports: list[int], mine: bytes | None, theirs: bytes | None) -> None:
    with (
        lit(Key("mine", theirs), ports),
        pytest.raises(MeshError, match=r"another secret .*MESHINFER_SECRET"),
    ):
        find(Key("mine", mine), ports)


def test_the_right_secret_is_found_beside_a_wrong_one(ports: list[int]) -> None:
    mine = Key("mine", b"secret")
    with lit(Key("mine", b"guess"), ports, job=666), lit(mine, ports, job=1):
        for _ in range(5):
            assert find(mine, ports) == {"job": 1}


# --- Answering -----------------------------------------------------------------------------------


def test_visitors_that_say_nothing_hold_nobody_up(ports: list[int]) -> None:
    with lit(MINE, ports, job=1), ExitStack() as held:
        for said in (b"", b"GET / HTTP/1.1\r\n\r\n", MAGIC[:3], MAGIC, MAGIC + b"x"):
            visitor = held.enter_context(socket.create_connection((HOST, ports[0])))
            visitor.sendall(said)
        assert find(MINE, ports) == {"job": 1}


def test_many_at_once(ports: list[int]) -> None:
    found: list[object] = []
    with lit(MINE, ports, job=1):
        asking = [
            threading.Thread(target=lambda: found.append(find(MINE, ports))) for _ in range(40)
        ]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join(SECONDS)
    assert found == [{"job": 1}] * 40


def test_it_listens_on_the_addresses_that_it_was_given(ports: list[int]) -> None:
    with lit(MINE, ports, HOST, "127.0.0.9", HOST, job=1) as beacon:
        assert beacon.addresses == [(HOST, ports[0]), ("127.0.0.9", ports[0])]
        assert Search(MINE, "127.0.0.9", ports).run(SECONDS) == {"job": 1}
        assert Search(MINE, "127.0.0.8", ports).run(0.2) is None


def test_an_address_of_another_host(ports: list[int]) -> None:
    with pytest.raises(MeshError, match=r"192\.0\.2\.1 at .*host= of init_mesh"):
        Beacon(MINE, ["192.0.2.1"], ports, {})
    with lit(MINE, ports, "192.0.2.1", HOST) as beacon:
        assert beacon.addresses == [(HOST, ports[0])]


def test_all_ports_are_taken(ports: list[int]) -> None:
    with ExitStack() as held:
        for port in ports:
            held.enter_context(stranger(port))
        before = descriptors()
        with pytest.raises(MeshError, match=rf"all of its ports .* {ports[3]}.*MESHINFER_JOB_ID"):
            Beacon(MINE, [HOST], ports, {})
        assert wait_until(lambda: descriptors() <= before, SECONDS)


def test_a_closed_beacon_frees_its_port(ports: list[int]) -> None:
    for _ in range(3):
        beacon = Beacon(MINE, [HOST], ports, {})
        assert beacon.addresses == [(HOST, ports[0])]
        beacon.close()
        beacon.close()
    assert find(MINE, ports, timeout=0.05) is None


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_does_not_keep_the_port(ports: list[int]) -> None:
    port = ports[0]
    beacon = Beacon(MINE, [HOST], [port], {})
    child = os.fork()
    if not child:
        time.sleep(SECONDS)
        os._exit(0)
    try:
        beacon.close()
        assert wait_until(lambda: is_free(port), SECONDS / 2)
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex((HOST, port)) != 0
