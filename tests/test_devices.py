"""Where a policy computes and where its replies go. The meta device stands in for one that is not here."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase, lazy_stack
from tensordict.nn import TensorDictModule

from meshinfer import (
    DistributedTransport,
    InferenceDeviceConfig,
    InferenceServer,
    TransportConfig,
    make_inference_transport,
)
from meshinfer.server.devices import with_index

SECONDS = 20.0
CPU, META = torch.device("cpu"), torch.device("meta")
REQUEST = TensorDict({"x": torch.zeros(3)})
RESPONSE = TensorDict({"y": torch.zeros(3)})
ABSENT = f"cuda:{torch.cuda.device_count()}"


def double(batch: TensorDictBase) -> TensorDict:
    return TensorDict({"y": 2 * batch["x"]}, batch.batch_size)


class Elsewhere:
    """Computes where its batch is said to be, and answers from the CPU."""

    def __init__(self) -> None:
        self.devices: list[Any] = []
        self.threads: list[str] = []

    def __call__(self, batch: TensorDictBase) -> TensorDict:
        self.threads.append(threading.current_thread().name)
        self.devices.append((batch.device, batch["x"].device))
        return TensorDict({"y": torch.full(batch["x"].shape, 7.0)}, batch.batch_size)


def distributed() -> DistributedTransport:
    return DistributedTransport(REQUEST, RESPONSE)


def threads() -> Any:
    return make_inference_transport("queue")


def ask(server: InferenceServer, device: str = "cpu") -> TensorDictBase:
    payload = TensorDict({"x": torch.ones(3, device=device)})
    return server.transport.submit(payload).result(SECONDS)


# --- Where it computes ---------------------------------------------------------------------------


@pytest.mark.parametrize("make", [distributed, threads])
@pytest.mark.parametrize("static", [None, 4])
def test_a_batch_is_moved_to_the_policy(make: Any, static: int | None) -> None:
    policy = Elsewhere()
    with InferenceServer(policy, make(), policy_device="meta", static_batch_size=static) as server:
        reply = ask(server)
    assert policy.devices == [(META, META)]
    assert reply["y"].tolist() == [7.0] * 3
    assert reply["y"].device == CPU


def test_the_serving_thread_repeats_the_preparation() -> None:
    """Graphs are captured for each thread anew."""
    policy, here = Elsewhere(), threading.current_thread().name
    server = InferenceServer(policy, threads(), policy_device="meta", static_batch_size=4)
    server.prepare(REQUEST)
    assert set(policy.threads) == {here}
    prepared = len(policy.threads)
    with server:
        ask(server)
    assert policy.threads == [here] * prepared + ["meshinfer-server"] * (prepared + 1)
    assert set(policy.devices) == {(META, META)}


def test_a_module_is_moved_and_its_original_is_not() -> None:
    module = TensorDictModule(torch.nn.Linear(3, 3), ["x"], ["y"])
    devices: set[torch.device] = set()
    server = InferenceServer(module, threads(), policy_device="meta")
    server.update_model(lambda served: devices.update(p.device for p in served.parameters()))
    server.shutdown()
    assert devices == {META}
    assert module.module.weight.device == CPU


@pytest.mark.parametrize("make", [distributed, threads])
@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"policy_device": "cpu"},
        {"policy_device": torch.device("cpu"), "output_device": "cpu"},
        {"device_config": InferenceDeviceConfig(policy_device="cpu", env_device="cpu")},
    ],
)
def test_all_on_the_cpu(make: Any, arguments: Any) -> None:
    with InferenceServer(double, make(), **arguments) as server:
        assert ask(server)["y"].tolist() == [2.0] * 3


@pytest.mark.parametrize("device", [None, "cpu"])
def test_requests_of_different_lengths(device: str | None) -> None:
    """Nothing that is stacked lazily is stacked to see where it lies."""

    def policy(batch: Any) -> Any:
        return lazy_stack([TensorDict({"y": 2 * part["x"]}) for part in batch.tensordicts])

    with (
        InferenceServer(
            policy,
            threads(),
            collate_fn=lazy_stack,
            policy_device=device,
            min_batch_size=2,
            timeout=SECONDS,
        ) as server,
        server.client() as client,
    ):
        futures = [client.submit(TensorDict({"x": torch.ones(length)})) for length in (2, 3)]
        found = [future.result(SECONDS)["y"].tolist() for future in futures]
        assert found == [[2.0] * 2, [2.0] * 3]


# --- Where replies go ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        {"output_device": "meta"},
        {"device_config": InferenceDeviceConfig(output_device="meta", env_device="cpu")},
        {"device_config": InferenceDeviceConfig(env_device="meta")},
    ],
)
def test_threads_get_replies_where_they_want_them(arguments: Any) -> None:
    with InferenceServer(double, threads(), **arguments) as server:
        reply = ask(server)
    assert reply["y"].device == META
    assert reply["y"].shape == (3,)


def test_threads_get_replies_where_their_requests_were() -> None:
    with InferenceServer(Elsewhere(), threads()) as server:
        assert ask(server)["y"].device == CPU
        assert ask(server, "meta")["y"].device == META


@pytest.mark.parametrize(
    "arguments",
    [
        {"output_device": "meta"},
        {"device_config": InferenceDeviceConfig(env_device="meta")},
    ],
)
@pytest.mark.parametrize(
    "transport", ["distributed", TransportConfig("slot", {"num_slots": 2})], ids=["rows", "slots"]
)
def test_rows_arrive_in_cpu_memory(transport: Any, arguments: Any) -> None:
    with pytest.raises(ValueError, match=r"output_device.*'meta'.*arrive in CPU memory"):
        InferenceServer(
            double, transport, request_spec=REQUEST, response_spec=RESPONSE, **arguments
        )


def test_a_ready_transport_outlives_a_refusal() -> None:
    with distributed() as transport:
        with pytest.raises(ValueError, match="output_device"):
            InferenceServer(double, transport, output_device="meta")
        with InferenceServer(double, transport) as server:
            assert ask(server)["y"].tolist() == [2.0] * 3


# --- Configuration -------------------------------------------------------------------------------


def test_a_device_configuration() -> None:
    config = InferenceDeviceConfig("cpu", env_device="cuda:1", storing_device=META)
    assert config.policy_device == config.server_policy_device() == CPU
    assert config.output_device is None
    assert config.server_output_device() == torch.device("cuda:1")
    assert config.storing_device == META
    assert InferenceDeviceConfig(output_device="cpu", env_device="meta").server_output_device() == (
        CPU
    )
    assert pickle.loads(pickle.dumps(config)) == config
    assert hash(config) == hash(InferenceDeviceConfig(CPU, None, "cuda:1", "meta"))
    assert InferenceDeviceConfig().server_policy_device() is None


@pytest.mark.parametrize(
    ("value", "error"),
    [("gpu", ValueError), ("cpu:x", ValueError), (1.5, TypeError), (True, TypeError)],
)
@pytest.mark.parametrize("name", ["policy_device", "output_device", "env_device", "storing_device"])
def test_what_is_no_device(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match=f"{name}={value!r}: expected a device"):
        InferenceDeviceConfig(**{name: value})


@pytest.mark.parametrize("name", ["policy_device", "output_device"])
def test_a_device_that_is_not_here(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}='{ABSENT}': this process has"):
        InferenceServer(double, threads(), **{name: ABSENT})


def test_a_device_without_an_index_is_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here, and not in the thread that serves."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert with_index(torch.device("cuda")) == torch.device("cuda:1")
    for device in (None, CPU, META, torch.device("cuda:0")):
        assert with_index(device) == device
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert with_index(torch.device("cuda")) == torch.device("cuda")


def test_devices_are_given_once() -> None:
    with pytest.raises(ValueError, match=r"policy_device.*device_config"):
        InferenceServer(
            double, threads(), policy_device="cpu", device_config=InferenceDeviceConfig("cpu")
        )


def test_a_server_stores_nothing() -> None:
    with pytest.raises(ValueError, match="storing_device='cpu' belongs to a collector"):
        InferenceServer(
            double, threads(), device_config=InferenceDeviceConfig(storing_device="cpu")
        )


def test_another_object_than_a_configuration() -> None:
    with pytest.raises(TypeError, match="device_config: expected InferenceDeviceConfig, found str"):
        InferenceServer(double, threads(), device_config="cpu")  # type: ignore[arg-type]


# --- On a GPU ------------------------------------------------------------------------------------

needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
gpu = [pytest.param("cuda", marks=needs_gpu)]


@pytest.fixture
def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Linear(3, 3)


@pytest.mark.parametrize("device", gpu)
@pytest.mark.parametrize("make", [distributed, threads])
@pytest.mark.parametrize("static", [None, 4])
@pytest.mark.parametrize("given", [True, False])
def test_a_policy_on_a_gpu(
    device: str, make: Any, static: int | None, given: bool, net: torch.nn.Module
) -> None:
    """Named or found by the module's weights; replies of different passes do not share memory."""
    served = net if given else net.to(device)
    arguments: Any = {"policy_device": device} if given else {}
    server = InferenceServer(
        served, make(), in_keys=["x"], out_keys=["y"], static_batch_size=static, **arguments
    )
    net = net.to("cpu")
    with server, server.client() as client:
        kept = []
        for value in range(50):
            payload = TensorDict({"x": torch.full((3,), float(value))})
            kept.append((payload, client(payload, timeout=SECONDS)))
        for payload, reply in kept:
            assert reply["y"].device == CPU
            torch.testing.assert_close(reply["y"], net(payload["x"]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("device", gpu)
def test_replies_on_a_gpu(device: str) -> None:
    with InferenceServer(double, threads(), output_device=device) as server:
        assert ask(server)["y"].device.type == device
        assert ask(server, device)["y"].tolist() == [2.0] * 3


@pytest.mark.parametrize("device", gpu)
def test_an_error_on_a_gpu_spoils_nothing(device: str) -> None:
    def refuse(batch: TensorDictBase) -> TensorDict:
        if float(batch["x"].max()) > 100:
            raise ArithmeticError("too large")
        return double(batch)

    with (
        InferenceServer(refuse, distributed(), policy_device=device, static_batch_size=4) as server,
        server.client() as client,
    ):
        for value in (1.0, 1000.0, 2.0):
            payload = TensorDict({"x": torch.full((3,), value)})
            if value > 100:
                with pytest.raises(ArithmeticError):
                    client(payload, timeout=SECONDS)
            else:
                assert client(payload, timeout=SECONDS)["y"].tolist() == [2 * value] * 3
