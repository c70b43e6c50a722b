"""New weights for a served policy: where they may come from, what is refused, and that nothing is half done."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule

from meshinfer import InferenceServer, make_inference_transport

SECONDS = 20.0


class Policy(torch.nn.Module):
    """``y = scale * (weight * x + shift + hidden)``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(1.0))
        self.shift = torch.nn.Parameter(torch.tensor(0.0))
        self.register_buffer("scale", torch.tensor(1.0))
        self.register_buffer("hidden", torch.tensor(0.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * (self.weight * x + self.shift + self.hidden)  # type: ignore[operator]

    def set(self, weight: float, shift: float, scale: float, hidden: float = 0.0) -> Policy:
        with torch.no_grad():
            for name, value in vars_of(weight, shift, scale, hidden).items():
                getattr(self, name).fill_(value)
        return self


def vars_of(weight: float, shift: float, scale: float, hidden: float) -> dict[str, float]:
    return {"weight": weight, "shift": shift, "scale": scale, "hidden": hidden}


def serve(model: Any, **arguments: Any) -> InferenceServer:
    return InferenceServer(
        model, make_inference_transport("queue"), in_keys=["x"], out_keys=["y"], **arguments
    )


def ask(server: InferenceServer, x: float = 3.0) -> float:
    reply = server.transport.submit(TensorDict({"x": torch.tensor(x)})).result(SECONDS)
    return float(reply["y"])


@pytest.fixture
def server() -> Iterator[InferenceServer]:
    with serve(Policy()) as server:
        yield server


SOURCES: dict[str, Callable[[Policy], Any]] = {
    "module": lambda policy: policy,
    "state dict": lambda policy: policy.state_dict(),
    "parameters": lambda policy: TensorDict.from_module(policy),
    "data": lambda policy: TensorDict.from_module(policy).data,
    "as module": lambda policy: TensorDict.from_module(policy, as_module=True),
    "compiled": lambda policy: torch.compile(policy, backend="eager"),
    "compiled state": lambda policy: torch.compile(policy, backend="eager").state_dict(),
    "deep copy": copy.deepcopy,
    "double": lambda policy: policy.double(),
    "numbers": lambda policy: {
        name: torch.as_tensor(float(value)) for name, value in policy.state_dict().items()
    },
}


@pytest.mark.parametrize("source", SOURCES)
def test_weights_from_anywhere(source: str, server: InferenceServer) -> None:
    trainer = Policy().set(2.0, 1.0, 10.0)
    assert ask(server) == 3.0
    assert server.update_policy_weights_(SOURCES[source](trainer)) == 1
    assert ask(server) == 70.0
    trainer.set(0.0, 0.0, 0.0)
    assert ask(server) == 70.0
    assert server.update_policy_weights_(SOURCES[source](trainer), version=40) == 40
    assert ask(server) == 0.0
    assert server.policy_version == 40


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("nested", [False, True])
def test_weights_of_a_tensordict_module(compiled: bool, nested: bool) -> None:
    def wrap(policy: torch.nn.Module) -> torch.nn.Module:
        return TensorDictModule(policy, ["x"], ["y"])

    served = torch.compile(Policy(), backend="eager") if compiled else Policy()
    with InferenceServer(wrap(served), make_inference_transport("queue")) as server:
        new: Any = wrap(Policy().set(2.0, 1.0, 10.0))
        server.update_policy_weights_(TensorDict.from_module(new) if nested else new)
        assert ask(server) == 70.0


def test_buffers_that_no_state_dict_has(server: InferenceServer) -> None:
    new = Policy().set(2.0, 1.0, 10.0, hidden=5.0)
    server.update_policy_weights_(new.state_dict())
    assert ask(server) == 70.0
    server.update_policy_weights_(new)
    assert ask(server) == 120.0


def test_weights_that_are_shared_are_written_once() -> None:
    class Tied(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = torch.nn.Linear(1, 1, bias=False)
            self.two = torch.nn.Linear(1, 1, bias=False)
            self.two.weight = self.one.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.two(self.one(x.unsqueeze(-1))).squeeze(-1)  # type: ignore[no-any-return]

    model = Tied()
    with serve(model) as server:
        with torch.no_grad():
            model.one.weight.fill_(3.0)
        server.update_policy_weights_(model)
        assert ask(server, 2.0) == 18.0


def test_before_the_start() -> None:
    server = serve(Policy())
    assert server.update_policy_weights_(Policy().set(2.0, 1.0, 10.0)) == 1
    with server:
        assert ask(server) == 70.0


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda s: s.pop("shift"), ValueError, "has no value for 'shift'"),
        (lambda s: s.update(bias=torch.zeros(())), ValueError, "has unknown 'bias'"),
        (
            lambda s: s.update(shift=torch.zeros(3)),
            ValueError,
            r"'shift': expected shape \[\], found \[3\]",
        ),
        (lambda s: s.update(shift=1.0), TypeError, "'shift': expected a tensor, found float"),
        (
            lambda s: s.update({f"more{number}": torch.zeros(()) for number in range(9)}),
            ValueError,
            "'more4' and 4 more",
        ),
    ],
)
def test_weights_that_do_not_fit_change_nothing(
    change: Any, error: type[Exception], message: str, server: InferenceServer
) -> None:
    state = Policy().set(2.0, 1.0, 10.0).state_dict()
    change(state)
    with pytest.raises(error, match=message):
        server.update_policy_weights_(state)
    assert ask(server) == 3.0
    assert server.policy_version == 0


@pytest.mark.parametrize("weights", [None, 3, [torch.zeros(())], "state"])
def test_what_are_no_weights(weights: Any, server: InferenceServer) -> None:
    with pytest.raises(TypeError, match=r"expected an nn\.Module, a state dict or a"):
        server.update_policy_weights_(weights)
    assert server.policy_version == 0


def test_a_policy_without_weights() -> None:
    def double(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    with (
        serve(double) as server,
        pytest.raises(TypeError, match=r"function, not an nn\.Module.*update_model"),
    ):
        server.update_policy_weights_({})


def test_versions_and_weights_belong_together() -> None:
    """Two trainers push while a client asks: no reply mixes two updates, and each says which it is."""
    with serve(Policy()) as server:
        values: dict[int, float] = {0: 0.0}
        stop = threading.Event()

        def push(start: float) -> None:
            value = start
            while not stop.is_set() and value < start + 200:
                values[server.update_policy_weights_(Policy().set(value, value, 1.0))] = value
                value += 1

        trainers = [threading.Thread(target=push, args=(1000.0 * n,)) for n in (1, 2)]
        for trainer in trainers:
            trainer.start()
        replies = []
        x = TensorDict({"x": torch.tensor(1.0)})
        while any(trainer.is_alive() for trainer in trainers) or not replies:
            replies.append(server.transport.submit(x).result(SECONDS))
        stop.set()
        for trainer in trainers:
            trainer.join()
        assert server.policy_version == 400
        assert len(values) == 401
        for reply in replies:
            version = int(reply["policy_version"])
            assert float(reply["y"]) == (2 * values[version] if version else 1.0)
