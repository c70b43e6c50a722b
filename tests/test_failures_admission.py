"""Who is turned away and why, and what strangers can do to a private store."""

from __future__ import annotations

import json
import os
import pickle
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from failure_roles import (
    SECONDS,
    SECRET,
    WHO,
    Doubler,
    Held,
    ask,
    connect,
    crew,
    port_of,
    reply,
    request,
    serving,
)
from support import wait_until
from tensordict import TensorDict

import meshinfer
from meshinfer import DistributedTransport, InferenceServer, RefusedError
from meshinfer.inference.distributed.join import JOIN_QUEUE, answer_queue, open_sealed, seal
from meshinfer.rendezvous import connect_store

REFUSED = 9


@pytest.fixture
def server() -> Iterator[InferenceServer]:
    """With one client that was served before and is served after whatever the test does."""
    policy = Doubler()
    with serving(policy) as server, server.client() as client:
        ask(client, 1)
        yield server
        ask(client, 2, SECONDS)
        assert server.stats().clients == 1
        assert server.stats().errors == 0
        assert policy.served[REFUSED] == 0, "a refused client was served"


def refusal(port: int, request_spec: Any, response_spec: Any, secret: str = SECRET) -> str:
    transport = DistributedTransport(
        request_spec, response_spec, role="client", port=port, secret=secret
    )
    with transport.client() as client:
        payload = request_spec.apply(lambda leaf: torch.full_like(leaf, REFUSED * WHO))
        for _ in range(2):  # it stays refused
            with pytest.raises(RefusedError) as caught:
                client(payload, SECONDS)
    return str(caught.value)


WRONG_REQUESTS = {
    "shape": TensorDict({"x": torch.zeros(2, dtype=torch.int64)}, []),
    "dtype": TensorDict({"x": torch.zeros(1, dtype=torch.int32)}, []),
    "extra": TensorDict({"x": torch.zeros(1, dtype=torch.int64), "more": torch.zeros(1)}, []),
    "renamed": TensorDict({"z": torch.zeros(1, dtype=torch.int64)}, []),
}
NAMED = {"shape": "x", "dtype": "int32", "extra": "more", "renamed": "z"}


@pytest.mark.parametrize("wrong", WRONG_REQUESTS)
def test_another_request_spec_is_refused_by_the_key_that_differs(
    server: InferenceServer, wrong: str
) -> None:
    reason = refusal(port_of(server), WRONG_REQUESTS[wrong], reply())
    assert NAMED[wrong] in reason
    assert "request" in reason


def test_another_response_spec_is_refused_by_the_key_that_differs(server: InferenceServer) -> None:
    wrong = TensorDict({"y": torch.zeros(1)}, [])
    reason = refusal(port_of(server), request(0), wrong)
    assert "y" in reason
    assert "float32" in reason
    assert "int64" in reason
    assert "response" in reason


def test_another_batch_size_is_refused(server: InferenceServer) -> None:
    reason = refusal(port_of(server), request(0).expand(4), reply().expand(4))
    assert "4" in reason


def test_another_version_is_refused_in_another_process(server: InferenceServer) -> None:
    with crew(1) as (worker,):
        worker.begin(connect_with_version, port_of(server))
        error = worker.outcome().error
    assert isinstance(error, RefusedError)
    assert "99.0" in str(error)
    assert meshinfer.__version__ in str(error)


def connect_with_version(station: Any, port: int) -> None:
    with mock.patch.object(meshinfer, "__version__", "99.0"):
        connect(station, port)


def test_a_wrong_secret_is_refused(server: InferenceServer) -> None:
    reason = refusal(port_of(server), request(0), reply(), secret="another secret")
    assert "secret" in reason
    assert SECRET not in reason


def test_the_client_of_another_server_is_refused_by_the_secret_of_its_job() -> None:
    with serving(Doubler(), secret="one") as one, serving(Doubler(), secret="two") as two:
        for own, other in ((one, two), (two, one)):
            secret = "one" if own is one else "two"
            assert "secret" in refusal(port_of(other), request(0), reply(), secret)
            with own.client() as client:
                ask(client, 1)


def test_many_refused_clients_cost_the_server_nothing(server: InferenceServer) -> None:
    counts = []
    for _ in range(3):
        for _ in range(5):
            refusal(port_of(server), WRONG_REQUESTS["shape"], reply())
        counts.append(Held.by(server))
    assert wait_until(lambda: Held.by(server).threads <= counts[0].threads, SECONDS)
    assert wait_until(lambda: Held.by(server).descriptors <= counts[0].descriptors, SECONDS)


class Bomb:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def whole_hello(**fields: Any) -> dict[str, Any]:
    whole = {
        "identity": {"rank": 1, "index": 0},
        "nonce": "0" * 32,
        "version": meshinfer.__version__,
        "request": {"fingerprint": "?"},
        "response": {"fingerprint": "?"},
        "host": "nowhere",
        "pid": 1,
    }
    return {**whole, **fields}


FORGED = {"identity": {"rank": 1, "index": 0}, "nonce": "0" * 32}
UNSEALED = b"0" * 64
GARBAGE = {
    "nothing": b"",
    "one byte": b"x",
    "random": os.urandom(1000),
    "a megabyte": os.urandom(1_000_000),
    "an empty object": UNSEALED + b"{}",
    "a list": UNSEALED + b"[]",
    "null": UNSEALED + b"null",
    "deeply nested": UNSEALED + b"[" * 100_000,
    "half a hello": UNSEALED + json.dumps(FORGED).encode(),
    "no nonce": UNSEALED + json.dumps({**whole_hello(), "nonce": None}).encode(),
    "no identity": UNSEALED + json.dumps({**whole_hello(), "identity": None}).encode(),
    "odd version": UNSEALED + json.dumps(whole_hello(version=[])).encode(),
    "another secret": seal(b"another", "hello", whole_hello()),
    "sealed: nothing": seal(SECRET.encode(), "hello", {}),
    "sealed: half": seal(SECRET.encode(), "hello", FORGED),
    "sealed: nonce": seal(SECRET.encode(), "hello", whole_hello(nonce=5)),
    "sealed: empty layout": seal(SECRET.encode(), "hello", whole_hello(request={})),
    "sealed: no layout": seal(SECRET.encode(), "hello", whole_hello(request=None)),
    "sealed: another layout": seal(SECRET.encode(), "hello", whole_hello()),
    "sealed: rank": seal(SECRET.encode(), "hello", whole_hello(identity={"rank": [], "index": 0})),
    "for another purpose": seal(SECRET.encode(), "answer", whole_hello()),
}


def push(server: InferenceServer, data: bytes) -> None:
    address = server.transport.address
    store = connect_store(address.host, address.port, SECONDS, awaited="the server")
    store.queue_push(JOIN_QUEUE, data)


def assert_newcomers_are_served(server: InferenceServer) -> None:
    with server.client() as newcomer:
        ask(newcomer, 3, SECONDS)
    assert wait_until(lambda: server.stats().clients == 1, SECONDS)


@pytest.mark.parametrize("kind", GARBAGE)
def test_garbage_in_the_store_ends_nothing(server: InferenceServer, kind: str) -> None:
    push(server, GARBAGE[kind])
    assert_newcomers_are_served(server)


def test_nothing_that_a_stranger_wrote_is_unpickled(
    server: InferenceServer, tmp_path: Path
) -> None:
    bomb = pickle.dumps(Bomb(str(tmp_path / "exploded")))
    for data in (bomb, UNSEALED + bomb, seal(b"another", "hello", {}) + bomb):
        push(server, data)
    assert_newcomers_are_served(server)
    assert not (tmp_path / "exploded").exists()


def test_a_hello_of_another_version_is_refused_whatever_its_fields_are(
    server: InferenceServer,
) -> None:
    """A later version will say other things in its hello; it must still be told why it is refused."""
    address = server.transport.address
    fields = {**whole_hello(version="99.0"), "news": 1}
    del fields["host"]
    push(server, seal(SECRET.encode(), "hello", fields))
    store = connect_store(address.host, address.port, SECONDS, awaited="the server")
    answer = open_sealed(
        SECRET.encode(), f"answer/{fields['nonce']}", store.queue_pop(answer_queue(fields["nonce"]))
    )
    assert answer is not None
    assert "99.0" in answer["refused"]


def test_bytes_on_the_port_that_no_store_speaks_end_nothing(server: InferenceServer) -> None:
    address = server.transport.address
    for data in (b"GET / HTTP/1.0\r\n\r\n", os.urandom(10_000), b"\0" * 1000, b""):
        with socket.create_connection((address.host, address.port), timeout=SECONDS) as stranger:
            stranger.sendall(data)
    assert_newcomers_are_served(server)


def test_the_store_listens_on_one_interface(server: InferenceServer) -> None:
    address = server.transport.address
    assert address.host == "127.0.0.1"
    with pytest.raises(OSError), socket.create_connection(("127.0.0.2", address.port), timeout=1.0):  # noqa: PT011
        pass
