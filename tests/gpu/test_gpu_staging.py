"""One copy each way for a batch, on a real GPU: what a profiler sees, and that nobody reads what has not come yet."""

from __future__ import annotations

import json
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from staging_rows import CPU, Request, Transport, double, served, transport, x_of, y_of
from support import wait_until
from tensordict import TensorDict, TensorDictBase
from torch.profiler import ProfilerActivity, profile

from meshinfer import DistributedTransport, InferenceServer, make_inference_transport
from meshinfer.inference.shared import ProcessSlotTransport, SharedMemoryTransport
from meshinfer.server.sources import RowSource
from meshinfer.server.static import StaticBatch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SECONDS = 60.0
CLIENTS, WIDTH, SIZE = 6, 32, 8
GPU = torch.device("cuda", 0)
VERSION = ("policy_version",)
SLOW_CYCLES = 50_000_000
"""Tens of milliseconds of a GPU: what does not wait for them, shows."""

REQUEST = TensorDict({"x": torch.zeros(WIDTH), "goal": torch.zeros(3), "step": torch.tensor(0)})
RESPONSE = TensorDict({"y": torch.zeros(2), "value": torch.zeros(()), "step": torch.tensor(0)})
TRANSPORTS: dict[str, Callable[[], Any]] = {
    "shared_memory": lambda: SharedMemoryTransport(REQUEST, RESPONSE, num_slots=4 * CLIENTS),
    "process_slot": lambda: ProcessSlotTransport(REQUEST, RESPONSE, num_slots=CLIENTS),
    "distributed": lambda: DistributedTransport(REQUEST, RESPONSE),
}
STATIC = pytest.mark.parametrize("static", [None, SIZE])


class Policy(torch.nn.Module):
    """Three leaves in, three out; ``step`` tells whose reply it is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(WIDTH + 3, 64), torch.nn.Tanh(), torch.nn.Linear(64, 3)
        )

    def forward(self, batch: TensorDictBase) -> TensorDict:
        out = self.net(torch.cat([batch["x"], batch["goal"]], -1))
        found = {"y": out[..., :2], "value": out[..., 2], "step": batch["step"] + 1}
        return TensorDict(found, batch.batch_size)


class Captured(torch.nn.Module):
    """A policy whose kernels are captured once, and replayed on the memory that they were captured with."""

    def __init__(self) -> None:
        super().__init__()
        self.policy = Policy()
        self.addresses: set[int] = set()
        self._graph: Any = None
        self._out: Any = None

    def forward(self, batch: TensorDictBase) -> TensorDict:
        self.addresses.add(batch["x"].data_ptr())
        if self._graph is None:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):
                    self.policy(batch)
            torch.cuda.current_stream().wait_stream(side)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                self._out = self.policy(batch)
        self._graph.replay()
        return TensorDict(dict(self._out.items()), batch.batch_size)


def request(number: int) -> TensorDict:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(WIDTH, generator=generator)
    return TensorDict({"x": x, "goal": x[:3].clone(), "step": torch.tensor(number)})


@pytest.fixture(params=list(TRANSPORTS))
def made(request: pytest.FixtureRequest) -> Iterator[Any]:
    with TRANSPORTS[request.param]() as made:
        yield made


def ask_all(clients: list[Any], rounds: int, reference: Policy | None = None) -> None:
    """Every client in a thread of its own."""

    def ask(who: int) -> None:
        for turn in range(rounds):
            number = 1000 * who + turn
            reply = clients[who](request(number), timeout=SECONDS)
            assert reply["step"].item() == number + 1
            if reference is not None:
                expected = reference(request(number).unsqueeze(0))[0]
                for key in ("y", "value"):
                    torch.testing.assert_close(reply[key], expected[key], rtol=1e-3, atol=1e-3)

    with ThreadPoolExecutor(len(clients)) as pool:
        list(pool.map(ask, range(len(clients))))


# --- Replies -------------------------------------------------------------------------------------


@STATIC
@pytest.mark.parametrize("kind", [Policy, Captured])
def test_clients_get_their_own_replies(made: Any, kind: Any, static: int | None) -> None:
    if kind is Captured and static is None:
        pytest.skip("graphs are captured for one size")
    policy = kind()
    with InferenceServer(
        policy, made, policy_device="cuda", share_weights=True, static_batch_size=static
    ) as server:
        clients = server.clients(CLIENTS)
        ask_all(clients, 100, Policy())
        for client in clients:
            client.close()
        assert server.stats().errors == 0
    if kind is Captured:
        assert len(policy.addresses) == 1


@STATIC
def test_a_prepared_policy_serves(made: Any, static: int | None) -> None:
    devices: set[Any] = set()

    class Watched(Policy):
        def forward(self, batch: TensorDictBase) -> TensorDict:
            devices.add((batch.device, batch["x"].device))
            return super().forward(batch)

    server = InferenceServer(
        Watched(), made, policy_device="cuda", share_weights=True, static_batch_size=static
    )
    if static is not None:
        server.prepare()
    with server, server.client() as client:
        ask_all([client], 3, Policy())
    assert devices == {(GPU, GPU)}


def test_an_error_spoils_no_later_batch(made: Any) -> None:
    """Rows of the failed batch may still be on their way to the GPU when those of the next one are gathered."""

    def slow(batch: TensorDictBase) -> TensorDict:
        torch.cuda._sleep(SLOW_CYCLES)
        if turns.pop():
            raise ArithmeticError("not this one")
        shape = batch.batch_size
        value = batch["x"][..., 0].clone()
        return TensorDict({"y": batch["x"][..., :2], "value": value, "step": batch["step"]}, shape)

    turns = [False, True] * 4
    with InferenceServer(slow, made, policy_device="cuda") as server, server.client() as client:
        for number in range(8):
            if turns[-1]:
                with pytest.raises(ArithmeticError):
                    client(request(number), timeout=SECONDS)
            else:
                reply = client(request(number), timeout=SECONDS)
                assert reply["step"].item() == number
                assert torch.equal(reply["y"], request(number)["x"][:2])


# --- Copies --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*Profiler clears events")  # torch tells it with each profiler
@STATIC
def test_a_pass_copies_once_each_way_and_waits_for_no_device(
    made: Any, static: int | None, tmp_path: Path
) -> None:
    with InferenceServer(Policy(), made, policy_device="cuda", static_batch_size=static) as server:
        clients = server.clients(CLIENTS)
        ask_all(clients, 20)  # libraries set themselves up
        assert wait_until(lambda: server.stats().requests == 20 * CLIENTS, SECONDS)
        server.stats(reset=True)
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            ask_all(clients, 20)
            assert wait_until(lambda: server.stats().requests == 20 * CLIENTS, SECONDS)
        passes = server.stats().batches
        for client in clients:
            client.close()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    copies = [event for event in events if event.get("cat") == "gpu_memcpy"]
    names = Counter(str(event["name"]) for event in copies)
    assert names["Memcpy HtoD (Pinned -> Device)"] == passes, names
    assert names["Memcpy DtoH (Device -> Pinned)"] == passes, names
    assert not any("Pageable" in name for name in names), names
    # The profiler itself waits for the device when it begins and when it ends.
    first = min(event["ts"] for event in copies)
    last = max(event["ts"] + event["dur"] for event in copies)
    calls = Counter(
        str(event["name"])
        for event in events
        if event.get("cat") == "cuda_runtime" and first <= event["ts"] <= last
    )
    assert not calls["cudaDeviceSynchronize"], calls
    assert not calls["cudaStreamSynchronize"], calls
    assert calls["cudaEventSynchronize"] <= passes, calls


@pytest.fixture
def no_blocking() -> Iterator[None]:
    """Whatever makes the host wait raises, but waiting for an event."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # once, that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


PLACES = pytest.mark.parametrize(
    "places",
    [[CPU] * 4, [GPU] * 4, [GPU, CPU, CPU, GPU], [CPU], [GPU]],
    ids=["host", "device", "mixed", "one of the host", "one of the device"],
)


def requests_of(made: Transport, places: list[torch.device], shift: int = 0) -> list[Request]:
    return [Request(made, x_of(shift + index), device=place) for index, place in enumerate(places)]


@PLACES
@pytest.mark.parametrize("static", [None, SIZE])
def test_rows_meet_in_one_batch_and_nothing_blocks(
    places: Any, static: int | None, request: pytest.FixtureRequest
) -> None:
    response = y_of(0).set("policy_version", torch.zeros((), dtype=torch.int64))
    made = Transport(x_of(0), response, version_key=VERSION)
    source = RowSource(made, SIZE, static and StaticBatch(static), GPU)
    serve(source, requests_of(made, places))
    requests = requests_of(made, places, 10)
    torch.cuda.synchronize()
    request.getfixturevalue("no_blocking")
    serve(source, requests)
    torch.cuda.set_sync_debug_mode("default")
    for index, one in enumerate(requests):
        assert one.answer["y"].device == places[index]
        assert (one.answer["y"] == 20 + 2 * index).all()
        assert one.answer["policy_version"] == 7


def serve(source: RowSource, requests: list[Request]) -> None:
    batch = source.gather(requests)
    assert batch.device == GPU
    source.scatter(requests, double(batch), 7)


@PLACES
def test_a_policy_on_the_cpu_waits_for_the_rows(places: Any) -> None:
    made = transport()
    made.row_device = GPU
    source = RowSource(made, SIZE)
    for shift in (0, 10, 20):
        requests = requests_of(made, places, shift)
        torch.cuda._sleep(SLOW_CYCLES)
        for request in requests:  # written behind what takes so long
            request.frame.views.tensors[0].add_(1)
        seen = served(source, requests)
        assert seen["x"].device == CPU
        for index, one in enumerate(requests):
            assert (one.answer["y"] == 2 * (shift + index + 1)).all()


def test_a_batch_of_tensors_on_the_gpu_reaches_a_policy_on_the_cpu_whole() -> None:
    with (
        InferenceServer(double, make_inference_transport("queue"), policy_device="cpu") as server,
        server.client() as client,
    ):
        for value in range(3):
            torch.cuda._sleep(SLOW_CYCLES)
            x = torch.zeros(1000, device=GPU).add_(value)
            reply = client(TensorDict({"x": x}), timeout=SECONDS)
            assert reply["y"].device == GPU
            assert (reply["y"] == 2 * value).all()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_rows_of_another_gpu_meet_there() -> None:
    other = torch.device("cuda", 1)
    made = transport()
    source = RowSource(made, SIZE, None, GPU)
    for shift in (0, 10):
        requests = requests_of(made, [other, CPU, GPU, other], shift)
        seen = served(source, requests)
        assert seen["x"].device == GPU
        for index, one in enumerate(requests):
            assert (one.answer["y"] == 2 * (shift + index)).all()


def test_staging_made_in_another_stream_is_whole() -> None:
    """Its memory is cleared there, before the serving thread writes to it."""
    made = transport(width=1 << 20)
    sources: list[RowSource] = []
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(SLOW_CYCLES)
        sources.append(RowSource(made, 2, None, GPU))
    requests = [Request(made, x_of(index + 1, width=1 << 20)) for index in range(2)]
    thread = threading.Thread(target=served, args=(sources[0], requests))
    thread.start()
    thread.join(SECONDS)
    for index, one in enumerate(requests):
        assert (one.answer["y"] == 2 * (index + 1)).all()
