"""Whose reply it is, and that it belongs to whoever got it."""

from __future__ import annotations

import random
from typing import Any

import torch
from tensordict import TensorDict

from meshinfer.inference.protocol import InferenceClient
from meshinfer.testing.check import conformance_check
from meshinfer.testing.harness import TransportHarness
from meshinfer.testing.serving import (
    AddOne,
    check_reply,
    clients_for,
    request,
    request_spec,
    response_spec,
    serving,
)

__all__ = ["CHECKS", "count"]

CLIENTS = 4


def count(client: InferenceClient, first: int, number: int, timeout: float | None) -> int:
    """Send ``number`` requests one after the other; each must get its own value back."""
    for value in range(first, first + number):
        check_reply(client(request(value), timeout), value)
    return number


@conformance_check()
def each_client_gets_its_own_replies(harness: TransportHarness) -> None:
    """Many clients at once each get the reply to their own request, in the order in which they asked."""
    with serving(harness, AddOne()) as server:
        for timeout in (None, harness.patience):
            runs = [
                harness.run_client(count, client, 1000 * index, 100, timeout)
                for index, client in enumerate(server.clients(CLIENTS))
            ]
            assert [run.result(harness.patience) for run in runs] == [100] * CLIENTS


@conformance_check()
def rows_of_a_batch_go_to_their_requests(harness: TransportHarness) -> None:
    """Requests that are computed in one batch each get their own row."""
    policy = AddOne()
    with serving(harness, policy, batch=5) as server:
        harness.run_client(_in_one_batch, server.clients(5)).result(harness.patience)
    assert [sorted(batch) for batch in policy.batches] == [[0, 1, 2, 3, 4]] * 3, policy.batches


def _in_one_batch(clients: list[InferenceClient]) -> None:
    for _ in range(3):
        futures = [client.submit(request(value)) for value, client in enumerate(clients)]
        for value, future in enumerate(futures):
            check_reply(future.result(), value)


@conformance_check()
def replies_may_be_collected_in_any_order(harness: TransportHarness) -> None:
    """The replies to many requests in flight may be collected in any order, and more than once."""
    with serving(harness, AddOne()) as server:
        for collect in (_backwards, _shuffled):
            clients = clients_for(harness, server, 30)
            harness.run_client(collect, clients).result(harness.patience)


def _backwards(clients: list[InferenceClient]) -> None:
    _collect(clients, list(reversed(range(30))))


def _shuffled(clients: list[InferenceClient]) -> None:
    _collect(clients, random.Random(0).sample(range(30), 30))


def _collect(clients: list[InferenceClient], order: list[int]) -> None:
    futures = [client.submit(request(value)) for value, client in enumerate(clients)]
    for value in order + order:
        check_reply(futures[value].result(), value)


@conformance_check()
def a_reply_never_changes_later(harness: TransportHarness) -> None:
    """A reply that was kept is the same after a hundred more, and after others were edited."""
    with serving(harness, AddOne()) as server:
        harness.run_client(_keep, server.client()).result(harness.patience)


def _keep(client: InferenceClient) -> None:
    kept = [client(request(value)) for value in range(100)]
    for value, reply in enumerate(kept):
        check_reply(reply, value)
        reply["y"].fill_(-1)


@conformance_check()
def a_reply_is_a_plain_tensordict(harness: TransportHarness) -> None:
    """A reply can be edited, extended, renamed, moved and required to have gradients as any TensorDict can."""
    with serving(harness, AddOne()) as server:
        harness.run_client(_edit, server.client()).result(harness.patience)


def _edit(client: InferenceClient) -> None:
    for value in range(3):
        reply = client(request(value))
        check_reply(reply, value)
        assert not reply.is_locked
        reply["y"].add_(5)
        reply["x"] = 1 - reply["y"]
        reply.rename_key_("y", "z")
        assert reply.to("cpu")["z"].tolist() == [value + 6] * 8, "an edit was lost"
        assert reply["x"].tolist() == [-value - 5] * 8, "a new key was lost"
        reply["y"] = torch.zeros(8, requires_grad=True)


@conformance_check()
def the_request_is_left_alone(harness: TransportHarness) -> None:
    """A request is neither changed nor kept: extra keys stay behind, and it may be edited once it was submitted."""
    policy = _KeysSeen()
    with serving(harness, policy) as server:
        harness.run_client(_send_extra, server.client()).result(harness.patience)
    if harness.fixed_layout:
        assert policy.keys == {("x",)}, f"the policy saw {policy.keys}"


class _KeysSeen(AddOne):
    def __init__(self) -> None:
        super().__init__()
        self.keys: set[tuple[str, ...]] = set()

    def __call__(self, batch: Any) -> TensorDict:
        self.keys.add(tuple(batch.keys()))
        return super().__call__(batch)


def _send_extra(client: InferenceClient) -> None:
    x, note = request(7)["x"], torch.ones(2)
    payload = TensorDict({"x": x, "note": note})
    future = client.submit(payload)
    assert set(payload.keys()) == {"x", "note"}, f"the request has now {set(payload.keys())}"
    assert not payload.is_locked
    assert payload["x"] is x
    assert x.tolist() == [7] * 8
    assert note.tolist() == [1, 1]
    x.fill_(-100)
    payload["x"] = torch.zeros(8, dtype=torch.int64)
    check_reply(future.result(), 7)
    assert x.tolist() == [-100] * 8, "the request was written to"


@conformance_check()
def vectorised_requests_keep_their_rows(harness: TransportHarness) -> None:
    """A client that steps several environments at once gets one row for each of them, in order."""
    policy = AddOne()
    specs = request_spec(3), response_spec(3)
    with serving(harness, policy, specs, batch=4) as server:
        harness.run_client(_vectorised, server.clients(4)).result(harness.patience)
    (rows,) = policy.batches
    starts = sorted(rows[::3])
    assert (starts, len(rows)) == ([0, 3, 6, 9], 12), rows


def _vectorised(clients: list[InferenceClient]) -> None:
    parts = torch.arange(12).unsqueeze(-1).expand(12, 8).view(4, 3, 8).unbind(0)
    futures = [
        client.submit(TensorDict({"x": part.contiguous()}, batch_size=[3]))
        for client, part in zip(clients, parts, strict=True)
    ]
    for part, future in zip(parts, futures, strict=True):
        reply = future.result()
        assert reply.batch_size == torch.Size([3]), reply.batch_size
        assert reply["y"].equal(part + 1), reply["y"]


CHECKS = (
    each_client_gets_its_own_replies,
    rows_of_a_batch_go_to_their_requests,
    replies_may_be_collected_in_any_order,
    a_reply_never_changes_later,
    a_reply_is_a_plain_tensordict,
    the_request_is_left_alone,
    vectorised_requests_keep_their_rows,
)
