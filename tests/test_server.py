"""The server: batches, weights and their version, statistics, errors, and transports of other makes."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support import wait_until
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    InteractionType,
    TensorDictModule,
    set_interaction_type,
)
from tensordict.nn.probabilistic import interaction_type

from meshinfer import (
    ClosedError,
    DistributedTransport,
    InferenceServer,
    InferenceServerConfig,
    ServerClosedError,
    ThreadingTransport,
    TransportConfig,
)

SECONDS = 20.0
REQUEST = TensorDict({"x": torch.zeros(())})
RESPONSE = TensorDict({"y": torch.zeros(())})
INLINE = pytest.mark.parametrize("inline", [True, False, None])


def request(value: float) -> TensorDict:
    return TensorDict({"x": torch.tensor(float(value))})


def double(batch: TensorDictBase) -> TensorDict:
    return TensorDict({"y": 2 * batch["x"]}, batch.batch_size)


def make(
    model: Any = double,
    request_spec: Any = REQUEST,
    response_spec: Any = RESPONSE,
    **arguments: Any,
) -> InferenceServer:
    return InferenceServer(model, DistributedTransport(request_spec, response_spec), **arguments)


class Gate:
    """A policy that holds its first batch until it is opened, and remembers all batches."""

    def __init__(self, policy: Callable[[Any], Any] = double) -> None:
        self.entered, self.opened = threading.Event(), threading.Event()
        self.sizes: list[int] = []
        self.kinds: list[InteractionType | None] = []
        self._policy = policy

    def __call__(self, batch: TensorDictBase) -> TensorDict:
        self.sizes.append(batch.batch_size[0])
        self.kinds.append(interaction_type())
        self.entered.set()
        assert self.opened.wait(SECONDS)
        return self._policy(batch)


@contextmanager
def clients_of(server: InferenceServer, count: int) -> Iterator[list[Any]]:
    """Connected clients."""
    clients = server.clients(count)
    try:
        for client in clients:
            client(request(0.0), timeout=SECONDS)
        yield clients
    finally:
        for client in clients:
            client.close()


@contextmanager
def blocked(gate: Gate, **arguments: Any) -> Iterator[tuple[InferenceServer, list[Any]]]:
    """A server that is in its first batch, and six clients that have not asked yet."""
    gate.opened.set()
    with make(gate, **arguments) as server, clients_of(server, 7) as (first, *others):
        gate.opened.clear()
        gate.entered.clear()
        gate.sizes.clear()
        gate.kinds.clear()
        held = first.submit(request(-1.0))
        assert gate.entered.wait(SECONDS)
        try:
            yield server, others
        finally:
            gate.opened.set()
            assert float(held.result(SECONDS)["y"]) == -2.0


def answered(futures: list[Any]) -> list[float]:
    return [float(future.result(SECONDS)["y"]) for future in futures]


# --- Batches -------------------------------------------------------------------------------------


@INLINE
def test_a_batch_is_never_larger_than_the_maximum(inline: bool | None) -> None:
    gate = Gate()
    config = InferenceServerConfig(max_batch_size=4, inline=inline)
    with blocked(gate, server_config=config) as (server, clients):
        futures = [
            client.submit(request(10 * i + j))
            for i, client in enumerate(clients[:5])
            for j in (0, 1)
        ]
        assert wait_until(lambda: server.transport.num_waiting == 10, SECONDS)
        gate.opened.set()
        assert answered(futures) == [2.0 * (10 * i + j) for i in range(5) for j in (0, 1)]
    assert gate.sizes == [1, 4, 4, 2]


def test_a_batch_is_made_when_enough_have_come() -> None:
    gate = Gate()
    gate.opened.set()
    with make(gate, min_batch_size=1, max_batch_size=8) as server, clients_of(server, 4):
        assert set(gate.sizes) == {1}
    gate.sizes.clear()
    with make(gate, min_batch_size=4, max_batch_size=8, timeout=10 * SECONDS) as server:
        clients = server.clients(4)
        futures = [client.submit(request(i)) for i, client in enumerate(clients)]
        assert answered(futures) == [0.0, 2.0, 4.0, 6.0]  # it did not wait for its timeout
        for client in clients:
            client.close()
    assert gate.sizes == [4]


def test_a_partial_batch_is_made_at_the_timeout() -> None:
    gate = Gate()
    gate.opened.set()
    with make(gate, min_batch_size=4, timeout=0.3) as server, server.client() as client:
        client(request(0.0), timeout=SECONDS)
        gate.sizes.clear()
        began = time.monotonic()
        futures = [client.submit(request(i)) for i in range(2)]
        assert answered(futures) == [0.0, 2.0]
        assert time.monotonic() - began > 0.25
        assert wait_until(lambda: server.stats().queue_ms_p99 >= 290.0, SECONDS)
    assert sum(gate.sizes) == 2  # in one batch, unless this thread was held up between the two


def test_being_woken_ends_no_batch_early() -> None:
    gate = Gate()
    gate.opened.set()
    with make(gate, min_batch_size=2, timeout=SECONDS) as server, server.client() as client:
        first = client.submit(request(0.0))
        wake: Callable[[], None] = server.transport.wake
        assert not wait_until(lambda: wake() or first.done(), 0.3)
        assert answered([first, client.submit(request(1.0))]) == [0.0, 2.0]
    assert gate.sizes == [2]


def test_fewer_clients_than_the_minimum_and_one_that_is_slow() -> None:
    """Whoever asks is answered within the timeout and a forward pass."""

    def step(client: Any, times: int) -> None:
        for number in range(times):
            assert float(client(request(number), timeout=SECONDS)["y"]) == 2.0 * number

    with (
        make(min_batch_size=8, timeout=0.02) as server,
        clients_of(server, 5) as clients,
        ThreadPoolExecutor(5) as pool,
    ):
        for living in (5, 3, 1):
            for client in clients[living:]:
                client.close()
            list(pool.map(step, clients[:living], [20] * living))
        assert wait_until(lambda: server.stats().requests == 5 + 20 * (5 + 3 + 1), SECONDS)
        assert server.stats().errors == 0


@INLINE
def test_exploration_modes_do_not_share_a_forward_pass(inline: bool | None) -> None:
    gate = Gate()
    config = InferenceServerConfig(inline=inline)
    asked = [
        InteractionType.RANDOM,
        None,
        InteractionType.DETERMINISTIC,
        InteractionType.RANDOM,
        None,
    ]
    with blocked(gate, server_config=config) as (server, clients):
        futures = []
        for number, kind in enumerate(asked):
            if kind is None:
                futures.append(clients[number].submit(request(number)))
            else:
                with set_interaction_type(kind):
                    futures.append(clients[number].submit(request(number)))
        assert wait_until(lambda: server.transport.num_waiting == 5, SECONDS)
        gate.opened.set()
        assert answered(futures) == [0.0, 2.0, 4.0, 6.0, 8.0]
    own = gate.kinds[0]  # without a wish of the client's the server's own mode applies
    served = dict(zip(gate.kinds[1:], gate.sizes[1:], strict=True))
    assert served == {own: 2, InteractionType.RANDOM: 2, InteractionType.DETERMINISTIC: 1}


# --- Statistics ----------------------------------------------------------------------------------


def test_statistics() -> None:
    def policy(batch: TensorDictBase) -> TensorDict:
        if bool((batch["x"] < 0).any()):
            raise ValueError("negative")
        return double(batch)

    with (
        make(policy, max_batch_size=4, policy_version=7) as server,
        clients_of(server, 4) as clients,
    ):
        futures = [client.submit(request(i)) for i in range(50) for client in clients]
        assert len(answered(futures)) == 200
        with pytest.raises(ValueError, match="negative"):
            clients[0](request(-1.0), timeout=SECONDS)
        assert wait_until(lambda: server.stats().requests == 205, SECONDS)
        began = time.perf_counter()
        found = server.stats(reset=True)
        assert (found.requests, found.errors, found.clients, found.policy_version) == (205, 1, 4, 7)
        assert sum(size * times for size, times in found.batch_sizes.items()) == 204
        assert sum(found.batch_sizes.values()) == found.batches
        assert max(found.batch_sizes) <= 4
        assert found.mean_batch_size == pytest.approx(204 / found.batches)
        assert 0 < found.queue_ms_p50 <= found.queue_ms_p95 <= found.queue_ms_p99
        assert 0 < found.forward_ms_p50 <= found.forward_ms_p95 <= found.forward_ms_p99
        assert 0.0 <= found.idle_fraction <= 1.0
        assert found.requests_per_s == pytest.approx(205 / found.seconds)
        again = server.stats()
        assert again.seconds <= time.perf_counter() - began
        assert (again.requests, again.batches, again.errors, again.batch_sizes) == (0, 0, 0, {})
        assert (again.queue_ms_p50, again.forward_ms_p99, again.mean_batch_size) == (0.0, 0.0, 0.0)
        clients[0](request(1.0), timeout=SECONDS)
        assert wait_until(lambda: server.stats().requests == 1, SECONDS)


def test_who_has_a_reply_finds_it_counted() -> None:
    counted = []

    class Watched(ThreadingTransport):
        def resolve(self, callback: Any, result: TensorDictBase) -> None:
            counted.append(server.stats().requests)
            super().resolve(callback, result)

    with InferenceServer(double, Watched()) as server, server.client() as client:
        for number in range(3):
            client(request(number), SECONDS)
    assert counted == [1, 2, 3]


def test_a_batch_that_cannot_be_answered_counts_as_an_error_only() -> None:
    class Refusing(ThreadingTransport):
        begin_anew = False

        def resolve(self, callback: Any, result: TensorDictBase) -> None:
            if self.begin_anew:
                server.stats(reset=True)
            raise OverflowError("no room")

    transport = Refusing()
    with InferenceServer(double, transport) as server, server.client() as client:
        for transport.begin_anew in (False, True):
            with pytest.raises(OverflowError, match="no room"):
                client(request(1), SECONDS)
            assert wait_until(lambda: server.stats().errors == 1, SECONDS)
            found = server.stats(reset=True)
            assert (found.requests, found.errors, found.batches, found.batch_sizes) == (1, 1, 0, {})
            assert found.mean_batch_size == 0.0


def test_an_idle_server_is_idle() -> None:
    with make() as server, clients_of(server, 1):
        assert wait_until(lambda: server.stats().requests == 1, SECONDS)
        server.stats(reset=True)
        assert wait_until(lambda: server.stats().seconds > 0.1, SECONDS)
        assert server.stats().idle_fraction == 1.0


# --- Weights -------------------------------------------------------------------------------------


class Parameter(torch.nn.Module):
    """Answers with its only weight."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.value = torch.nn.Parameter(torch.tensor(value))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.value.expand(x.shape) + 0 * x


KEYS = {"in_keys": ["x"], "out_keys": ["y"]}


@INLINE
def test_each_reply_has_the_weights_of_its_version(inline: bool | None) -> None:
    updates = 300
    finished = threading.Event()

    def step(client: Any) -> list[tuple[float, int]]:
        seen = []
        while not finished.is_set() or not seen or seen[-1][1] < updates:
            reply = client(request(len(seen)), timeout=SECONDS)
            seen.append((float(reply["y"]), int(reply["policy_version"])))
        return seen

    config = InferenceServerConfig(inline=inline)
    with (
        make(Parameter(), server_config=config, **KEYS) as server,
        clients_of(server, 4) as clients,
        ThreadPoolExecutor(4) as pool,
    ):
        stepping = [pool.submit(step, client) for client in clients]
        for version in range(1, updates + 1):
            assert server.update_model(lambda m, v=version: m.value.fill_(float(v))) == version
        finished.set()
        for future in stepping:
            seen = future.result(SECONDS)
            versions = [version for _, version in seen]
            assert [value for value, _ in seen] == versions
            assert versions == sorted(versions)
            assert versions[-1] == updates
        assert server.policy_version == server.stats().policy_version == updates


def test_versions_can_be_given() -> None:
    with make(Parameter(), policy_version=5, **KEYS) as server, server.client() as client:
        assert int(client(REQUEST, timeout=SECONDS)["policy_version"]) == 5
        assert server.update_model(lambda m: m.value.fill_(2.0), version=40) == 40
        assert int(client(REQUEST, timeout=SECONDS)["policy_version"]) == 40
        assert server.update_model(lambda m: m.value.fill_(3.0)) == 41


def test_a_model_is_updated_before_the_start() -> None:
    server = make(Parameter(), **KEYS)
    assert server.update_model(lambda m: m.value.fill_(9.0)) == 1
    with server, server.client() as client:
        assert float(client(REQUEST, timeout=SECONDS)["y"]) == 9.0


def test_a_change_that_raises_does_not_count() -> None:
    def broken(_: Any) -> None:
        raise KeyError("no such weight")

    with make(Parameter(1.0), **KEYS) as server, server.client() as client:
        with pytest.raises(KeyError, match="no such weight"):
            server.update_model(broken)
        reply = client(REQUEST, timeout=SECONDS)
        assert (float(reply["y"]), int(reply["policy_version"])) == (1.0, 0)


@pytest.mark.parametrize(("share", "expected"), [(False, 1.0), (True, 2.0)])
def test_the_callers_module(share: bool, expected: float) -> None:
    module = Parameter(1.0)
    with make(module, share_weights=share, **KEYS) as server, server.client() as client:
        with torch.no_grad():
            module.value.fill_(2.0)
        assert float(client(REQUEST, timeout=SECONDS)["y"]) == expected


def test_buffers_are_weights_too() -> None:
    norm = torch.nn.BatchNorm1d(1, affine=False, eps=1.0).eval()
    norm.running_var.fill_(0.0)
    specs = TensorDict({"x": torch.zeros(1)}), TensorDict({"y": torch.zeros(1)})
    with make(norm, *specs, **KEYS) as server, server.client() as client:
        ask = TensorDict({"x": torch.tensor([3.0])})
        assert client(ask, timeout=SECONDS)["y"].tolist() == [3.0]
        norm.running_mean.fill_(1.0)
        norm.running_var.fill_(3.0)
        assert client(ask, timeout=SECONDS)["y"].tolist() == [3.0]
        server.update_model(lambda model: model.load_state_dict(norm.state_dict()))
        assert client(ask, timeout=SECONDS)["y"].tolist() == [1.0]


@pytest.mark.parametrize("key", ["policy_version", ("meta", "version"), None])
def test_where_the_version_goes(key: Any) -> None:
    with make(policy_version=3, policy_version_key=key) as server, server.client() as client:
        reply = client(request(1.0), timeout=SECONDS)
        expected = {"y"} if key is None else {"y", key}
        assert set(reply.keys(include_nested=True, leaves_only=True)) == expected
        if key is not None:
            assert reply[key].dtype == torch.int64
            assert int(reply[key]) == 3


# --- Policies ------------------------------------------------------------------------------------


def test_a_plain_module_with_nested_keys() -> None:
    specs = (
        TensorDict({"agents": {"obs": torch.zeros(3)}}),
        TensorDict({"agents": {"action": torch.zeros(2)}}),
    )
    linear = torch.nn.Linear(3, 2)
    keys = {"in_keys": [("agents", "obs")], "out_keys": [("agents", "action")]}
    with make(linear, *specs, **keys) as server, server.client() as client:
        obs = torch.arange(3.0)
        reply = client(TensorDict({"agents": {"obs": obs}}), timeout=SECONDS)
        torch.testing.assert_close(reply["agents", "action"], linear(obs).detach())
        assert not reply["agents", "action"].requires_grad


def test_a_tensordict_module() -> None:
    module = TensorDictModule(Parameter(4.0), in_keys=["x"], out_keys=["y"])
    with make(module) as server, server.client() as client:
        assert float(client(REQUEST, timeout=SECONDS)["y"]) == 4.0


def test_a_policy_on_batches_of_environments() -> None:
    shapes = []

    def policy(batch: TensorDictBase) -> TensorDict:
        shapes.append(batch.batch_size)
        return double(batch)

    specs = TensorDict({"x": torch.zeros(3)}, [3]), TensorDict({"y": torch.zeros(3)}, [3])
    with make(policy, *specs) as server, server.client() as client:
        reply = client(TensorDict({"x": torch.arange(3.0)}, [3]), timeout=SECONDS)
    assert shapes == [torch.Size([3])]
    assert reply["y"].tolist() == [0.0, 2.0, 4.0]
    assert reply["policy_version"].tolist() == [0, 0, 0]


def wrong_type(batch: TensorDictBase) -> Any:
    return batch["x"]


def missing_key(batch: TensorDictBase) -> Any:
    return TensorDict({"z": batch["x"]}, batch.batch_size)


def wrong_dtype(batch: TensorDictBase) -> Any:
    return TensorDict({"y": batch["x"].double()}, batch.batch_size)


def wrong_shape(batch: TensorDictBase) -> Any:
    return TensorDict({"y": batch["x"].unsqueeze(-1)}, batch.batch_size)


def wrong_count(batch: TensorDictBase) -> Any:
    return TensorDict({"y": torch.zeros(batch.batch_size[0] + 1)}, [batch.batch_size[0] + 1])


FAULTS = pytest.mark.parametrize(
    ("fault", "error", "message"),
    [
        (wrong_type, TypeError, "policy returned Tensor, expected a TensorDict.*in_keys"),
        (missing_key, KeyError, "response 'y'.*'z'"),
        (wrong_dtype, TypeError, "response 'y': expected float32.*float64"),
        (wrong_shape, ValueError, "response 'y': expected"),
        (wrong_count, ValueError, "."),
    ],
)


def faulty(fault: Callable[[TensorDictBase], Any]) -> Callable[[TensorDictBase], Any]:
    """Wrong for the requests below zero only."""
    return lambda batch: fault(batch) if float(batch["x"].min()) < 0 else double(batch)


@FAULTS
@pytest.mark.parametrize("together", [False, True])
def test_a_wrong_answer_is_an_error_at_its_clients_only(
    fault: Any, error: type[Exception], message: str, together: bool
) -> None:
    gate = Gate(faulty(fault))
    with blocked_on_good(gate) as (server, clients):
        bad = [client.submit(request(-5.0)) for client in clients[: 2 if together else 1]]
        assert wait_until(lambda: server.transport.num_waiting == len(bad), SECONDS)
        gate.opened.set()
        for future in bad:
            with pytest.raises(error, match=message):
                future.result(SECONDS)
        good = [client.submit(request(number)) for number, client in enumerate(clients)]
        assert answered(good) == [2.0 * number for number in range(6)]
        assert server.stats().errors == len(bad)


@contextmanager
def blocked_on_good(gate: Gate, **arguments: Any) -> Iterator[tuple[InferenceServer, list[Any]]]:
    gate.opened.set()
    with make(gate, **arguments) as server, clients_of(server, 7) as (first, *others):
        gate.opened.clear()
        gate.entered.clear()
        held = first.submit(request(1.0))
        assert gate.entered.wait(SECONDS)
        try:
            yield server, others
        finally:
            gate.opened.set()
            assert float(held.result(SECONDS)["y"]) == 2.0


@FAULTS
def test_a_wrong_answer_beside_a_right_one(
    fault: Any, error: type[Exception], message: str
) -> None:
    with make(faulty(fault), max_batch_size=1) as server, clients_of(server, 2) as (good, bad):
        futures = [client.submit(request(x)) for client, x in ((good, 3.0), (bad, -3.0))]
        assert float(futures[0].result(SECONDS)["y"]) == 6.0
        with pytest.raises(error, match=message):
            futures[1].result(SECONDS)


@pytest.mark.parametrize("model", [3, "policy", None])
def test_a_model_that_cannot_be_called(model: Any) -> None:
    with (
        DistributedTransport(REQUEST, RESPONSE) as transport,
        pytest.raises(TypeError, match=r"model: expected an nn\.Module or a callable"),
    ):
        InferenceServer(model, transport)


@pytest.mark.parametrize("keys", [{"in_keys": ["x"]}, {"out_keys": ["y"]}])
def test_in_keys_and_out_keys_go_together(keys: Any) -> None:
    with (
        DistributedTransport(REQUEST, RESPONSE) as transport,
        pytest.raises(ValueError, match="in_keys and out_keys go together"),
    ):
        InferenceServer(Parameter(), transport, **keys)


# --- collate_fn ----------------------------------------------------------------------------------


@FAULTS
def test_a_wrong_answer_with_collate_fn(fault: Any, error: type[Exception], message: str) -> None:
    gate = Gate(faulty(fault))
    with blocked_on_good(gate, collate_fn=torch.stack) as (server, clients):
        bad = [client.submit(request(-number)) for number, client in enumerate(clients[:3], 1)]
        assert wait_until(lambda: server.transport.num_waiting == 3, SECONDS)
        gate.opened.set()
        for future in bad:
            with pytest.raises((error, ValueError)):  # each reply is checked on its own here
                future.result(SECONDS)
        assert answered([clients[0].submit(request(4.0))]) == [8.0]
        assert server.stats().errors == 3


def test_collate_fn_makes_the_input() -> None:
    collated: list[int] = []

    def collate(payloads: list[TensorDictBase]) -> TensorDictBase:
        collated.append(len(payloads))
        if any(float(payload["x"]) == 13.0 for payload in payloads):
            raise ZeroDivisionError("unlucky")
        batch = torch.stack(payloads)
        return batch.set("x", batch["x"] + 1)

    with make(collate_fn=collate, max_batch_size=3) as server, clients_of(server, 4) as clients:
        collated.clear()
        futures = [client.submit(request(number)) for number, client in enumerate(clients)]
        assert answered(futures) == [2.0, 4.0, 6.0, 8.0]
        assert sum(collated) == 4
        assert max(collated) <= 3
        with pytest.raises(ZeroDivisionError, match="unlucky"):
            clients[0](request(13.0), timeout=SECONDS)
        reply = clients[0](request(1.0), timeout=SECONDS)
        assert float(reply["y"]) == 4.0
        assert int(reply["policy_version"]) == 0


# --- The server's life ---------------------------------------------------------------------------


def test_a_server_starts_once() -> None:
    server = make()
    assert not server.is_alive
    assert server.start() is server
    assert server.is_alive
    with pytest.raises(RuntimeError, match="started already"):
        server.start()
    server.shutdown()
    server.shutdown()
    assert not server.is_alive
    with pytest.raises(ClosedError, match="shut down"):
        server.start()
    with pytest.raises(ClosedError):
        server.client()


def test_a_context_manager_starts_what_has_not_started() -> None:
    server = make().start()
    with server as entered:
        assert entered is server
        client = server.client()
        assert float(client(request(2.0), timeout=SECONDS)["y"]) == 4.0
    assert not server.is_alive
    with pytest.raises(ServerClosedError):
        client(request(2.0), timeout=SECONDS)
    client.close()
    with pytest.raises(ClosedError):
        client(request(2.0))


def test_a_server_that_never_started_can_be_shut_down() -> None:
    make().shutdown()


def test_a_policy_that_outlasts_the_shutdown() -> None:
    gate = Gate()
    server = make(gate).start()
    client = server.client()
    held = client.submit(request(1.0))
    assert gate.entered.wait(SECONDS)
    with pytest.raises(TimeoutError, match=r"still computing 0\.2 s"):
        server.shutdown(timeout=0.2)
    with pytest.raises(ServerClosedError):
        held.result(SECONDS)
    gate.opened.set()
    assert wait_until(lambda: not server.is_alive, SECONDS)
    client.close()


@pytest.mark.parametrize(
    ("count", "error"),
    [(0, ValueError), (-1, ValueError), (True, TypeError), (2.0, TypeError), (None, TypeError)],
)
def test_a_number_of_clients(count: Any, error: type[Exception]) -> None:
    with make() as server, pytest.raises(error, match="count="):
        server.clients(count)


def test_many_clients() -> None:
    with make() as server, clients_of(server, 3) as clients:
        assert len({id(client) for client in clients}) == 3
        assert server.stats().clients == 3
    assert "closed" in repr(server)


# --- Configuration -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_batch_size": 0}, "max_batch_size=0"),
        ({"min_batch_size": 0}, "min_batch_size=0"),
        ({"max_batch_size": 2, "min_batch_size": 3}, "min_batch_size=3 is larger"),
        ({"timeout": -1.0}, "timeout=-1"),
        ({"timeout": float("inf")}, "timeout=inf"),
        ({"timeout": float("nan")}, "timeout=nan"),
    ],
)
def test_values_out_of_range(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        InferenceServer(double, **arguments)
    with pytest.raises(ValueError, match=message):
        InferenceServerConfig(**arguments)


@pytest.mark.parametrize(
    "arguments",
    [{"max_batch_size": 2.0}, {"min_batch_size": True}, {"timeout": "1"}, {"stats_window": None}],
)
def test_values_of_another_type(arguments: Any) -> None:
    with pytest.raises(TypeError, match=next(iter(arguments))):
        InferenceServerConfig(**arguments)


def test_inline_excludes_waiting_for_others() -> None:
    with pytest.raises(ValueError, match="inline=True needs min_batch_size=1"):
        InferenceServerConfig(inline=True, min_batch_size=2)


def test_batching_arguments_are_given_once() -> None:
    with pytest.raises(ValueError, match=r"timeout.*server_config"):
        InferenceServer(double, server_config=InferenceServerConfig(), timeout=0.1)


@INLINE
def test_replies_do_not_depend_on_who_serves(inline: bool | None) -> None:
    config = InferenceServerConfig(inline=inline)
    with make(server_config=config) as server, clients_of(server, 3) as clients:
        for _ in range(20):
            futures = [client.submit(request(number)) for number, client in enumerate(clients)]
            assert answered(futures) == [0.0, 2.0, 4.0]
        for number in range(20):
            assert float(clients[0](request(number))["y"]) == 2.0 * number


# --- Which transport -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transport", "options"),
    [
        ("distributed", None),
        ("Distributed", {"timeout": 30.0}),
        (TransportConfig("distributed"), {"window": 3}),
        (TransportConfig("distributed", {"timeout": 30.0}), None),
    ],
)
def test_a_transport_by_name(transport: Any, options: Any) -> None:
    server = InferenceServer(
        double,
        transport,
        request_spec=REQUEST,
        response_spec=RESPONSE,
        transport_options=options,
    )
    with server, server.client() as client:
        assert server.transport_kind == server.transport_config.kind == "distributed"
        assert float(client(request(2.0), timeout=SECONDS)["y"]) == 4.0


def test_a_ready_transport_has_no_configuration() -> None:
    with make() as server:
        assert server.transport_config is None
        assert server.transport_kind == "distributed"


@pytest.mark.parametrize(
    ("transport", "error", "message"),
    [
        ("ray", ValueError, "'ray' does not work with policy_backend='threading'.*'distributed'"),
        ("slot", ValueError, "'slot' needs num_slots"),
        ("pigeon", ValueError, "'pigeon'"),
        ("distributed", ValueError, "needs request_spec and response_spec"),
        (3, TypeError, "int"),
    ],
)
def test_a_transport_that_does_not_exist(
    transport: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        InferenceServer(double, transport)


def test_specs_beside_a_ready_transport() -> None:
    with (
        DistributedTransport(REQUEST, RESPONSE) as transport,
        pytest.raises(ValueError, match="request_spec"),
    ):
        InferenceServer(double, transport, request_spec=REQUEST, response_spec=RESPONSE)


# --- A transport of somebody else's --------------------------------------------------------------


class MailboxClient:
    def __init__(self, box: Mailbox) -> None:
        self._box = box

    def __call__(self, payload: TensorDictBase, timeout: float | None = None) -> TensorDictBase:
        return self.submit(payload).result(timeout)

    def submit(self, payload: TensorDictBase) -> Any:
        return self._box.submit(payload)

    def close(self) -> None:
        self._box = Mailbox()


class Mailbox:
    """The smallest transport there is: threads, no rows, requests of any shape."""

    def __init__(self) -> None:
        self._waiting: queue.Queue[tuple[TensorDictBase, Future[Any], float]] = queue.Queue()
        self._arrived = threading.Event()
        self.closed = False

    def client(self) -> MailboxClient:
        return MailboxClient(self)

    def submit(self, payload: TensorDictBase) -> Any:
        future: Future[Any] = Future()
        if self.closed:
            raise ServerClosedError("the mailbox is closed")
        self._waiting.put((payload.clone(), future, time.perf_counter()))
        self._arrived.set()
        return future

    def wait_for_work(self, timeout: float | None = None) -> bool:
        self._arrived.wait(timeout)
        self._arrived.clear()
        return not self._waiting.empty()

    def drain(self, max_items: int) -> tuple[list[TensorDictBase], list[Any]]:
        payloads, futures, _ = self.drain_with_timing(max_items)
        return payloads, futures

    def drain_with_timing(self, max_items: int) -> tuple[list[Any], list[Any], list[float]]:
        found = []
        while len(found) < max_items and not self._waiting.empty():
            found.append(self._waiting.get())
        if not self._waiting.empty():
            self._arrived.set()
        return [f[0] for f in found], [f[1] for f in found], [f[2] for f in found]

    def resolve(self, callback: Future[Any], result: TensorDictBase) -> None:
        callback.set_result(result)

    def resolve_exception(self, callback: Future[Any], exc: BaseException) -> None:
        callback.set_exception(exc)

    def close(self) -> None:
        self.closed = True
        self._arrived.set()


def test_a_transport_of_another_make_is_served() -> None:
    gate = Gate()
    box = Mailbox()
    server = InferenceServer(gate, box, max_batch_size=4, policy_version=2)
    assert server.transport_kind == "custom"
    assert server.transport_config is None
    with server:
        client = server.client()
        first = client.submit(request(0.0))
        assert gate.entered.wait(SECONDS)
        futures = [client.submit(request(number)) for number in range(6)]
        gate.opened.set()
        assert answered([first, *futures]) == [0.0, 0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
        assert int(futures[0].result()["policy_version"]) == 2
        assert gate.sizes == [1, 4, 2]
        assert wait_until(lambda: server.stats().requests == 7, SECONDS)
        with pytest.raises(TypeError, match="Mailbox does not know when its clients leave"):
            server.serve()
    assert box.closed


def test_a_transport_of_another_make_is_let_go_at_once() -> None:
    server = InferenceServer(double, Mailbox()).start()
    began = time.monotonic()
    server.shutdown(2 * SECONDS)
    assert time.monotonic() - began < SECONDS
    assert not server.is_alive


def test_an_error_over_a_transport_of_another_make() -> None:
    with InferenceServer(faulty(missing_key), Mailbox(), max_batch_size=1) as server:
        client = server.client()
        ragged = TensorDict({"x": torch.ones(2), "more": torch.zeros(5)})
        assert client(ragged, timeout=SECONDS)["y"].tolist() == [2.0, 2.0]
        with pytest.raises(ValueError, match="boom"):
            InferenceServer(double, Mailbox()).update_model(boom)
        assert float(client(request(1.0), timeout=SECONDS)["y"]) == 2.0


def boom(_: Any) -> None:
    raise ValueError("boom")
