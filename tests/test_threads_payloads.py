"""Payloads of any structure between threads: what is served together, what apart, and what a ``collate_fn`` gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tensordict import LazyStackedTensorDict, NonTensorData, TensorDict, TensorDictBase, lazy_stack
from tensordict.nn import InteractionType, set_interaction_type
from thread_transports import HELD, SECONDS, Double, ask, request, serving

from meshinfer import ThreadingTransport


@contextmanager
def queue(policy: Callable[..., Any], batch: int, **options: Any) -> Iterator[list[Any]]:
    """Clients whose requests arrive in one batch."""
    sizes = {"min_batch_size": batch, "max_batch_size": batch, "timeout": SECONDS}
    with serving(ThreadingTransport(), policy, **sizes, **options) as server:
        yield server.clients(batch)


# --- Any payload ---------------------------------------------------------------------------------


def test_requests_that_differ_are_served_apart() -> None:
    policy = Double()
    payloads = [request(1), request(2, size=5), request(3), request(4).to(torch.float64)]
    with queue(policy, 4) as clients:
        replies = ask(clients, payloads)
    assert [reply["y"].tolist() for reply in replies] == [
        [2.0] * 3,
        [4.0] * 5,
        [6.0] * 3,
        [8.0] * 3,
    ]
    assert sorted(len(batch) for batch in policy.batches) == [1, 1, 2]


def test_a_poisonous_request_spoils_only_itself() -> None:
    policy = Double()
    payloads = [request(1), TensorDict({"z": torch.zeros(3)}), request(3), TensorDict()]
    with queue(policy, 4) as clients:
        replies = ask(clients, payloads)
    assert [replies[0]["y"][0].item(), replies[2]["y"][0].item()] == [2.0, 6.0]
    assert [type(replies[1]), type(replies[3])] == [KeyError, KeyError]


def test_keys_in_another_order_are_served_together() -> None:
    policy = Double()
    first = TensorDict({"x": torch.ones(3), "z": torch.zeros(1)})
    second = TensorDict({"z": torch.ones(1), "x": 2 * torch.ones(3)})
    with queue(policy, 2) as clients:
        replies = ask(clients, [first, second])
    assert [reply["y"][0].item() for reply in replies] == [2.0, 4.0]
    assert [batch["z"].tolist() for batch in policy.batches] == [[[0.0], [1.0]]]


def test_interaction_types_and_structures_together() -> None:
    policy = Double()
    with queue(policy, 4) as clients:
        futures = []
        for client, payload in zip(
            clients, [request(1), request(2), request(3, 4), request(4)], strict=True
        ):
            with set_interaction_type(InteractionType.RANDOM if client is clients[1] else None):
                futures.append(client.submit(payload))
        assert [f.result(SECONDS)["y"][0].item() for f in futures] == [2.0, 4.0, 6.0, 8.0]
    assert sorted(len(batch) for batch in policy.batches) == [1, 1, 2]


def test_words_travel_both_ways() -> None:
    def policy(batch: TensorDictBase) -> TensorDictBase:
        words = batch["word"]
        result = TensorDict({"n": torch.tensor([len(word) for word in words])}, batch.batch_size)
        result["loud"] = torch.stack([NonTensorData(word.upper()) for word in words])
        return result

    with queue(policy, 2) as clients:
        replies = ask(clients, [TensorDict({"word": word}) for word in ("one", "three")])
    assert [(reply["n"].item(), reply["loud"]) for reply in replies] == [(3, "ONE"), (5, "THREE")]


def test_vectorised_requests_of_several_sizes() -> None:
    policy = Double()
    payloads = [TensorDict({"x": torch.full((n, 3), float(n))}, [n]) for n in (2, 3, 2)]
    with queue(policy, 3) as clients:
        replies = ask(clients, payloads)
    assert [reply.batch_size for reply in replies] == [(2,), (3,), (2,)]
    assert [reply["y"].unique().tolist() for reply in replies] == [[4.0], [6.0], [4.0]]
    assert [reply["policy_version"].shape for reply in replies] == [(2,), (3,), (2,)]
    assert sorted(batch.batch_size for batch in policy.batches) == [(3,), (4,)]


def test_a_lazy_stack_of_agents() -> None:
    agents = lazy_stack([request(1), request(2)])
    odd = lazy_stack([request(1), request(2, size=4)])

    def policy(batch: TensorDictBase) -> TensorDict:
        total = [
            sum(agent["x"].sum() for agent in each.unbind(0)) for each in batch["agents"].unbind(0)
        ]
        return TensorDict({"y": torch.stack(total)}, batch.batch_size)

    with queue(policy, 3) as clients:
        replies = ask(clients, [TensorDict({"agents": each}) for each in (agents, odd, agents)])
    assert [reply["y"].item() for reply in replies] == [9.0, 11.0, 9.0]
    assert isinstance(odd, LazyStackedTensorDict)


def test_a_payload_may_be_changed_once_it_was_sent() -> None:
    policy = Double()
    with serving(ThreadingTransport(), policy) as server, server.client() as client:
        client.submit(request(HELD))
        assert policy.entered.wait(SECONDS)
        payload = TensorDict({"x": torch.ones(3), "deep": {"z": torch.ones(2)}, "word": "a"})
        future = client.submit(payload)
        payload["x"].fill_(7)
        payload["deep", "z"].fill_(7)
        payload["word"] = "b"
        policy.gate.set()
        future.result(SECONDS)
    sent = policy.batches[1]
    assert sent["x"].unique().tolist() == sent["deep", "z"].unique().tolist() == [1.0]
    assert sent["word"] == ["a"]


def test_what_is_no_tensordict_is_refused() -> None:
    expected = "expected a TensorDict or a tensorclass, found dict"
    with (
        ThreadingTransport() as transport,
        transport.client() as client,
        pytest.raises(TypeError, match=expected),
    ):
        client({"x": torch.zeros(3)})


def test_a_result_with_too_few_rows_is_an_error_for_its_clients() -> None:
    def policy(batch: TensorDictBase) -> TensorDictBase:
        return TensorDict({"y": batch["x"][:1]}, [1])

    with queue(policy, 2) as clients:
        errors = ask(clients, [request(1), request(2)])
    for error in errors:
        assert isinstance(error, ValueError)
        assert "1 rows for 2 requests" in str(error)


# --- collate_fn ----------------------------------------------------------------------------------


def pad(payloads: list[TensorDictBase]) -> TensorDict:
    rows = [payload["x"] for payload in payloads]
    return TensorDict({"x": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)}, [len(rows)])


def test_a_collate_fn_may_join_what_differs() -> None:
    policy = Double()
    with queue(policy, 2, collate_fn=pad) as clients:
        replies = ask(clients, [request(1), request(2, size=5)])
    assert [reply["y"].tolist() for reply in replies] == [[2.0] * 3 + [0.0] * 2, [4.0] * 5]
    assert len(policy.batches) == 1


def test_only_the_one_to_blame_for_a_failing_collate_fn_fails() -> None:
    policy = Double()
    with queue(policy, 3, collate_fn=torch.stack) as clients:
        replies = ask(clients, [request(1), TensorDict({"z": torch.zeros(2)}), request(3)])
    assert [replies[0]["y"][0].item(), replies[2]["y"][0].item()] == [2.0, 6.0]
    assert isinstance(replies[1], KeyError)
