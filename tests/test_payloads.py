"""What travels: every dtype, shapes that do not fit, lazy and ragged payloads, and whose the tensors are."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psutil
import pytest
import torch
from support import wait_until
from tensordict import LazyStackedTensorDict, TensorDict, TensorDictBase, lazy_stack

from meshinfer import DistributedTransport, InferenceServer, InferenceServerConfig

SECONDS = 20.0
GIB = 2**30

DTYPES = [
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.uint32,
    torch.uint64,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.complex128,
]


def echo(batch: TensorDictBase) -> TensorDictBase:
    return batch


@contextmanager
def serving(
    policy: Any, request_spec: TensorDictBase, response_spec: TensorDictBase, **arguments: Any
) -> Iterator[InferenceServer]:
    transport = DistributedTransport(request_spec, response_spec)
    with InferenceServer(policy, transport, **arguments) as server:
        yield server


def octets(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def random_payload(seed: int) -> TensorDict:
    """All dtypes with all bit patterns, as scalars, matrices and without any element."""
    generator = torch.Generator().manual_seed(seed)
    leaves = {}
    for dtype in DTYPES:
        for name, shape in (("scalar", []), ("matrix", [3, 5]), ("nothing", [0, 4])):
            count = torch.Size(shape).numel() * dtype.itemsize
            high = 2 if dtype is torch.bool else 256
            pattern = torch.randint(high, [count], generator=generator, dtype=torch.uint8)
            leaves[name, str(dtype)] = pattern.view(dtype).reshape(shape)
    payload = TensorDict()
    for key, leaf in leaves.items():
        payload[key] = leaf
    return payload


# --- Dtypes --------------------------------------------------------------------------------------


def test_every_dtype_travels_bit_by_bit() -> None:
    spec = random_payload(0)
    with (
        serving(echo, spec, spec, max_batch_size=3, policy_version_key=None) as server,
        ThreadPoolExecutor(3) as pool,
    ):
        clients = server.clients(3)
        for start in range(1, 13, 3):
            sent = [random_payload(start + number) for number in range(3)]
            ask = zip(clients, sent, strict=True)
            replies = list(pool.map(lambda pair: pair[0](pair[1], timeout=SECONDS), ask))
            for payload, reply in zip(sent, replies, strict=True):
                keys = set(payload.keys(True, True))
                assert set(reply.keys(True, True)) == keys
                for key in keys:
                    assert reply[key].dtype == payload[key].dtype
                    assert reply[key].shape == payload[key].shape
                    assert torch.equal(octets(reply[key]), octets(payload[key])), key
        for client in clients:
            client.close()


# --- Payloads that do not fit --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("payload", "error", "message"),
    [
        (
            TensorDict({"image": torch.zeros(4, 84, 84)}),
            ValueError,
            r"\[3, 84, 84\].*\[4, 84, 84\]",
        ),
        (
            TensorDict({"image": torch.zeros(2, 3, 84, 84)}, [2]),
            ValueError,
            r"batch_size: expected \[\], found \[2\]",
        ),
        (TensorDict({"image": torch.zeros(3, 84, 84).double()}), TypeError, "float32.*float64"),
        (TensorDict({"picture": torch.zeros(3, 84, 84)}), ValueError, "nothing.*'picture'"),
        (TensorDict({"image": "a string"}), TypeError, "only tensors travel"),
        ({"image": torch.zeros(3, 84, 84)}, TypeError, "TensorDict"),
        (torch.zeros(3, 84, 84), TypeError, "TensorDict"),
        (None, TypeError, "TensorDict"),
    ],
)
def test_what_does_not_fit_never_leaves(payload: Any, error: Any, message: str) -> None:
    spec = TensorDict({"image": torch.zeros(3, 84, 84)})
    right = TensorDict({"image": torch.rand(3, 84, 84)})
    with serving(echo, spec, spec) as server, server.client() as client:
        for _ in range(3):
            with pytest.raises(error, match=message):
                client(payload, timeout=SECONDS)
        with pytest.raises(error, match="request"):
            client.submit(payload)
        assert client.in_flight == 0
        assert torch.equal(client(right, timeout=SECONDS)["image"], right["image"])
        assert wait_until(lambda: server.stats().requests == 1, SECONDS)


def test_extra_keys_stay_behind() -> None:
    spec = TensorDict({"x": torch.zeros(2)})
    with serving(echo, spec, spec) as server, server.client() as client:
        payload = TensorDict({"x": torch.ones(2), "debug": torch.zeros(99), "note": "text"})
        reply = client(payload, timeout=SECONDS)
        assert set(reply.keys()) == {"x", "policy_version"}


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.skipif(
    psutil.virtual_memory().available < 12 * GIB, reason="needs 12 GiB of free memory"
)
def test_a_payload_of_more_than_two_gigabytes() -> None:
    """A goodbye is short, whatever the size of the payloads: leaving takes no second copy of them."""
    marks = torch.arange(2_200).remainder(251).byte()
    blob = marks.unsqueeze(-1).expand(-1, 1_000_000)  # the request itself takes no memory
    spec = TensorDict({"blob": blob})
    answer = TensorDict({"ends": torch.zeros(2, dtype=torch.int64)})

    def policy(batch: TensorDictBase) -> TensorDict:
        ends = batch["blob"][..., [0, -1]].sum(-2, dtype=torch.int64)
        return TensorDict({"ends": ends}, batch.batch_size)

    with (
        serving(policy, spec, answer, max_batch_size=1) as server,
        server.client() as client,
    ):
        reply = client(spec, timeout=120)
        assert reply["ends"].tolist() == [int(marks.sum(dtype=torch.int64))] * 2


# --- Whose the tensors are -----------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [[], [4]])
@pytest.mark.parametrize("inline", [True, False])
def test_replies_that_are_kept_never_change(batch_size: list[int], inline: bool) -> None:
    spec = TensorDict({"x": torch.zeros(*batch_size, 64)}, batch_size)
    config = InferenceServerConfig(inline=inline)
    with serving(echo, spec, spec, server_config=config) as server, server.client() as client:
        kept = []
        for number in range(100):
            payload = spec.clone()
            payload["x"].fill_(float(number))
            reply = client(payload, timeout=SECONDS) if number % 2 else client(payload)
            kept.append(reply)
            payload["x"].fill_(-1.0)
        for number, reply in enumerate(kept):
            assert bool((reply["x"] == number).all())
            reply["x"].fill_(-2.0)
        assert float(client(spec, timeout=SECONDS)["x"].sum()) == 0.0


def test_a_request_may_be_changed_once_it_was_submitted() -> None:
    spec = TensorDict({"x": torch.zeros(64)})
    opened = threading.Event()

    def slow(batch: TensorDictBase) -> TensorDictBase:
        assert opened.wait(SECONDS)
        return batch

    with serving(slow, spec, spec) as server, server.client() as client:
        payload, futures = spec.clone(), []
        for number in range(20):  # most of them wait in the client for room on the wire
            payload["x"].fill_(float(number))
            futures.append(client.submit(payload))
        payload["x"].fill_(-1.0)
        opened.set()
        for number, future in enumerate(futures):
            assert bool((future.result(SECONDS)["x"] == number).all())


def test_a_reply_is_a_plain_tensordict_and_the_request_is_untouched() -> None:
    spec = TensorDict({"x": torch.zeros(3), "nested": {"y": torch.zeros(2)}})

    def meddling(batch: TensorDictBase) -> TensorDictBase:
        batch["x"] += 1.0
        batch["nested", "y"] = batch["nested", "y"] * 2
        return batch.set("extra", batch["x"])

    with serving(meddling, spec, spec) as server, server.client() as client:
        payload = TensorDict({"x": torch.ones(3), "nested": {"y": torch.ones(2)}})
        x, before = payload["x"], payload.clone()
        for _ in range(3):
            out = client(payload, timeout=SECONDS)
            assert not out.is_locked
            assert out["x"].tolist() == [2.0, 2.0, 2.0]
            assert out["nested", "y"].tolist() == [2.0, 2.0]
            out["x"] = 1 - out["x"]
            out["new"] = torch.arange(4)
            out["nested", "z"] = torch.ones(1)
            out.rename_key_("new", "renamed")
            copy = out.to("cpu")
            assert copy["x"].tolist() == [-1.0, -1.0, -1.0]
            assert copy["renamed"].tolist() == [0, 1, 2, 3]
            assert copy["nested", "z"].tolist() == [1.0]
            out["x"].add_(5.0)
            out.update({"x": out["x"] + 1}).del_("renamed")
            assert out["x"].tolist() == [5.0, 5.0, 5.0]
        assert payload["x"] is x
        assert set(payload.keys(True, True)) == set(before.keys(True, True))
        assert bool((payload == before).all())
        assert not payload.is_locked


@pytest.mark.parametrize("leaf", ["locked", "grad", "strided", "expanded", "inference"])
def test_any_dense_input(leaf: str) -> None:
    spec = TensorDict({"x": torch.zeros(3, 2)})
    values = torch.arange(6.0).reshape(3, 2)
    payload = TensorDict({"x": values.clone()})
    if leaf == "locked":
        payload.lock_()
    elif leaf == "grad":
        payload["x"] = values.clone().requires_grad_()
    elif leaf == "strided":
        payload["x"] = values.t().contiguous().t()
    elif leaf == "expanded":
        values = torch.tensor([[1.0, 2.0]]).expand(3, 2)
        payload["x"] = values
    else:
        with torch.inference_mode():
            payload = TensorDict({"x": values.clone()})
    with serving(echo, spec, spec) as server, server.client() as client:
        reply = client(payload, timeout=SECONDS)
        assert torch.equal(reply["x"], values)
        assert reply["x"].is_contiguous()
        assert not reply["x"].requires_grad
        assert not reply["x"].is_inference()


# --- Recurrent state -----------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [[], [1], [1, 1]])
@pytest.mark.parametrize("count", [1, 8])
def test_recurrent_state_stays_with_its_environment(shape: list[int], count: int) -> None:
    """Each environment counts its own steps through the policy's state, across resets at random."""
    request_spec = TensorDict(
        {"hidden": torch.zeros(shape), "done": torch.zeros(shape, dtype=torch.bool)}
    )
    response_spec = TensorDict({"hidden": torch.zeros(shape)})

    def policy(batch: TensorDictBase) -> TensorDict:
        hidden = torch.where(batch["done"], 0.0, batch["hidden"]) + 1
        return TensorDict({"hidden": hidden}, batch.batch_size)

    def environment(client: Any, seed: int) -> None:
        dice = random.Random(seed)
        pause = threading.Event()
        hidden, steps = torch.zeros(shape), 0
        for _ in range(40):
            done = dice.random() < 0.2
            steps = 1 if done else steps + 1
            request = TensorDict({"hidden": hidden, "done": torch.full(shape, done)})
            hidden = client(request, timeout=SECONDS)["hidden"]
            assert hidden.shape == torch.Size(shape)
            assert float(hidden) == steps
            pause.wait(dice.random() * 0.002)  # environments differ in speed

    with (
        serving(policy, request_spec, response_spec) as server,
        ThreadPoolExecutor(count) as pool,
    ):
        clients = server.clients(count)
        list(pool.map(environment, clients, range(count)))
        for client in clients:
            client.close()


# --- Lazy stacks and ragged leaves ---------------------------------------------------------------


def agent(value: float, size: int = 3) -> TensorDict:
    return TensorDict({"agents": {"a": {"obs": torch.full([size], value)}}})


def test_a_lazy_stack_of_agents() -> None:
    spec = TensorDict({"agents": {"a": {"obs": torch.zeros(2, 3)}}}, [2])
    stacked = lazy_stack([agent(1.0), agent(2.0)])
    assert isinstance(stacked, LazyStackedTensorDict)
    for declared in (spec, stacked):
        with serving(echo, declared, declared) as server, server.client() as client:
            reply = client(stacked, timeout=SECONDS)
            assert reply.batch_size == torch.Size([2])
            assert reply["agents", "a", "obs"].tolist() == [[1.0] * 3, [2.0] * 3]


def test_a_lazy_stack_of_agents_that_differ_is_refused() -> None:
    spec = TensorDict({"agents": {"a": {"obs": torch.zeros(2, 3)}}}, [2])
    differ = lazy_stack([agent(1.0), agent(2.0, size=4)])
    with serving(echo, spec, spec) as server, server.client() as client:
        with pytest.raises((ValueError, TypeError), match=r"request.*agents.*obs"):
            client(differ, timeout=SECONDS)
        reply = client(lazy_stack([agent(3.0), agent(4.0)]), timeout=SECONDS)
        assert reply["agents", "a", "obs"].tolist() == [[3.0] * 3, [4.0] * 3]
    with pytest.raises((ValueError, TypeError), match="request spec: expected one shape per leaf"):
        DistributedTransport(differ, spec)


def test_ragged_leaves_are_refused_at_the_odd_client_only() -> None:
    spec = TensorDict({"tokens": torch.zeros(5, dtype=torch.int64)})
    with serving(echo, spec, spec) as server:
        even, odd = server.clients(2)
        with pytest.raises(ValueError, match=r"'tokens'.*\[5\].*\[7\]"):
            odd(TensorDict({"tokens": torch.arange(7)}), timeout=SECONDS)
        reply = even(TensorDict({"tokens": torch.arange(5)}), timeout=SECONDS)
        assert reply["tokens"].tolist() == [0, 1, 2, 3, 4]
        for client in (even, odd):
            client.close()


def test_a_transport_with_rows_needs_specs() -> None:
    with pytest.raises(ValueError, match="needs request_spec and response_spec"):
        InferenceServer(echo, "distributed")
