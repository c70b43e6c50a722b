"""Servers that get their weights by themselves: no answer is of mixed weights, and its version says which they are."""

from __future__ import annotations

import copy
import gc
import logging
import multiprocessing
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from process_roles import HELD, Policy
from process_roles import request as held_request
from service_roles import modules_found
from support import wait_until
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule
from test_weights_transports import KINDS, make
from torch import nn
from weight_roles import (
    SECONDS,
    Versioned,
    asking,
    check_askers,
    reply,
    request,
    train_until_killed,
    values_of,
)

from meshinfer import (
    ClosedError,
    DirectWeights,
    InferenceServer,
    PeerLostError,
    TransportConfig,
    WeightTransport,
)

REMOTE = [kind for kind in KINDS if kind != "direct"]


@pytest.fixture(scope="module", autouse=True)
def _modules() -> Iterator[None]:
    with modules_found():
        yield


def serve(model: Any, weights: Any, **options: Any) -> Any:
    return InferenceServer(model, "queue", weight_transport=weights, **options)


def serve_elsewhere(weights: Any) -> Any:
    return InferenceServer(
        Versioned,
        "shared_memory",
        num_slots=8,
        request_spec=request(),
        response_spec=reply(),
        weight_transport=weights,
        service_backend="process",
        service_backend_options={"mp_context": "forkserver"},
    )


def train(publisher: Any, model: Versioned, updates: int, pause: float) -> None:
    """Versions from 1 on, of which at least every tenth is served before the next ones come."""
    paced = threading.Event()
    for version in range(1, updates + 1):
        publisher.publish(model.set(version))
        if version % 10 == 0:
            publisher.wait(timeout=SECONDS)  # however slow this machine is
        paced.wait(pause)


@pytest.mark.parametrize("kind", KINDS)
def test_every_answer_is_of_one_version(kind: str) -> None:
    """Under load, and with many more updates in a second than anybody makes."""
    updates = 1000 if kind == "direct" else 300
    model = Versioned()
    with make(kind, model) as transport, serve(model, transport) as server:
        publisher = transport.publisher(model)
        assert wait_until(lambda: publisher.subscribers == 1, SECONDS)
        with asking(server, 4) as askers:
            train(publisher, model, updates, 0.001)
            publisher.wait(timeout=SECONDS)
            seen = {asker: len(asker.versions) for asker in askers}
            assert wait_until(
                lambda: all(len(asker.versions) > seen[asker] + 1 for asker in askers), SECONDS
            )
        check_askers(askers)
        assert {asker.versions[-1] for asker in askers} == {updates}
        stats = server.stats(reset=True)
        assert stats.policy_version == updates
        assert updates / 10 <= stats.weight_updates <= updates
        assert server.stats().weight_updates == 0
        publisher.close()


@pytest.mark.parametrize("kind", REMOTE)
def test_a_server_process_gets_its_weights(kind: str) -> None:
    """Under load; then the server is killed and started again, and has the newest."""
    model = Versioned()
    with make(kind, model) as transport, serve_elsewhere(transport) as server:
        publisher = transport.publisher(model)
        assert wait_until(lambda: publisher.subscribers == 1, SECONDS)
        with asking(server, 4) as askers:
            train(publisher, model, 200, 0.005)
            publisher.wait(timeout=SECONDS)
            seen = {asker: len(asker.versions) for asker in askers}
            assert wait_until(
                lambda: all(len(asker.versions) > seen[asker] + 1 for asker in askers), SECONDS
            )
        check_askers(askers)
        assert {asker.versions[-1] for asker in askers} == {200}
        assert 20 <= server.stats().weight_updates <= 200
        assert server.policy_version == 200
        os.kill(server.pid, signal.SIGKILL)
        assert wait_until(lambda: not server.is_alive, SECONDS)
        publisher.publish(model.set(201))
        server.start()
        with server.client() as client:
            assert wait_until(lambda: values_of(client) == (201, {201.0}), SECONDS)
        publisher.close()


def test_a_trainer_that_is_killed_leaves_what_it_published() -> None:
    model = Versioned()
    context = multiprocessing.get_context("forkserver")
    with (
        make("shared_memory", model) as transport,
        serve(model, transport) as server,
        server.client() as client,
    ):
        ours, theirs = context.Pipe()
        with ours, theirs:
            trainer = context.Process(target=train_until_killed, args=(transport, theirs))
            trainer.start()
            assert ours.poll(3 * SECONDS)  # it may have to import torch
        assert wait_until(lambda: values_of(client)[0] > 20, SECONDS)
        trainer.kill()
        trainer.join()
        version, values = values_of(client)
        for _ in range(20):
            later, values = values_of(client)
            assert {float(later)} == values
            assert later >= version
            version = later
        assert server.is_alive
        with transport.publisher(model.set(1)) as publisher:
            assert publisher.publish() == 1
            publisher.wait(timeout=SECONDS)
            assert values_of(client) == (1, {1.0})


# When a version is taken.


@pytest.fixture
def model() -> Versioned:
    return Versioned()


@pytest.fixture
def server(model: Versioned) -> Iterator[Any]:
    with serve(model, "direct") as server:
        yield server


@pytest.fixture
def client(server: Any) -> Iterator[Any]:
    with server.client() as client:
        yield client


def test_only_what_is_published_counts(model: Versioned, server: Any, client: Any) -> None:
    publisher = server.weight_transport.publisher(model)
    model.set(1)
    assert values_of(client) == (0, {0.0})
    publisher.publish()
    publisher.wait(timeout=SECONDS)  # an idle server takes it at once
    model.set(2)
    assert values_of(client) == (1, {1.0})
    publisher.publish({"small": model.small, "mean": model.mean})
    publisher.wait(timeout=SECONDS)
    assert values_of(client) == (2, {1.0, 2.0})
    server.stats(reset=True)


def test_an_alias_is_the_trainers_own_weights(model: Versioned) -> None:
    transport = DirectWeights(model, alias=True)
    with serve(model, transport) as server, server.client() as client:
        publisher = transport.publisher(model.set(1))
        publisher.publish()
        publisher.wait(timeout=SECONDS)
        assert values_of(client) == (1, {1.0})
        model.set(5)
        assert values_of(client) == (1, {5.0})
        server.update_policy_weights_(Versioned(7))
        assert values_of(client) == (2, {7.0})
        assert float(model.mean[0]) == 5.0
    assert {each.item() for each in model.small} == {5.0}


@pytest.mark.parametrize("kind", ["direct", "shared_memory"])
def test_what_was_published_before_the_start_serves_at_the_start(kind: str) -> None:
    model = Versioned(11)
    with make(kind, model) as transport, transport.publisher(model, version=10) as publisher:
        publisher.publish()
        with serve(Versioned(), transport) as server, serve(Versioned(), transport) as other:
            assert server.policy_version == other.policy_version == 11
            with other.client() as client:
                assert values_of(client) == (11, {11.0})


def test_a_batch_is_finished_with_the_weights_that_it_began_with(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    model = Policy(tmp_path / "gate")
    with serve(model, "direct") as server, server.client() as client:
        publisher = server.weight_transport.publisher()
        with ThreadPoolExecutor(1) as pool:
            held = pool.submit(client, held_request(HELD))
            assert wait_until((tmp_path / "held").exists, SECONDS)
            for value in (3.0, 4.0, 5.0):
                publisher.publish(model.like(value))
            with pytest.raises(TimeoutError, match="was not served"):
                publisher.wait(timeout=0.01)
            assert server.policy_version == 0
            (tmp_path / "gate").open("wb").close()
            assert int(held.result(SECONDS)["policy_version"]) == 0
        publisher.wait(timeout=SECONDS)
        answer = client(held_request(1.0), SECONDS)
        assert (float(answer["y"]), int(answer["policy_version"])) == (10.0, 3)


def test_a_busy_server_takes_every_version_before_its_next_batches(model: Versioned) -> None:
    config, waits = {"min_batch_size": 2, "timeout": 0.05}, []
    with serve(model, "direct", **config) as server, asking(server, 4) as askers:
        publisher = server.weight_transport.publisher(model)
        for version in range(1, 12):
            before = max(asker.passes[-1] for asker in askers)
            publisher.publish(model.set(version))
            publisher.wait(timeout=SECONDS)
            assert wait_until(lambda: first_pass(askers, version), SECONDS)  # noqa: B023
            waits.append(first_pass(askers, version) - before)
    check_askers(askers)
    assert min(waits) <= 12, (
        waits
    )  # this thread may be held up before it publishes, but not each time


def first_pass(askers: list[Any], version: int) -> int:
    """The first pass with the version that anybody has met; 0 before."""
    found = [
        number
        for asker in askers
        for number, each in zip(asker.passes, asker.versions, strict=False)
        if each == version
    ]
    return min(found, default=0)


def test_shutting_down_while_a_version_waits(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    model = Policy(tmp_path / "gate")
    server = serve(model, "direct").start()
    client = server.client()
    publisher = server.weight_transport.publisher()
    with ThreadPoolExecutor(1) as pool:
        held = pool.submit(client, held_request(HELD))
        assert wait_until((tmp_path / "held").exists, SECONDS)
        publisher.publish(model.like(3.0))
        with pytest.raises(TimeoutError, match="still computing"):
            server.shutdown(timeout=0.05)
        (tmp_path / "gate").open("wb").close()
        with pytest.raises(Exception, match="shut"):
            held.result(SECONDS)
    with pytest.raises(ClosedError):
        publisher.publish(model.like(4.0))


def test_a_server_that_is_forgotten_leaves_nothing(model: Versioned) -> None:
    transport = DirectWeights(model)
    server = serve(model, transport).start()
    publisher = transport.publisher(model)
    publisher.publish(model.set(1))
    publisher.wait(timeout=SECONDS)
    policy = weakref.ref(server._policy)
    assert publisher.subscribers == 1
    del server
    gc.collect()
    assert wait_until(lambda: publisher.subscribers == 0, SECONDS)
    assert wait_until(lambda: gc.collect() >= 0 and policy() is None, SECONDS)


def test_a_start_that_fails_can_be_repeated_nowhere(model: Versioned) -> None:
    transport = DirectWeights(model)
    server = serve(model, transport)
    transport.close()
    with pytest.raises(ClosedError, match="weight transport was closed"):
        server.start()
    assert not server.is_alive
    server.shutdown()


# What has to be updated.


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(1, 1, bias=False)
        self.two = nn.Linear(1, 1, bias=False)
        self.two.weight = self.one.weight


class Views(nn.Module):
    """Two parameters, and a buffer, in one memory."""

    def __init__(self) -> None:
        super().__init__()
        whole = torch.zeros(6)
        self.one, self.two = nn.Parameter(whole[:2]), nn.Parameter(whole[2:4])
        self.register_buffer("three", whole[4:])


class Cached(nn.Module):
    """Has another view of a parameter, which is no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.zeros(2, 3))
        self.turned = [self.one.detach().t()]


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Parameter(torch.zeros(2, 3).t())
        self.register_buffer("two", torch.zeros(2, 3).t())


class Inference(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.inference_mode():
            self.inner = nn.Linear(2, 2)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied": Tied,
    "views": Views,
    "cached": Cached,
    "turned": Turned,
    "of inference mode": Inference,
    "recurrent": lambda: nn.LSTM(2, 3),
    "compiled": lambda: torch.compile(Tied(), backend="eager"),  # type: ignore[dict-item,return-value]
    "part compiled": lambda: nn.Sequential(torch.compile(Tied(), backend="eager"), Turned()),  # type: ignore[arg-type]
    "of a module": lambda: TensorDictModule(Views(), ["x"], ["y"]),
}


class Showing(nn.Module):
    """Answers with the least and the largest value of what ``model`` has, cached views included."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = [*self.model.parameters(), *self.model.buffers()]
        for part in self.model.modules():
            found += getattr(part, "turned", [])
        ends = torch.stack([end for each in found for end in (each.min(), each.max())])
        return ends.expand(len(x), -1)


def filled(model: nn.Module, value: float) -> dict[str, torch.Tensor]:
    state = model.state_dict(keep_vars=True)
    return {name: torch.full_like(each, value, requires_grad=False) for name, each in state.items()}


@pytest.mark.parametrize("whose", ["a copy", "the user's", "the server's"])
@pytest.mark.parametrize("name", MODELS)
def test_weights_of_any_model(name: str, whose: str) -> None:
    if (name, whose) == ("cached", "a copy"):
        return  # a copy's own views are no views of it
    model = Showing(MODELS[name]())
    names = {"in_keys": ["x"], "out_keys": ["y"]}
    before = {key: each.data_ptr() for key, each in model.state_dict().items()}
    server = serve(model, "direct", share_weights=whose != "a copy", **names)
    if whose == "the server's":
        server.own_model()
    with server:
        publisher = server.weight_transport.publisher()
        with server.client() as client:
            for value in (1.0, 2.0, 3.0):
                publisher.publish(filled(model, value))
                publisher.wait(timeout=SECONDS)
                answer = client(request(), SECONDS)
                assert int(answer["policy_version"]) == value
                assert {*answer["y"].tolist()} == {value}
            server.update_policy_weights_(filled(model, 7.0))
            assert {*client(request(), SECONDS)["y"].tolist()} == {7.0}
    if whose == "the user's":
        assert before == {key: each.data_ptr() for key, each in model.state_dict().items()}
        assert all((each == 7.0).all() for each in model.state_dict().values())


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.double(),
        lambda model: torch.compile(model, backend="eager"),
        copy.deepcopy,
        lambda model: model.requires_grad_(False),
        lambda model: model.share_memory(),
    ],
)
@pytest.mark.parametrize("shared", [False, True])
def test_what_is_done_to_the_model_afterwards_does_not_keep_weights_away(
    change: Callable[[Any], Any], shared: bool
) -> None:
    model = Versioned(3)
    with (
        serve(model, "direct", share_weights=shared) as server,
        server.client() as client,
    ):
        publisher = server.weight_transport.publisher()
        change(model)
        publisher.publish(Versioned(1))
        publisher.wait(timeout=SECONDS)
        assert values_of(client) == (1, {1.0})


class Counting(nn.Module):
    """Writes to a buffer whenever it is called."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)

    def forward(self, batch: TensorDictBase) -> TensorDict:
        self.norm(torch.ones(4, 2))
        return TensorDict(
            {"y": self.norm.running_mean.expand(*batch.batch_size, -1)}, batch.batch_size
        )


def test_what_a_policy_writes_to_its_buffers_reaches_nobody_else() -> None:
    model = Counting()
    transport = DirectWeights(model)
    publisher = transport.publisher(model)
    publisher.publish()
    with serve(model, transport) as server, server.client() as client:
        for _ in range(3):
            client(request(), SECONDS)
        with transport.subscriber() as subscriber:
            update = subscriber.receive(0.0)
            assert (update.weights["norm.running_mean"] == 0.0).all()
            assert int(update.weights["norm.num_batches_tracked"]) == 0


def test_other_ways_to_change_the_model_reach_nobody_else(
    model: Versioned, server: Any, client: Any
) -> None:
    transport = server.weight_transport
    publisher = transport.publisher(model.set(1))
    publisher.publish()
    publisher.wait(timeout=SECONDS)
    assert server.update_policy_weights_(Versioned(2)) == 2
    assert values_of(client) == (2, {2.0})
    assert server.update_model(lambda served: served.set(3), version=30) == 30
    assert values_of(client) == (30, {3.0})
    with transport.subscriber() as subscriber:
        update = subscriber.receive(0.0)
        assert {float(each.max()) for each in update.weights.values()} == {1.0}
        update.release()
    publisher.publish({"mean": torch.full((5,), 2.0)})
    publisher.wait(timeout=SECONDS)
    assert values_of(client) == (2, {1.0, 2.0})
    assert server.stats().weight_updates == 4


def test_a_model_that_is_changed_meanwhile(
    model: Versioned, server: Any, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    publisher = server.weight_transport.publisher(model)
    offered: list[int] = []

    def change(served: Versioned) -> None:
        publisher.publish(model.set(len(offered) + 1))
        assert wait_until(lambda: server._policy.offer is not None, SECONDS)
        served.small = nn.Parameter(torch.zeros(4 if offered else 3, dtype=torch.float64))
        offered.append(publisher.version)

    assert server.update_model(change, version=7) == 7
    publisher.wait(timeout=SECONDS)
    assert values_of(client) == (1, {1.0})
    server.update_model(change, version=8)
    assert wait_until(lambda: caplog.records, SECONDS)
    assert "'small'" in str(caplog.records[0].exc_info[1])  # type: ignore[index]
    assert values_of(client) == (8, {0.0, 1.0})


def test_an_alias_of_what_cannot_be_one() -> None:
    for model, message in ((Views(), "views of others"), (MODELS["compiled"](), "compiled")):
        with pytest.raises(ValueError, match=f"alias=True cannot work.*{message}"):
            serve(model, DirectWeights(model, alias=True), share_weights=True)


# What is refused.


def test_weights_that_are_not_the_models() -> None:
    other = Versioned()
    other.small = nn.Parameter(torch.zeros(4))
    doubles = Versioned().double()
    more = Versioned()
    more.more = nn.Parameter(torch.zeros(1))
    untied = {name: each.clone() for name, each in Tied().state_dict().items()}
    refused: list[tuple[Any, Any, type[Exception], str]] = [
        (Versioned(), DirectWeights(other), ValueError, r"'small'.*\[4\].*served model.*\[3\]"),
        (Versioned(), DirectWeights(doubles), ValueError, "'large'.*float64.*float32"),
        (Versioned(), DirectWeights(more), ValueError, "served model has no 'more'"),
        (more, DirectWeights(Versioned()), ValueError, "has no value for 'more'"),
        (Tied(), DirectWeights(untied), ValueError, r"'two\.weight': tied to 'one\.weight'"),
        (lambda batch: batch, "direct", TypeError, "function, not an nn.Module.*update_model"),
        (Versioned(), "queue", ValueError, "'queue'"),
        (Versioned(), 3, TypeError, "weight_transport.*found int"),
        (Versioned(), TransportConfig("auto", {"rate": 3}), TypeError, "'rate'"),
    ]
    for model, weights, error, message in refused:
        with pytest.raises(error, match=message):
            serve(model, weights)


def test_what_was_made_for_a_server_ends_with_it(model: Versioned) -> None:
    weights = TransportConfig("shared_memory", {"spec": model})
    for server in (serve(model, weights), serve_elsewhere(weights)):
        publisher = server.weight_transport.publisher(model)
        assert server.weight_transport.transport_kind == "shared_memory"
        server.shutdown()
        with pytest.raises(ClosedError):
            publisher.publish()


def test_what_cannot_go_to_a_server_elsewhere() -> None:
    for weights, error, message in (
        (DirectWeights(Versioned()), TypeError, "cannot be sent.*shared_memory"),
        ("shared_memory", ValueError, "has to know the weights.*'spec'"),
        (TransportConfig("ray", {"spec": Versioned()}), ValueError, "'ray'"),
    ):
        with pytest.raises(error, match=message):
            serve_elsewhere(weights)


def test_buffers_that_no_state_dict_has_may_be_missing(model: Versioned) -> None:
    transport = DirectWeights(model.state_dict())
    with serve(model, transport) as server, server.client() as client:
        publisher = transport.publisher()
        publisher.publish(Versioned(1).state_dict())
        publisher.wait(timeout=SECONDS)
        assert values_of(client) == (1, {0.0, 1.0})


# A transport of somebody else's.


class Recording:
    """Direct weights whose updates are counted, and whose publisher may be lost."""

    transport_kind = "direct"

    def __init__(self, spec: Any) -> None:
        self.inner = DirectWeights(spec)
        self.layout = self.inner.layout
        self.released: dict[int, int] = {}
        self.errors: list[Exception] = []
        self.bad: set[int] = set()
        self.publisher = self.inner.publisher
        self.close = self.inner.close

    def subscriber(self) -> Any:
        subscriber = self.inner.subscriber()
        receive = subscriber.receive

        def received(timeout: float | None = None) -> Any:
            if self.errors:
                raise self.errors.pop()
            update = receive(timeout)
            self.released[update.version] = 0
            give_back = update._release.pop()

            def release() -> None:
                self.released[update.version] += 1
                give_back()

            update._release.append(release)
            if update.version in self.bad:
                update.weights = {"large": "text"}
            return update

        subscriber.receive = received  # type: ignore[method-assign]
        return subscriber


def test_everything_is_released_once(model: Versioned) -> None:
    transport = Recording(model)
    assert isinstance(transport, WeightTransport)
    publisher = transport.publisher(model)
    with serve(Versioned(), transport) as server, server.client() as client:
        for version in range(1, 30):
            publisher.publish(model.set(version))
            publisher.wait(timeout=SECONDS)
            if version % 7 == 0:
                server.update_policy_weights_(model.set(-version))
            if version % 5 == 0:
                values_of(client)
        held = [version for version, count in transport.released.items() if not count]
        assert held == [29]
    assert transport.released == dict.fromkeys(range(1, 30), 1)


def test_a_lost_publisher_is_told_once_and_the_next_one_is_heard(
    model: Versioned, caplog: pytest.LogCaptureFixture
) -> None:
    transport = Recording(model)
    publisher = transport.publisher(model)
    publisher.publish(model.set(1))
    transport.errors.append(PeerLostError("the publisher was killed"))
    with (
        caplog.at_level(logging.WARNING, "meshinfer"),
        serve(Versioned(), transport) as server,
        server.client() as client,
    ):
        publisher.wait(timeout=SECONDS)
        assert values_of(client) == (1, {1.0})
        assert server.health().error is None
        publisher.publish(model.set(2))
        publisher.wait(timeout=SECONDS)
        assert values_of(client) == (2, {2.0})
    (record,) = caplog.records
    # Once a test has loaded monarch here, it puts the name of its actor before every record.
    assert record.getMessage().endswith(
        "version 0 of the weights goes on serving: the publisher was killed"
    )


def test_a_version_that_cannot_be_used_is_told_and_skipped(
    model: Versioned, caplog: pytest.LogCaptureFixture
) -> None:
    transport = Recording(model)
    transport.bad.add(2)
    publisher = transport.publisher(model)
    with serve(Versioned(), transport) as server, server.client() as client:
        for version in (1, 2, 3):
            publisher.publish(model.set(version))
            assert wait_until(lambda: version in transport.released, SECONDS)  # noqa: B023
        publisher.wait(timeout=SECONDS)
        assert values_of(client) == (3, {3.0})
    (record,) = caplog.records
    assert record.getMessage().endswith(
        "version 2 of the weights cannot be used, version 1 goes on serving"
    )
    assert transport.released == {1: 1, 2: 1, 3: 1}
