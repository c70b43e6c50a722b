"""Slots between threads: who gets one, and what fits into it."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tensordict import NonTensorData, TensorDict, TensorDictBase, lazy_stack
from thread_transports import HELD, SECONDS, SPECS, TRANSPORTS, Double, ask, request, serving

from meshinfer import RefusedError, SlotTransport


@pytest.fixture(params=["slot", "slot without specs"])
def slots(request: pytest.FixtureRequest) -> Iterator[Any]:
    with TRANSPORTS[request.param]() as made:
        yield made


# --- Slots ---------------------------------------------------------------------------------------


def test_one_client_too_many_is_refused() -> None:
    with SlotTransport(2) as transport:
        first, second = transport.client(), transport.client()
        with pytest.raises(RefusedError, match=r"all 2 slots.*num_slots.*'queue'"):
            transport.client()
        first.close()
        third = transport.client()
        with pytest.raises(RefusedError, match="all 2 slots"):
            transport.client()
        del second
        gc.collect()
        fourth = transport.client()
        assert transport.num_clients == 2
        first.close()
        with pytest.raises(RefusedError):
            transport.client()
        third.close()
        fourth.close()


def test_a_seat_is_free_at_once_while_its_last_request_is_computed() -> None:
    policy = Double()
    with serving(SlotTransport(1, **SPECS), policy) as server:
        leaver = server.client()
        leaver.submit(request(HELD))
        assert policy.entered.wait(SECONDS)
        leaver.close()
        with server.client() as follower:
            futures = [follower.submit(request(value)) for value in range(3)]
            policy.gate.set()
            assert [f.result(SECONDS)["y"][0].item() for f in futures] == [0.0, 2.0, 4.0]
    assert policy.batches[0]["x"].unique().tolist() == [HELD]


@pytest.mark.parametrize(
    ("payload", "error", "words"),
    [
        (lambda: request(1, size=4), ValueError, ("'x'", "[3]", "[4]")),
        (lambda: request(1).to(torch.float64), TypeError, ("'x'", "float32", "float64")),
        (lambda: request(1).expand(2), ValueError, ("batch_size", "[]", "[2]")),
        (lambda: TensorDict({"z": torch.zeros(3)}), ValueError, ("'x'", "'z'")),
        (lambda: request(1).set("more", torch.zeros(1)), ValueError, ("'more'", "no such key")),
        (lambda: request(1).set("word", "a"), ValueError, ("'word'", "no such key")),
        (lambda: request(1).set(("a", "b"), torch.ones(1)), ValueError, ("('a', 'b')",)),
        (lambda: request(1).set("x", "a"), TypeError, ("'x'", "NonTensorData")),
        (lambda: {"x": torch.zeros(3)}, TypeError, ("TensorDict", "dict")),
    ],
)
def test_a_request_unlike_the_first_is_refused(
    payload: Callable[[], Any], error: type[Exception], words: tuple[str, ...]
) -> None:
    policy = Double()
    with serving(SlotTransport(2), policy) as server:
        good, bad = server.clients(2)
        good(request(1), SECONDS)
        with pytest.raises(error) as raised:
            bad(payload(), SECONDS)
        assert [
            word for word in (*words, "transport='queue'") if word not in str(raised.value)
        ] == []
        assert bad(request(2), SECONDS)["y"].tolist() == [4.0] * 3
    assert len(policy.batches) == 2


@pytest.mark.parametrize(
    ("payload", "word"),
    [
        (lambda: request(1).set("word", "a"), "'word'"),
        (lambda: request(1).set("s", torch.zeros(2).to_sparse()), "'s'"),
        (TensorDict, "at least one tensor"),
        (lambda: lazy_stack([request(1), request(2, size=4)]), "one shape"),
    ],
)
def test_a_first_request_that_cannot_be_packed_fixes_nothing(
    payload: Callable[[], Any], word: str
) -> None:
    with serving(SlotTransport(2), Double()) as server, server.client() as client:
        with pytest.raises((TypeError, ValueError), match="transport='queue'") as raised:
            client(payload(), SECONDS)
        assert word in str(raised.value)
        assert server.transport.request_layout is None  # type: ignore[attr-defined]
        assert client(request(2), SECONDS)["y"].tolist() == [4.0] * 3


def test_threads_that_are_first_together_agree_on_one_layout() -> None:
    for _ in range(20):
        with serving(SlotTransport(4), Double()) as server, ThreadPoolExecutor(4) as pool:
            started = threading.Barrier(4)

            def first(client: Any, size: int, started: threading.Barrier = started) -> Any:
                started.wait()
                try:
                    return client(request(size, size), SECONDS)["y"].tolist()
                except ValueError:
                    return None

            runs = [pool.submit(first, c, 3 + i % 2) for i, c in enumerate(server.clients(4))]
            replies = [run.result() for run in runs]
        assert replies in ([[6.0] * 3, None] * 2, [None, [8.0] * 4] * 2)


def test_a_batch_of_large_rows() -> None:
    spec = TensorDict({"x": torch.zeros(3, 100, 100)})
    transport = SlotTransport(4, request_spec=spec, response_spec=TensorDict({"y": torch.zeros(3)}))

    def policy(batch: TensorDictBase) -> TensorDict:
        assert batch["x"].shape[1:] == (3, 100, 100)
        return TensorDict({"y": batch["x"].mean((2, 3))}, batch.batch_size)

    with serving(transport, policy, min_batch_size=4, timeout=SECONDS) as server:
        images = [torch.full((3, 100, 100), float(i)) for i in range(4)]
        replies = ask(server.clients(4), [TensorDict({"x": image}) for image in images])
    assert [reply["y"].tolist() for reply in replies] == [[float(i)] * 3 for i in range(4)]


def test_a_reply_without_a_spec_has_all_that_the_policy_returns() -> None:
    def policy(batch: TensorDictBase) -> TensorDictBase:
        rows = batch.batch_size
        result = TensorDict({"y": batch["x"], "deep": {"z": batch["x"][:, 0]}}, rows)
        if batch["x"].max() > 1:  # it may even change
            result["word"] = torch.stack([NonTensorData("big")] * len(batch))
        return result

    with serving(SlotTransport(1), policy) as server, server.client() as client:
        small, big = client(request(1), SECONDS), client(request(2), SECONDS)
    assert set(small.keys(True, True)) == {"y", ("deep", "z"), "policy_version"}
    assert big["word"] == "big"
    assert big["deep", "z"].item() == 2.0


def test_a_reply_may_declare_the_version() -> None:
    spec = TensorDict({"y": torch.zeros(3), "policy_version": torch.zeros((), dtype=torch.int64)})
    transport = SlotTransport(1, request_spec=SPECS["request_spec"], response_spec=spec)
    with serving(transport, Double(), policy_version=6) as server, server.client() as client:
        assert client(request(1), SECONDS)["policy_version"] == 6


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"num_slots": 0}, ValueError, "num_slots=0"),
        ({"num_slots": 2.0}, TypeError, "num_slots=2.0"),
        ({"num_slots": 1, "request_spec": SPECS["request_spec"]}, ValueError, "go together"),
        ({"num_slots": 1, "response_spec": SPECS["request_spec"]}, ValueError, "go together"),
        ({"num_slots": 1, "request_spec": {}, "response_spec": {}}, ValueError, "at least one"),
        ({"num_slots": 1 << 55, **SPECS}, ValueError, "do not fit into memory"),
        (
            {"num_slots": 1, **SPECS, "response_spec": SPECS["response_spec"].expand(2)},
            ValueError,
            r"batch_size \[\], response_spec \[2\]",
        ),
    ],
)
def test_arguments_that_cannot_work(
    arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        SlotTransport(**arguments)


def test_slots_with_a_collate_fn(slots: Any) -> None:
    options: dict[str, Any] = {"collate_fn": torch.stack, "policy_version": 5}
    with serving(slots, Double(), **options) as server, server.client() as client:
        replies = [client(request(value), SECONDS) for value in range(20)]
    assert [reply["y"][0].item() for reply in replies] == [2.0 * value for value in range(20)]
    assert {reply["policy_version"].item() for reply in replies} == {5}
