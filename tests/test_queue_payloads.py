"""What the queue between processes carries, and how it lies on the stream."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import wait_until
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack, tensorclass

import meshinfer
from meshinfer import (
    InferenceServer,
    MPTransport,
)
from meshinfer.inference.queues.wire import (
    BadFrameError,
    FrameReader,
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


# Payloads.


class Instruction:
    """Something that is no tensor."""

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Instruction) and other.words == self.words

    __hash__ = None  # type: ignore[assignment]


@tensorclass
class Observation:
    pixels: torch.Tensor
    goal: str


def test_what_is_no_tensor_arrives_in_requests_and_replies() -> None:
    seen: list[Any] = []

    def policy(batch: TensorDictBase) -> TensorDictBase:
        seen.extend(batch["task"])
        return TensorDict(
            {"x": batch["x"] + 1, "note": NonTensorData("done", batch_size=batch.batch_size)},
            batch_size=batch.batch_size,
        )

    with MPTransport() as transport, InferenceServer(policy, transport) as server:
        client = server.client()
        for task in ("open the door", Instruction(["a", "b"]), {"nested": [1, None]}):
            reply = client(TensorDict({"x": torch.zeros(2), "task": NonTensorData(task)}), SECONDS)
            assert reply["x"].tolist() == [1, 1]
            assert reply["note"] == "done"
            assert reply["policy_version"].item() == 0
    assert seen == ["open the door", Instruction(["a", "b"]), {"nested": [1, None]}]


ODD: dict[str, Callable[[], Any]] = {
    "ragged lazy stack": lambda: lazy_stack([TensorDict({"x": torch.ones(n)}) for n in (2, 3)]),
    "tensorclass": lambda: Observation(torch.ones(2, 3), "north", batch_size=[]),
    "no leaf at all": lambda: TensorDict({}, batch_size=[4]),
    "an empty level": lambda: TensorDict({"x": torch.ones(2), "later": TensorDict({})}),
    "levels of different batch sizes": lambda: TensorDict(
        {"inner": TensorDict({"x": torch.ones(4, 2)}, batch_size=[4, 2])}, batch_size=[4]
    ),
    "names of dimensions": lambda: TensorDict({"x": torch.ones(2)}, batch_size=[2], names=["time"]),
    "sparse": lambda: TensorDict({"x": torch.eye(3).to_sparse()}),
    "conjugated": lambda: TensorDict(
        {"x": torch.full((2,), 1 + 2j).conj(), "s": NonTensorData("s")}
    ),
    "all dtypes beside a string": lambda: TensorDict(
        {
            "s": NonTensorData("s"),
            "x": torch.tensor([True, False]),
            "half": torch.tensor([1.5], dtype=torch.bfloat16),
            "empty": torch.zeros(0, 3),
            "scalar": torch.tensor(2),
        }
    ),
}


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")  # torch before 2.13
@pytest.mark.parametrize("what", ODD)
def test_odd_payloads_arrive_as_they_are(transport: MPTransport, what: str) -> None:
    payload = ODD[what]()
    future = transport.submit(payload)
    assert transport.wait_for_work(SECONDS)
    (found,), (handle,) = transport.drain(4)
    assert handle.structure is None
    transport.resolve(handle, found)
    for each in (found, future.result(SECONDS)):
        assert type(each) is type(payload)
        assert each.batch_size == payload.batch_size
        assert each.names == payload.names
        if what != "sparse":  # before 0.15 tensordict has no repr for it
            assert repr(each) == repr(payload)
        if what == "ragged lazy stack":
            assert [part["x"].tolist() for part in each.unbind(0)] == [[1, 1], [1, 1, 1]]
        elif "x" in payload.keys():  # noqa: SIM118
            assert each.get("x").to_dense().equal(payload.get("x").to_dense())


def test_a_small_view_does_not_drag_its_storage_along(transport: MPTransport) -> None:
    base = torch.ones(64 * MIB, dtype=torch.uint8)
    payload = TensorDict({"x": base[:10], "s": NonTensorData("s")})
    future = transport.submit(payload)
    transport.wait_for_work(SECONDS)
    (found,), (handle,) = transport.drain(1)
    assert found["x"].untyped_storage().nbytes() == 10
    transport.resolve(handle, found)
    assert future.result(SECONDS)["x"].equal(payload["x"])


def test_parameters_and_gradients_arrive_as_values(server: InferenceServer) -> None:
    weight = torch.nn.Parameter(torch.arange(3.0))
    for payload in (
        TensorDict({"w": weight, "g": weight * 2}),
        TensorDict({"w": weight, "g": weight * 2, "s": NonTensorData("s")}),
    ):
        reply = server.client()(payload, SECONDS)
        for key, factor in (("w", 1), ("g", 2)):
            assert type(reply[key]) is torch.Tensor
            assert not reply[key].requires_grad
            assert reply[key].tolist() == [0, factor, 2 * factor]


@pytest.mark.parametrize("beside", [None, "a string"])
def test_a_tensor_on_another_device_is_refused_by_its_key(
    server: InferenceServer, beside: str | None
) -> None:
    client = server.client()
    for nested in (False, True):
        leaf = torch.zeros(2, device="meta")
        payload = TensorDict({"a": {"b": leaf}} if nested else {"obs": leaf})
        if beside:
            payload["s"] = NonTensorData(beside)
        key = "('a', 'b')" if nested else "'obs'"
        with raises(TypeError, key, "meta", ".cpu()"):
            client.submit(payload)
    assert client(TensorDict({"x": torch.ones(1)}), SECONDS)["x"].item() == 1


def test_what_is_no_tensordict_is_refused(server: InferenceServer) -> None:
    client = server.client()
    for payload in ({"x": torch.ones(1)}, None, TensorDict, torch.ones(1)):
        with raises(TypeError, "request", "expected a TensorDict"):
            client.submit(payload)


def test_what_cannot_be_pickled_is_refused_where_it_was_made(server: InferenceServer) -> None:
    client = server.client()
    with raises(TypeError, "request", "pickle"):
        client.submit(TensorDict({"lock": NonTensorData(threading.Lock())}))
    assert client(TensorDict({"x": torch.ones(1)}), SECONDS)["x"].item() == 1


class BreaksWhenRebuilt:
    def __reduce__(self) -> tuple[Any, ...]:
        return _break, ()


def _break() -> None:
    raise LookupError("cannot be rebuilt")


def test_a_payload_that_cannot_be_rebuilt_is_an_error_for_its_sender_only(
    server: InferenceServer,
) -> None:
    client, other = server.clients(2)
    futures = [other.submit(TensorDict({"x": torch.tensor(i)})) for i in range(3)]
    with raises(TypeError, "cannot rebuild", "cannot be rebuilt"):
        client(TensorDict({"s": NonTensorData(BreaksWhenRebuilt())}), SECONDS)
    assert [future.result(SECONDS)["x"].item() for future in futures] == [0, 1, 2]
    assert client(TensorDict({"x": torch.ones(1)}), SECONDS)["x"].item() == 1


def test_a_reply_that_cannot_be_rebuilt_is_an_error_for_its_client_only() -> None:
    def policy(batch: TensorDictBase) -> TensorDictBase:
        return batch.clone().set("s", NonTensorData(BreaksWhenRebuilt(), batch_size=[len(batch)]))

    with MPTransport() as transport:
        client = transport.client()
        futures = [client.submit(TensorDict({"x": torch.tensor(i)})) for i in range(2)]
        wait_until(lambda: transport.num_waiting == 2, SECONDS)
        payloads, handles = transport.drain(2)
        payloads[0].set("s", NonTensorData(BreaksWhenRebuilt()))
        for handle, payload in zip(handles, payloads, strict=True):
            transport.resolve(handle, payload)
        with raises(meshinfer.TransportError, "cannot be rebuilt"):
            futures[0].result(SECONDS)
        assert futures[1].result(SECONDS)["x"].item() == 1


def test_more_layouts_than_a_connection_remembers(server: InferenceServer) -> None:
    client = server.client()
    for _ in range(2):
        sizes = list(range(1, 600))
        futures = [client.submit(TensorDict({"x": torch.full((n,), n)})) for n in sizes]
        for n, future in zip(sizes, futures, strict=True):
            assert future.result(SECONDS)["x"].tolist() == [n] * n


def test_requests_of_different_structure_do_not_spoil_each_other() -> None:
    batches: list[tuple[int, list[str]]] = []

    def policy(batch: TensorDictBase) -> TensorDictBase:
        batches.append((len(batch), sorted(batch.keys())))
        return batch.clone()

    options: dict[str, Any] = {"max_batch_size": 6, "min_batch_size": 6, "timeout": SECONDS}
    with MPTransport() as transport, InferenceServer(policy, transport, **options) as server:
        payloads = [
            TensorDict({"x": torch.zeros(2)}),
            TensorDict({"x": torch.ones(3)}),
            TensorDict({"y": torch.ones(2), "x": torch.ones(2)}),
        ]
        clients = server.clients(6)
        pairs = zip(clients, payloads * 2, strict=True)
        futures = [client.submit(payload) for client, payload in pairs]
        for payload, future in zip(payloads * 2, futures, strict=True):
            reply = future.result(SECONDS)
            assert all(reply[key].equal(payload[key]) for key in payload.keys())  # noqa: SIM118
    assert sorted(batches) == [(2, ["x"]), (2, ["x"]), (2, ["x", "y"])]


def test_leaves_of_a_reply_are_independent_of_each_other(server: InferenceServer) -> None:
    payload = TensorDict({"a": torch.ones(2, 3), "b": torch.ones(3), "c": torch.ones(())})
    reply = server.client()(payload, SECONDS)
    for leaf in reply.values():
        assert leaf._base is None
        assert leaf.data_ptr() % 16 == 0
    weight = torch.ones(2, 3, requires_grad=True)
    product = (weight * reply["a"]).sum()
    reply["b"].add_(1)  # what autograd keeps of "a" has not changed
    product.backward()
    assert reply["a"].tolist() == [[1, 1, 1]] * 2


# The stream.


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 16, 63, 64, 65, 1000, 70_000, 200_000]), max_size=6),
    pieces=st.lists(st.integers(1, 90_000), min_size=1, max_size=40),
)
def test_frames_are_read_in_whatever_pieces_they_come(
    lengths: list[int], pieces: list[int]
) -> None:
    bodies = [bytes((i + j) % 251 for j in range(n)) for i, n in enumerate(lengths)]
    stream = b"".join(
        header_of(Kind.REQUEST, i, len(body), i + 7, i % 3) + body for i, body in enumerate(bodies)
    )
    at, turn = 0, 0

    def receive_into(target: memoryview) -> int:
        nonlocal at, turn
        count = min(pieces[turn % len(pieces)], len(target), len(stream) - at)
        target[:count] = stream[at : at + count]
        at, turn = at + count, turn + 1
        return count

    reader = FrameReader(memoryview(bytearray(1 << 16)))
    found = []
    while (frames := reader.read(receive_into)) is not None:
        found += frames
        assert reader.midway == (len(found) < len(bodies) and at > _end_of(lengths, len(found)))
    assert [bytes(frame.body) for frame in found] == bodies
    numbers = [(frame.identifier, frame.layout, frame.interaction) for frame in found]
    assert numbers == [(i, i + 7, i % 3) for i in range(len(bodies))]


def _end_of(lengths: list[int], count: int) -> int:
    return sum(64 + n for n in lengths[:count])


@pytest.mark.parametrize("length", [-1, 1 << 50])
def test_lengths_that_make_no_sense_are_noticed(length: int) -> None:
    data = header_of(Kind.REQUEST, 0, length)

    def receive_into(target: memoryview) -> int:
        target[: len(data)] = data
        return len(data)

    with raises(BadFrameError, str(length)):
        FrameReader(memoryview(bytearray(1 << 16))).read(receive_into)
