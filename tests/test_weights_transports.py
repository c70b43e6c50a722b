"""What every weight transport promises, whatever its kind."""

from __future__ import annotations

import gc
import pickle
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from support import wait_until
from tensordict import TensorDict
from torch import nn
from weight_roles import SECONDS

from meshinfer import (
    ClosedError,
    DirectWeights,
    TransportConfig,
    WeightLayout,
    WeightTransport,
    make_weight_transport,
    resolve_transport,
)
from meshinfer.compatibility import weights_markdown
from meshinfer.transport import POLICY_BACKENDS
from meshinfer.weights.resolver import WEIGHT_KINDS, WEIGHT_TRANSPORTS

KINDS = WEIGHT_KINDS[1:]
BACKENDS = {"direct": "threading", "shared_memory": "multiprocessing", "distributed": "spmd"}


def weights(value: float = 0.0) -> dict[str, torch.Tensor]:
    value = float(value)
    return {"a.w": torch.full((3, 4), value), "b": torch.full((), value), "n": torch.zeros(0, 2)}


def make(kind: str, spec: Any, **options: Any) -> Any:
    if kind == "distributed":
        options = {"interface": "127.0.0.1", **options}
    backend: Any = BACKENDS[kind]
    return make_weight_transport(kind, spec=spec, policy_backend=backend, transport_options=options)


def far_end(transport: Any) -> Any:
    """The transport as a server has it."""
    return (
        transport if transport.transport_kind == "direct" else pickle.loads(pickle.dumps(transport))
    )


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def transport(kind: str) -> Iterator[Any]:
    transport = make(kind, weights())
    yield transport
    transport.close()


@pytest.fixture
def subscriber(transport: Any) -> Iterator[Any]:
    there = far_end(transport)
    with there.subscriber() as subscriber:
        yield subscriber
    if there is not transport:
        there.close()


def value_of(update: Any) -> float:
    assert update.weights["a.w"].shape == (3, 4)
    assert update.weights["n"].shape == (0, 2)
    (value,) = {float(update.weights["b"]), *update.weights["a.w"].flatten().tolist()}
    return value


def take(subscriber: Any) -> tuple[int, float]:
    """The next version and its value; it serves from then on."""
    update = subscriber.receive(SECONDS)
    found = update.version, value_of(update)
    subscriber.applied(update)
    update.release()
    return found


def nothing_new(subscriber: Any) -> bool:
    with pytest.raises(TimeoutError):
        subscriber.receive(0.05)
    return True


def test_versions_arrive_and_the_newest_is_enough(transport: Any, subscriber: Any) -> None:
    assert isinstance(transport, WeightTransport)
    assert nothing_new(subscriber)
    source = weights(1.0)
    with transport.publisher(source) as publisher:
        assert publisher.version == 0
        assert publisher.publish() == publisher.version == 1
        source["b"].fill_(9.0)
        assert take(subscriber) == (1, 1.0)
        assert nothing_new(subscriber)
        for value in (2.0, 3.0, 4.0):
            assert publisher.publish(weights(value)) == value
        publisher.publish(weights(7.0), version=70)
        seen = [take(subscriber)]
        while seen[-1][0] < 70:
            seen.append(take(subscriber))
        assert seen == sorted(set(seen))
        assert {version: value for version, value in seen if version != value} == {70: 7.0}
        assert nothing_new(subscriber)


def test_who_comes_late_gets_the_newest_at_once(transport: Any, subscriber: Any) -> None:
    publisher = transport.publisher(version=4)
    publisher.publish(weights(1.0))
    publisher.publish(weights(2.0))
    assert wait_until(lambda: take(subscriber) == (6, 2.0), SECONDS)
    with far_end(transport).subscriber() as other:
        assert take(other) == (6, 2.0)
        publisher.close()
        assert nothing_new(other)
    with far_end(transport).subscriber() as third:
        assert take(third) == (6, 2.0)


def test_what_was_received_stays_until_it_is_released(transport: Any, subscriber: Any) -> None:
    publisher = transport.publisher(weights(1.0))
    publisher.publish()
    held = subscriber.receive(SECONDS)
    for value in range(2, 30):
        publisher.publish(weights(value))
        assert value_of(held) == held.version == 1
        later = subscriber.receive(SECONDS)
        assert value_of(later) == later.version
        later.release()
    held.release()
    held.release()


def test_a_part_is_laid_over_the_last_version(transport: Any, subscriber: Any) -> None:
    publisher = transport.publisher()
    with pytest.raises(ValueError, match=r"first publish has no 'a\.w', 'n'"):
        publisher.publish({"b": torch.ones(())})
    publisher.publish(weights(1.0))
    assert publisher.publish({"b": torch.full((), 5.0)}) == 2
    assert publisher.publish({"a.w": torch.full((3, 4), 6.0)}) == 3
    update = subscriber.receive(SECONDS)
    while update.version < 3:
        update.release()
        update = subscriber.receive(SECONDS)
    assert float(update.weights["b"]) == 5.0
    assert (update.weights["a.w"] == 6.0).all()
    update.release()


REFUSED: list[tuple[Any, type[Exception], str]] = [
    ({"c": torch.ones(())}, ValueError, "has unknown 'c'"),
    ({"b": torch.ones(1)}, ValueError, r"'b': expected float32\[\], found float32\[1\]"),
    ({"b": torch.ones((), dtype=torch.float64)}, TypeError, r"'b'.*found float64\[\].*cast=True"),
    ({"b": 1.0}, TypeError, "'b': expected a tensor, found float"),
    ({"b": torch.ones((), device="meta")}, ValueError, "'b'.*meta"),
    ({"b": torch.ones(()).to_sparse()}, TypeError, "'b'.*sparse"),
    (3, TypeError, "expected an nn.Module, a state dict or a TensorDict, found int"),
    ({3: torch.ones(())}, TypeError, "names of str, found 3"),
]


def test_what_does_not_fit_changes_nothing(transport: Any, subscriber: Any) -> None:
    publisher = transport.publisher()
    publisher.publish(weights(1.0))
    for wrong, error, message in REFUSED:
        with pytest.raises(error, match=message):
            publisher.publish(wrong)
    with pytest.raises(ValueError, match="source to publisher"):
        publisher.publish()
    for version in (0, 1):
        with pytest.raises(ValueError, match=f"version={version}: expected"):
            publisher.publish(weights(2.0), version=version)
    with pytest.raises(TypeError, match="version"):
        publisher.publish(weights(2.0), version=1.5)
    assert publisher.version == 1
    assert take(subscriber) == (1, 1.0)
    assert nothing_new(subscriber)


def test_dtypes_are_converted_when_asked(transport: Any, subscriber: Any) -> None:
    doubles = {name: value.double() for name, value in weights(3.0).items()}
    with pytest.raises(TypeError, match="found float64"):
        transport.publisher(doubles)
    transport.publisher(doubles, cast=True).publish()
    assert take(subscriber) == (1, 3.0)


def test_waiting_for_those_who_serve(transport: Any, subscriber: Any) -> None:
    publisher = transport.publisher(weights(1.0))
    assert publisher.publish() == 1
    assert wait_until(lambda: publisher.subscribers == 1, SECONDS)
    update = subscriber.receive(SECONDS)
    with pytest.raises(TimeoutError, match=r"version 1 .*0\.01 s.*none of this publisher"):
        publisher.wait(timeout=0.01)
    subscriber.applied(update)
    publisher.wait(timeout=SECONDS)
    publisher.publish(weights(2.0))
    publisher.wait(1, timeout=SECONDS)
    with pytest.raises(TimeoutError, match=r"[:(] ?version 1"):
        publisher.wait(timeout=0.01)
    with pytest.raises(ValueError, match="version=9 was not published"):
        publisher.wait(9)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(publisher.wait, 2, SECONDS)
        assert take(subscriber) == (2, 2.0)
        waiting.result(SECONDS)
    update.release()
    subscriber.close()
    publisher.publish()
    assert wait_until(lambda: publisher.subscribers == 0, SECONDS)
    publisher.wait(timeout=SECONDS)


def test_one_publisher_after_the_other(transport: Any, subscriber: Any) -> None:
    publisher = transport.publisher(version=40)
    with pytest.raises(RuntimeError, match="publisher already"):
        transport.publisher()
    assert publisher.publish(weights(41.0)) == 41
    assert take(subscriber) == (41, 41.0)
    publisher.close()
    publisher.close()
    with pytest.raises(ClosedError):
        publisher.publish(weights())
    with pytest.raises(ClosedError):
        publisher.wait()
    with transport.publisher() as again:
        assert again.publish(weights(1.0)) == 1
        assert take(subscriber) == (1, 1.0)
        again.wait(timeout=SECONDS)


def test_closing_wakes_who_waits(transport: Any) -> None:
    subscribers = [far_end(transport).subscriber() for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(subscriber.receive) for subscriber in subscribers]
        for subscriber in subscribers:
            subscriber.close()
            subscriber.close()
        for each in waiting:
            with pytest.raises(ClosedError):
                each.result(SECONDS)
    with pytest.raises(ClosedError):
        subscribers[0].receive(0.0)


def test_a_closed_transport_is_of_no_more_use(transport: Any) -> None:
    publisher, subscriber = transport.publisher(), transport.subscriber()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(subscriber.receive)
        transport.close()
        transport.close()
        with pytest.raises(ClosedError):
            waiting.result(SECONDS)
    for call in (transport.publisher, transport.subscriber, lambda: publisher.publish(weights())):
        with pytest.raises(ClosedError):
            call()
    subscriber.close()
    publisher.close()


def test_trainers_that_overlap_end_with_the_newer(transport: Any, subscriber: Any) -> None:
    publisher = transport.publisher(weights())
    published: dict[int, float] = {}

    def train(first: int) -> None:
        for value in range(first, first + 30):
            published[publisher.publish(weights(value))] = float(value)

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(train, 100 * number) for number in (1, 2, 3)]:
            done.result(SECONDS)
    assert sorted(published) == [*range(1, 91)]
    last = 0
    while last < 90:
        version, value = take(subscriber)
        assert version > last
        assert published[version] == value
        last = version


class Odd(nn.Module):
    """Tied weights, every kind of dtype, and what is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(2, 3)
        self.two = nn.Linear(2, 3, bias=False)
        self.two.weight = self.one.weight
        self.turned = nn.Parameter(torch.arange(6.0).view(2, 3).t())
        self.register_buffer("none", None)
        for dtype in (torch.bool, torch.bfloat16, torch.complex64, torch.int64, torch.float16):
            self.register_buffer(f"of_{str(dtype)[6:]}", torch.ones(3).to(dtype))


def test_weights_of_every_sort(kind: str) -> None:
    model = Odd()
    assert WeightLayout.from_spec(model).ties == {"two.weight": "one.weight"}
    with make(kind, model) as transport, far_end(transport).subscriber() as subscriber:
        publisher = transport.publisher(torch.compile(model, backend="eager"))
        publisher.publish()
        update = subscriber.receive(SECONDS)
        assert update.weights.keys() == model.state_dict().keys()
        for name, value in model.state_dict().items():
            assert update.weights[name].dtype == value.dtype
            assert torch.equal(update.weights[name], value)
        update.release()
        with pytest.raises(ValueError, match=r"'two\.weight': tied to 'one\.weight'"):
            publisher.publish({"one.weight": torch.ones(3, 2), "two.weight": torch.zeros(3, 2)})
        publisher.publish({"two.weight": torch.full((3, 2), 8.0)})
        update = subscriber.receive(SECONDS)
        assert (update.weights["one.weight"] == 8.0).all()
        update.release()
        publisher.close()


# Layouts and choices.


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ({}, ValueError, "at least one tensor"),
        (nn.Linear(1, 1, device="meta"), ValueError, "'bias'.*meta.*to_empty"),
        (nn.LazyLinear(1), ValueError, "'bias'.*call the module once"),
        (nn.ReLU(), ValueError, "at least one tensor"),
        ({"a": {"b": torch.zeros(1)}}, TypeError, "'a': expected a tensor, found dict"),
        (TensorDict({"a": torch.zeros(1), "b": "text"}), TypeError, "'b'"),
        (None, ValueError, "spec="),
        (7, TypeError, "found int"),
    ],
)
def test_what_is_no_spec(spec: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make_weight_transport(spec=spec)


def test_layouts_are_equal_whatever_they_are_made_of() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    whole = WeightLayout.from_spec(model)
    same: list[Any] = [
        model.state_dict(),
        TensorDict.from_module(model),
        TensorDict.from_module(model, as_module=True),
        torch.compile(model, backend="eager"),
        pickle.loads(pickle.dumps(whole)),
        whole,
    ]
    for spec in same:
        layout = WeightLayout.from_spec(spec)
        assert layout == whole
        assert hash(layout) == hash(whole)
        assert not layout.difference(whole.describe())
    other = WeightLayout.from_spec(nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(3)))
    assert other != whole
    assert "'0.bias': float32[3] here, float32[4] there" in whole.difference(other.describe())
    tied = WeightLayout.from_spec(Odd())
    untied = WeightLayout.from_spec(
        {name: value.clone() for name, value in Odd().state_dict().items()}
    )
    assert "'two.weight' is tied to 'one.weight' here, not tied there" in [
        *tied.difference(untied.describe()).split("; ")
    ]


def test_the_choice() -> None:
    spec = weights()
    assert type(make_weight_transport(spec=spec)) is DirectWeights
    made = resolve_transport("weights", TransportConfig("auto", {"spec": spec}))
    assert type(made) is DirectWeights
    assert make_weight_transport(made, spec=spec) is made
    refused: list[tuple[Any, Any, type[Exception], str]] = [
        ("queue", {"spec": spec}, ValueError, "'queue': expected one of 'auto', 'direct'"),
        ("direct", {"spec": spec, "policy_backend": "ray"}, ValueError, "'ray'.*'distributed'"),
        ("auto", {"spec": spec, "policy_backend": "moon"}, ValueError, "'moon'"),
        ("direct", {"spec": spec, "transport_options": {"x": 1}}, TypeError, "'x'.*'alias'"),
        (made, {"spec": {"z": spec["b"]}}, ValueError, "'a.w' only there"),
        (made, {"transport_options": {"alias": True}}, ValueError, "beside a ready"),
        (DirectWeights, {}, TypeError, "DirectWeights"),
        (5, {}, TypeError, "found int"),
        (TransportConfig("auto", {"spec": spec}), {"spec": spec}, ValueError, "give it once"),
    ]
    for asked, facts, error, message in refused:
        with pytest.raises(error, match=message):
            make_weight_transport(asked, **facts)


@pytest.mark.parametrize("entry", WEIGHT_TRANSPORTS, ids=lambda entry: entry.kind)
def test_every_row_of_the_table_has_its_class(entry: Any) -> None:
    assert entry.load().transport_kind == entry.kind  # type: ignore[attr-defined]
    assert {*entry.auto_in} <= {*entry.policy_backends} <= {*POLICY_BACKENDS}


def test_auto_has_one_choice_in_every_topology() -> None:
    chosen = [backend for entry in WEIGHT_TRANSPORTS for backend in entry.auto_in]
    assert sorted(chosen) == sorted(POLICY_BACKENDS)


def test_the_documentation_has_the_table() -> None:
    text = (Path(__file__).parents[1] / "docs" / "weights.md").read_text()
    begin, end = "<!-- weights:begin -->\n", "<!-- weights:end -->"
    assert text.split(begin)[1].split(end)[0] == weights_markdown()


# Of kind "direct".


def test_direct_weights_stay_in_their_process() -> None:
    with pytest.raises(TypeError, match="shared_memory"):
        pickle.dumps(DirectWeights(weights()))


def test_an_alias_copies_nothing() -> None:
    source = weights(1.0)
    transport = DirectWeights(source, alias=True)
    with pytest.raises(ValueError, match="cast=True"):
        transport.publisher(source, cast=True)
    publisher, subscriber = transport.publisher(source), transport.subscriber()
    publisher.publish()
    update = subscriber.receive(0.0)
    assert update.alias
    source["b"].fill_(5.0)
    assert float(update.weights["b"]) == 5.0
    publisher.publish({"b": torch.full((), 6.0)})
    update = subscriber.receive(0.0)
    assert float(update.weights["b"]) == 6.0
    assert update.weights["a.w"].data_ptr() == source["a.w"].data_ptr()


def test_a_publisher_that_was_forgotten_is_no_hindrance() -> None:
    transport = DirectWeights(weights())
    transport.publisher(weights(1.0)).publish()
    gc.collect()
    assert transport.publisher(weights(2.0)).publish() == 1
    with transport.subscriber() as subscriber:
        assert take(subscriber) == (1, 2.0)


def test_memory_is_used_again() -> None:
    transport = DirectWeights(weights())
    publisher, subscriber = transport.publisher(weights()), transport.subscriber()
    places = set()
    for _ in range(20):
        publisher.publish()
        update = subscriber.receive(0.0)
        places.add(update.weights["a.w"].data_ptr())
        update.release()
    assert len(places) == 2
    hub: weakref.ref[Any] = weakref.ref(transport._hub)
    del publisher, subscriber, update, transport
    gc.collect()
    assert hub() is None
