"""Batches of one size: what the policy sees, what clients get, and policies that compile for each size."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support import wait_until
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import InteractionType, TensorDictModule, set_interaction_type
from tensordict.nn.probabilistic import interaction_type

from meshinfer import (
    DistributedTransport,
    InferenceServer,
    InferenceServerConfig,
    TransportConfig,
    make_inference_transport,
)

SECONDS = 20.0
WIDTH = 4
REQUEST = TensorDict({"x": torch.zeros(WIDTH)})
RESPONSE = TensorDict({"y": torch.zeros(2)})
KEYS: dict[str, Any] = {"in_keys": ["x"], "out_keys": ["y"]}
CLIENTS = 17


def spec_of(example: TensorDict, each: int) -> TensorDict:
    return example.expand(each) if each else example


TRANSPORTS: dict[str, Callable[[int], Any]] = {
    "distributed": lambda each: DistributedTransport(
        spec_of(REQUEST, each), spec_of(RESPONSE, each)
    ),
    "queue": lambda _: make_inference_transport("queue"),
    "slot": lambda _: make_inference_transport(TransportConfig("slot", {"num_slots": CLIENTS})),
}
EACH_KIND = pytest.mark.parametrize("kind", TRANSPORTS)


def observation(value: float, each: int = 0) -> TensorDict:
    x = torch.linspace(-1.0, 1.0, WIDTH) * value + value
    return TensorDict({"x": x.expand(each, WIDTH) if each else x}, [each] if each else [])


def double(batch: TensorDictBase) -> TensorDict:
    return TensorDict({"y": 2 * batch["x"][..., :2]}, batch.batch_size)


class Recording:
    """A policy that keeps what it saw, and holds its batch while its gate is closed."""

    def __init__(self, model: Callable[[TensorDictBase], Any] = double) -> None:
        self.batches: list[TensorDictBase] = []
        self.kinds: list[InteractionType | None] = []
        self.entered, self.opened = threading.Event(), threading.Event()
        self.opened.set()
        self._model = model

    def __call__(self, batch: TensorDictBase) -> Any:
        self.batches.append(batch.clone())
        self.kinds.append(interaction_type())
        self.entered.set()
        assert self.opened.wait(SECONDS)
        return self._model(batch)


class Served:
    """A server, its policy and its clients."""

    def __init__(self, server: InferenceServer, policy: Recording, clients: list[Any]) -> None:
        self.server = server
        self.policy = policy
        self.clients = clients

    def ask_together(self, requests: Sequence[TensorDict]) -> list[Any]:
        """The futures of requests that were served in one batch: they came while another was computed."""
        first, *others = self.clients
        self.policy.entered.clear()
        self.policy.opened.clear()
        held = first.submit(requests[0])
        assert self.policy.entered.wait(SECONDS)
        futures = [c.submit(request) for c, request in zip(others, requests, strict=False)]
        assert wait_until(lambda: self.server.transport.num_waiting == len(futures), SECONDS)
        self.policy.batches.clear()
        self.policy.opened.set()
        held.result(SECONDS)
        return futures


@contextmanager
def served(
    model: Callable[[TensorDictBase], Any] = double,
    kind: str = "distributed",
    each: int = 0,
    **arguments: Any,
) -> Iterator[Served]:
    policy = Recording(model)
    with InferenceServer(policy, TRANSPORTS[kind](each), **arguments) as server:
        clients = server.clients(CLIENTS)
        try:
            yield Served(server, policy, clients)
        finally:
            policy.opened.set()
            for client in clients:
                client.close()


# --- What the policy sees, and what clients get --------------------------------------------------


@EACH_KIND
@pytest.mark.parametrize("each", [0, 3])
def test_the_policy_sees_one_size_and_clients_their_own_rows(kind: str, each: int) -> None:
    with served(kind=kind, each=each, static_batch_size=8) as it:
        asked = 0
        for count in (1, 2, 5, 8):
            requests = [observation(value + 1, each) for value in range(count)]
            futures = it.ask_together(requests)
            for request, future in zip(requests, futures, strict=True):
                reply = future.result(SECONDS)
                assert reply.batch_size == request.batch_size
                torch.testing.assert_close(reply["y"], 2 * request["x"][..., :2])
            (batch,) = it.policy.batches
            seen = batch["x"].reshape(8, each or 1, WIDTH)
            # In whichever order they came.
            found = sorted(float(part[0, -1]) for part in seen[:count])
            assert found == sorted(float(request["x"].flatten()[-1]) for request in requests)
            assert torch.equal(seen[count:], seen[count - 1].expand(8 - count, -1, -1))
            assert batch.batch_size == (8 * (each or 1),)
            asked += 1 + count
        assert wait_until(lambda: it.server.stats().requests == asked, SECONDS)
        assert it.server.stats().batch_sizes == {1: 5, 2: 1, 5: 1, 8: 1}
        assert it.server.stats().errors == 0


@EACH_KIND
def test_a_batch_is_no_larger_than_its_maximum(kind: str) -> None:
    with served(kind=kind, static_batch_size=8, max_batch_size=3) as it:
        replies = [future.result(SECONDS) for future in it.ask_together([observation(1)] * 7)]
        assert len(replies) == 7
        assert [batch.batch_size[0] for batch in it.policy.batches] == [8, 8, 8]
        assert wait_until(lambda: it.server.stats().requests == 8, SECONDS)
        assert it.server.stats().batch_sizes == {1: 2, 3: 2}


def test_collate_fn_gets_the_padded_list() -> None:
    seen: list[int] = []

    def collate(payloads: list[TensorDictBase]) -> Any:
        seen.append(len(payloads))
        return torch.stack(payloads)  # type: ignore[arg-type]

    with served(kind="queue", static_batch_size=4, collate_fn=collate) as it:
        futures = it.ask_together([observation(1), observation(2)])
        assert [float(future.result(SECONDS)["y"][1]) for future in futures] == [
            float(2 * observation(value)["x"][1]) for value in (1, 2)
        ]
        assert set(seen) == {4}


def test_a_result_whose_leaves_alone_have_rows() -> None:
    def without_batch_size(batch: TensorDictBase) -> TensorDict:
        return TensorDict({"y": 2 * batch["x"][..., :2], "scale": torch.ones(3)})

    with served(without_batch_size, static_batch_size=4) as it:
        first, second = it.ask_together([observation(1), observation(2)])
        torch.testing.assert_close(first.result(SECONDS)["y"], 2 * observation(1)["x"][:2])
        torch.testing.assert_close(second.result(SECONDS)["y"], 2 * observation(2)["x"][:2])


@EACH_KIND
def test_exploration_modes_are_padded_apart(kind: str) -> None:
    with served(kind=kind, static_batch_size=4) as it:
        it.policy.opened.clear()
        held = it.clients[0].submit(observation(0))
        assert it.policy.entered.wait(SECONDS)
        futures = []
        for client, mode in zip(it.clients[1:], ("RANDOM", "MODE", "RANDOM"), strict=False):
            with set_interaction_type(InteractionType[mode]):
                futures.append(client.submit(observation(len(futures) + 1)))
        assert wait_until(lambda: it.server.transport.num_waiting == 3, SECONDS)
        it.policy.opened.set()
        held.result(SECONDS)
        for value, future in enumerate(futures):
            torch.testing.assert_close(
                future.result(SECONDS)["y"], 2 * observation(value + 1)["x"][:2]
            )
        assert len(it.policy.kinds) == 3
        assert set(it.policy.kinds) == {None, InteractionType.RANDOM, InteractionType.MODE}
        assert {batch.batch_size[0] for batch in it.policy.batches} == {4}


@pytest.mark.parametrize("kind", ["distributed", "slot"])
def test_what_a_policy_does_to_its_batch_is_undone(kind: str) -> None:
    def rude(batch: TensorDictBase) -> TensorDict:
        result = TensorDict({"y": 2 * batch["x"][:, :2]}, batch.batch_size)
        batch["x"].mul_(100.0)
        batch["x"].unsqueeze_(0)
        batch["x"].requires_grad_()
        batch["more"] = torch.zeros(batch.batch_size)
        return result

    with served(rude, kind, static_batch_size=4) as it:
        for value in range(3):
            for count in (1, 3):
                futures = it.ask_together([observation(value)] * count)
                for future in futures:
                    torch.testing.assert_close(
                        future.result(SECONDS)["y"], 2 * observation(value)["x"][:2]
                    )


# --- Errors --------------------------------------------------------------------------------------


@EACH_KIND
def test_an_error_is_counted_for_real_requests(kind: str) -> None:
    def refuse(batch: TensorDictBase) -> TensorDict:
        if float(batch["x"].max()) > 100:
            raise ArithmeticError("too large")
        return double(batch)

    with served(refuse, kind, static_batch_size=8) as it:
        for future in it.ask_together([observation(1), observation(1000), observation(1)]):
            with pytest.raises(ArithmeticError, match="too large"):
                future.result(SECONDS)
        assert wait_until(lambda: it.server.stats().errors == 3, SECONDS)
        assert it.server.stats().requests == 4
        it.clients[1](observation(1), timeout=SECONDS)


@EACH_KIND
def test_another_number_of_rows(kind: str) -> None:
    def forgetful(batch: TensorDictBase) -> Any:
        return double(batch)[:3]

    with served(forgetful, kind, static_batch_size=8) as it:
        client = it.clients[0]
        for _ in range(2):
            with pytest.raises(ValueError, match="3 rows for a static batch of 8"):
                client(observation(1), timeout=SECONDS)


# --- The same row, whatever its neighbours -------------------------------------------------------


@pytest.mark.parametrize("kind", ["queue", "slot"])
def test_a_reply_is_the_same_to_the_bit_alone_and_among_others(kind: str) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(WIDTH, 257), torch.nn.Tanh(), torch.nn.Linear(257, 2))

    def policy(batch: TensorDictBase) -> TensorDict:
        return TensorDict({"y": net(batch["x"])}, batch.batch_size)

    with served(policy, kind, static_batch_size=16) as it:
        probe = observation(0.7)
        alone = it.ask_together([probe])[0].result(SECONDS)["y"]
        for count in range(2, 17):
            others = [observation(float(value)) for value in torch.randn(count - 1)]
            among = it.ask_together([probe, *others])[0].result(SECONDS)["y"]
            assert torch.equal(alone, among), count


def test_noise_does_not_depend_on_the_number_of_neighbours() -> None:
    def noisy(batch: TensorDictBase) -> TensorDict:
        generator = torch.Generator().manual_seed(3)
        noise = torch.randn(*batch.batch_size, 2, generator=generator)
        return TensorDict({"y": batch["x"][:, :2] + noise}, batch.batch_size)

    with served(noisy, "queue", static_batch_size=16) as it:
        alone = it.ask_together([observation(1)])[0].result(SECONDS)["y"]
        for count in (2, 7, 16):
            among = it.ask_together([observation(1)] * count)[0].result(SECONDS)["y"]
            assert torch.equal(alone, among)


# --- Compiled policies ---------------------------------------------------------------------------


class Compiler:
    """A backend for ``torch.compile`` that counts, and runs what it was given."""

    def __init__(self) -> None:
        torch._dynamo.reset()
        self.compiled = 0

    def __deepcopy__(self, _: object) -> Compiler:
        return self

    def __call__(self, graph: Any, _: object) -> Callable[..., Any]:
        self.compiled += 1
        return graph.forward  # type: ignore[no-any-return]


@pytest.fixture
def compiler() -> Iterator[Compiler]:
    yield Compiler()
    torch._dynamo.reset()


@pytest.fixture
def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(WIDTH, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))


def compiled_policies(net: torch.nn.Module, compiler: Compiler) -> dict[str, tuple[Any, Any]]:
    return {
        "plain": (torch.compile(net, backend=compiler), KEYS),
        "inside": (TensorDictModule(torch.compile(net, backend=compiler), ["x"], ["y"]), {}),
        "outside": (torch.compile(TensorDictModule(net, ["x"], ["y"]), backend=compiler), {}),
    }


@contextmanager
def clients_of(server: InferenceServer, count: int) -> Iterator[list[Any]]:
    clients = server.clients(count)
    try:
        yield clients
    finally:
        for client in clients:
            client.close()


@EACH_KIND
@pytest.mark.parametrize("form", ["plain", "inside", "outside"])
def test_a_policy_compiles_once(
    kind: str, form: str, compiler: Compiler, net: torch.nn.Module
) -> None:
    """And kept replies stay what they were."""
    model, keys = compiled_policies(net, compiler)[form]
    server = InferenceServer(model, TRANSPORTS[kind](0), static_batch_size=12, **keys)
    server.prepare(REQUEST)
    assert compiler.compiled == 1
    assert server.stats().requests == 0
    kept = []
    with server, clients_of(server, 12) as clients:
        for count in [*range(1, 13), 5, 1]:
            requests = [observation(count + index) for index in range(count)]
            futures: list[Any] = []

            def submit_all(_: Any, requests: Any = requests, futures: Any = futures) -> None:
                futures += [c.submit(r) for c, r in zip(clients, requests, strict=False)]
                come = len(requests)
                assert wait_until(lambda: server.transport.num_waiting == come, SECONDS)

            server.update_model(submit_all)  # nothing is computed meanwhile, so they are one batch
            kept += [(r, f.result(SECONDS)) for r, f in zip(requests, futures, strict=True)]
        expected = {**dict.fromkeys(range(1, 13), 1), 1: 2, 5: 2}
        assert wait_until(lambda: server.stats().batch_sizes == expected, SECONDS), server.stats()
    assert compiler.compiled == 1
    for request, reply in kept:
        torch.testing.assert_close(reply["y"], net(request["x"]))


def test_without_preparation_the_first_batch_compiles(
    compiler: Compiler, net: torch.nn.Module
) -> None:
    policy = Recording(TensorDictModule(torch.compile(net, backend=compiler), ["x"], ["y"]))
    with InferenceServer(policy, TRANSPORTS["queue"](0), static_batch_size=8) as server:
        it = Served(server, policy, server.clients(CLIENTS))
        for count in (3, 1, 8, 2):
            for future in it.ask_together([observation(1)] * count):
                future.result(SECONDS)
    assert compiler.compiled == 1


def test_other_sizes_would_compile_again(compiler: Compiler, net: torch.nn.Module) -> None:
    """What the others show is the work of the static batch."""
    policy = Recording(TensorDictModule(torch.compile(net, backend=compiler), ["x"], ["y"]))
    with InferenceServer(policy, TRANSPORTS["queue"](0)) as server:
        it = Served(server, policy, server.clients(CLIENTS))
        for count in (3, 1, 8, 2):
            for future in it.ask_together([observation(1)] * count):
                future.result(SECONDS)
    assert compiler.compiled > 1


@pytest.mark.parametrize("form", ["plain", "inside", "outside"])
def test_new_weights_reach_a_compiled_policy(
    form: str, compiler: Compiler, net: torch.nn.Module
) -> None:
    model, keys = compiled_policies(net, compiler)[form]
    server = InferenceServer(model, TRANSPORTS["queue"](0), static_batch_size=4, **keys)
    before = net(observation(1)["x"])
    with server.prepare(REQUEST), clients_of(server, 1) as (client,):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.zero_()
        torch.testing.assert_close(client(observation(1), timeout=SECONDS)["y"], before)
        assert server.update_policy_weights_(model) == 1
        reply = client(observation(1), timeout=SECONDS)
        assert reply["y"].tolist() == [0.0, 0.0]
        assert int(reply["policy_version"]) == 1

        def shift(served: torch.nn.Module) -> None:
            for name, parameter in served.named_parameters():
                if name.endswith("2.bias"):
                    parameter.copy_(torch.tensor([3.0, 4.0]))

        assert server.update_model(shift) == 2
        assert client(observation(1), timeout=SECONDS)["y"].tolist() == [3.0, 4.0]
    assert compiler.compiled == 1


def test_a_parameter_that_is_replaced(compiler: Compiler) -> None:
    """It may compile again; the old values must not be used."""
    module = torch.nn.Linear(WIDTH, 2)
    compiled = torch.compile(module, backend=compiler)
    with (
        InferenceServer(compiled, TRANSPORTS["queue"](0), static_batch_size=4, **KEYS) as server,
        clients_of(server, 1) as (client,),
    ):
        client(observation(1), timeout=SECONDS)

        def replace(served: Any) -> None:
            served.weight = torch.nn.Parameter(torch.zeros(2, WIDTH))
            served.bias = torch.nn.Parameter(torch.tensor([1.0, 2.0]))

        server.update_model(replace)
        assert client(observation(1), timeout=SECONDS)["y"].tolist() == [1.0, 2.0]
    assert compiler.compiled <= 2


class Scaled(torch.nn.Module):
    def __init__(self, part: torch.nn.Module | None = None) -> None:
        super().__init__()
        self.part = part or Scaled(torch.nn.Linear(WIDTH, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part(x) / 2


@pytest.mark.parametrize("part", [False, True])
def test_a_module_that_was_compiled_in_place(part: bool, compiler: Compiler) -> None:
    """Its copy would not be, so it is served itself or not at all."""
    module = Scaled()
    (module.part if part else module).compile(backend=compiler)
    with pytest.raises(ValueError, match=r"compiled in place.*torch\.compile\(module\)"):
        InferenceServer(module, TRANSPORTS["queue"](0), **KEYS)
    server = InferenceServer(
        module, TRANSPORTS["queue"](0), share_weights=True, static_batch_size=4, **KEYS
    )
    with server.prepare(REQUEST), clients_of(server, 1) as (client,):
        client(observation(1), timeout=SECONDS)
    assert compiler.compiled == 1


# --- prepare() -----------------------------------------------------------------------------------


def test_preparation_is_for_nobody() -> None:
    policy = Recording()
    server = InferenceServer(policy, TRANSPORTS["distributed"](3), static_batch_size=4)
    assert torch.is_grad_enabled()
    assert server.prepare(interaction_type=InteractionType.MEAN) is server
    assert torch.is_grad_enabled()
    assert {batch.batch_size for batch in policy.batches} == {torch.Size([12])}
    assert set(policy.kinds) == {InteractionType.MEAN}
    assert all(not batch["x"].any() for batch in policy.batches)
    stats = server.stats()
    assert (stats.requests, stats.batches, stats.errors) == (0, 0, 0)
    server.shutdown()


def test_preparation_while_it_serves() -> None:
    with served(static_batch_size=4) as it:
        it.server.prepare()
        it.server.prepare(observation(5))
        assert torch.equal(it.policy.batches[-1]["x"][2], observation(5)["x"])
        it.clients[0](observation(1), timeout=SECONDS)


def test_preparation_knows_the_spec_that_the_server_was_made_with() -> None:
    policy = Recording()
    server = InferenceServer(
        policy,
        "queue",
        static_batch_size=4,
        request_spec={"x": torch.ones(WIDTH)},
        response_spec=RESPONSE,
    )
    server.prepare()
    assert policy.batches[0]["x"].shape == (4, WIDTH)
    server.shutdown()


def test_what_preparation_needs() -> None:
    with (
        InferenceServer(double, TRANSPORTS["queue"](0)) as server,
        pytest.raises(ValueError, match="static_batch_size"),
    ):
        server.prepare(REQUEST)
    with (
        InferenceServer(double, TRANSPORTS["queue"](0), static_batch_size=4) as server,
        pytest.raises(ValueError, match="request_spec="),
    ):
        server.prepare()


def test_an_error_in_preparation() -> None:
    def fail(_: TensorDictBase) -> TensorDict:
        raise ArithmeticError("not today")

    with (
        InferenceServer(fail, TRANSPORTS["queue"](0), static_batch_size=4) as server,
        pytest.raises(ArithmeticError, match="not today"),
    ):
        server.prepare(REQUEST)


# --- Configuration -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, (64, None)),
        ({"static_batch_size": 16}, (16, 16)),
        ({"static_batch_size": 128}, (128, 128)),
        ({"max_batch_size": 3, "static_batch_size": 16}, (3, 16)),
        ({"max_batch_size": 16, "static_batch_size": 16}, (16, 16)),
    ],
)
def test_the_maximum_follows_the_static_size(arguments: Any, expected: Any) -> None:
    config = InferenceServerConfig(**arguments)
    assert (config.max_batch_size, config.static_batch_size) == expected
    with InferenceServer(double, TRANSPORTS["queue"](0), **arguments) as server:
        assert server.config == config


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"static_batch_size": 0}, ValueError, "static_batch_size=0"),
        ({"static_batch_size": 2.0}, TypeError, "static_batch_size=2.0"),
        (
            {"static_batch_size": 8, "max_batch_size": 9},
            ValueError,
            "static_batch_size=8 is smaller than max_batch_size=9",
        ),
        ({"static_batch_size": 2, "min_batch_size": 3}, ValueError, "min_batch_size=3 is larger"),
    ],
)
def test_static_sizes_that_cannot_be(arguments: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        InferenceServerConfig(**arguments)


def test_the_static_size_is_given_once() -> None:
    with pytest.raises(ValueError, match=r"static_batch_size.*server_config"):
        InferenceServer(double, server_config=InferenceServerConfig(), static_batch_size=4)
