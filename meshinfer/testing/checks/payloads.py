"""What a payload may hold, and what is refused before it leaves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from meshinfer.inference.protocol import InferenceClient
from meshinfer.testing.check import conformance_check
from meshinfer.testing.expect import raises
from meshinfer.testing.harness import TransportHarness
from meshinfer.testing.serving import AddOne, check_reply, clients_for, request, serving

__all__ = ["CHECKS"]

Specs = dict[str, tuple[torch.dtype, tuple[int, ...]]]

COMMON: Specs = {
    "flag": (torch.bool, (3,)),
    "scalar": (torch.float32, ()),
    "half": (torch.bfloat16, (5,)),
    "complex": (torch.complex64, (2, 3)),
    "count": (torch.int64, (1,)),
    "image": (torch.uint8, (24, 32, 3)),
    "double": (torch.float64, (7,)),
    "empty": (torch.float32, (0, 4)),
}
FLOAT8: Specs = {
    "small": (torch.float8_e4m3fn, (9,)),
    "smaller": (torch.float8_e5m2, (1, 1)),
}


def _random_payload(specs: Specs, seed: int) -> TensorDict:
    """Any bytes, NaNs of every kind included; one leaf nested."""
    generator = torch.Generator().manual_seed(seed)
    leaves: dict[str, Any] = {}
    for key, (dtype, shape) in specs.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        high = 2 if dtype == torch.bool else 256
        octets = torch.randint(0, high, (size,), dtype=torch.uint8, generator=generator)
        leaves[key] = octets.view(dtype).view(shape)
    return TensorDict({**leaves, "agent": {"0": {"count": leaves["count"] // 2}}})


def _octets(tensor: torch.Tensor) -> list[int]:
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).tolist() if flat.numel() else []


def _check_same(reply: TensorDictBase, payload: TensorDictBase) -> None:
    for key in payload.keys(True, True):
        found, sent = reply[key], payload[key]
        assert found.dtype == sent.dtype, f"{key}: {found.dtype} instead of {sent.dtype}"
        assert found.shape == sent.shape, f"{key}: {found.shape} instead of {sent.shape}"
        assert _octets(found) == _octets(sent), f"{key}: {found} instead of {sent}"


def _echo(batch: TensorDictBase) -> TensorDictBase:
    return batch.clone()


def _send_random(clients: list[InferenceClient], specs: Specs, at_once: int) -> None:
    payloads = [_random_payload(specs, seed) for seed in range(9)]
    for begin in range(0, 9, at_once):
        wave = list(zip(clients, payloads, strict=True))[begin : begin + at_once]
        futures = [client.submit(payload) for client, payload in wave]
        for future, (_, payload) in zip(futures, wave, strict=True):
            _check_same(future.result(), payload)


def _check_payloads(harness: TransportHarness, specs: Specs) -> None:
    """All at once, and in whole batches: one request of each client, since a transport may hold back a second one."""
    example = _random_payload(specs, 0)
    for batch, at_once in ((None, 9), (3, 3)):
        with serving(harness, _echo, (example, example), batch=batch) as server:
            clients = server.clients(3) * 3 if harness.many_in_flight else server.clients(9)
            run = harness.run_client(_send_random, clients, specs, at_once)
            run.result(harness.patience)


@conformance_check()
def every_dtype_and_shape_arrives_bit_by_bit(harness: TransportHarness) -> None:
    """Booleans, bfloat16, complex numbers, images, scalars, empty leaves and nested keys arrive bit by bit."""
    _check_payloads(harness, COMMON)


@conformance_check("fixed_layout")
def float8_arrives_bit_by_bit(harness: TransportHarness) -> None:
    """Dtypes of eight bits arrive bit by bit."""
    _check_payloads(harness, {"count": COMMON["count"], **FLOAT8})


@conformance_check()
def strides_and_gradients_do_not_matter(harness: TransportHarness) -> None:
    """Transposed, strided and expanded leaves, and leaves that require gradients, arrive as values."""
    spec = TensorDict({"m": torch.zeros(3, 4)})
    with serving(harness, _echo, (spec, spec)) as server:
        harness.run_client(_send_strided, server.client()).result(harness.patience)


def _send_strided(client: InferenceClient) -> None:
    base = torch.arange(48.0)
    leaves = (
        base[:12].view(4, 3).t(),
        base.view(6, 8)[::2, ::2],
        base[:4].expand(3, 4),
        base[:12].view(3, 4).clone().requires_grad_(),
    )
    for leaf in leaves:
        reply = client(TensorDict({"m": leaf}))
        assert reply["m"].equal(leaf), f"{reply['m']} instead of {leaf}"
        assert not reply["m"].requires_grad


def _wrong_requests() -> Iterator[tuple[Any, tuple[str, ...]]]:
    """Each with what the error must name: the key, what was expected and what was found."""
    good = request(1)["x"]
    yield TensorDict({"x": good[:5]}), ("'x'", "[8]", "[5]")
    yield TensorDict({"x": good.float()}), ("'x'", "int64", "float32")
    yield TensorDict({"other": good}), ("'x'", "other")
    yield request(1, 2), ("batch_size", "[]", "[2]")
    yield {"x": good}, ("TensorDict", "dict")


@conformance_check("fixed_layout")
def a_bad_request_is_refused_where_it_was_made(harness: TransportHarness) -> None:
    """A request unlike the spec raises at its client, naming key, expected and found; no other request suffers."""
    policy = AddOne()
    with serving(harness, policy) as server:
        runs = [harness.run_client(_send_wrong, clients_for(harness, server, 2))]
        runs += [harness.run_client(_send_good, client) for client in server.clients(2)]
        for run in runs:
            run.result(harness.patience)
    arrived = {value for batch in policy.batches for value in batch}
    assert arrived == {*range(100, 105), *range(200, 230)}, f"the policy saw {arrived}"


def _send_wrong(clients: list[InferenceClient]) -> None:
    for value, (payload, words) in enumerate(_wrong_requests(), start=100):
        future = clients[value % 2].submit(request(value))
        with raises((ValueError, TypeError), *words):
            clients[1 - value % 2].submit(payload)
        check_reply(future.result(), value)


def _send_good(client: InferenceClient) -> None:
    for value in range(200, 230):
        check_reply(client(request(value)), value)


CHECKS = (
    every_dtype_and_shape_arrives_bit_by_bit,
    float8_arrives_bit_by_bit,
    strides_and_gradients_do_not_matter,
    a_bad_request_is_refused_where_it_was_made,
)
