"""What else a GPU does while rows travel over NCCL, and whatever a payload is made of: each side is a process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import test_nccl_pair as pair
import torch
import torch.distributed as dist
from failure_roles import Worker, crew
from support import wait_until
from tensordict import TensorDict

from meshinfer import InferenceServer

SECONDS, ROW_SECONDS = pair.SECONDS, pair.ROW_SECONDS
SERVER_GPU, CLIENT_GPU = pair.SERVER_GPU, pair.CLIENT_GPU
SHARE = SERVER_GPU == CLIENT_GPU

pytestmark = [*pair.pytestmark, pair.needs_a_pair]

SINGLY = ("uint16", "uint32", "uint64", "complex32", "float8_e8m0fnu")
"""torch copies no two tensors of one of these at once on a GPU."""
REDUCTIONS = 200
SHAPE = (64, 48)


def spec_of(dtype: str) -> TensorDict:
    """Two leaves of one dtype, and of no other."""
    found = getattr(torch, dtype)
    leaf = torch.zeros(32 * found.itemsize, dtype=torch.uint8).view(found)
    return TensorDict({"one": leaf, "other": leaf.clone()})


# Roles. The first argument is the worker's station.


def serve(station: SimpleNamespace, spec: TensorDict) -> int:
    """Become a server of another payload than those of the pair's tests; the port."""
    server = station.server = InferenceServer(
        pair.echo, pair.transport(SERVER_GPU, SHARE, spec), policy_device=f"cuda:{SERVER_GPU}"
    )
    server.start()
    assert server.transport.address is not None
    return int(server.transport.address.port)


def await_gpu(station: SimpleNamespace, device: int) -> None:
    """Nothing runs or waits there: else this would not return."""
    torch.cuda.synchronize(device)


def clients_of(station: SimpleNamespace) -> int:
    return int(station.server.stats().clients)


def capture_beside_queries(station: SimpleNamespace, captures: int) -> None:
    """Capture graphs while another thread asks."""
    with asking(station):
        ones = torch.ones(64, 64, device=station.device)
        for _ in range(captures):
            graph = torch.cuda.CUDAGraph()
            side = torch.cuda.Stream(station.device)  # type: ignore[no-untyped-call]
            with torch.cuda.graph(graph, stream=side, capture_error_mode="thread_local"):
                product = ones @ ones
            graph.replay()
            torch.cuda.current_stream(station.device).synchronize()
            assert (product == 64).all()


@contextmanager
def asking(station: SimpleNamespace) -> Iterator[None]:
    """Another thread queries meanwhile, and must not fail."""
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            pair.query(station, 2)

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        try:
            yield
        finally:
            over.set()
        asked.result(SECONDS)


def open_store(station: SimpleNamespace) -> int:
    """For the default group; its port."""
    store = station.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return int(store.port)


def join_default_group(station: SimpleNamespace, port: int, rank: int) -> None:
    """As a training script does. The library has groups of its own by then."""
    torch.cuda.set_device((SERVER_GPU, CLIENT_GPU)[rank])
    store = getattr(station, "store", None) or dist.TCPStore("127.0.0.1", port)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=2)


def reduce(station: SimpleNamespace, steps: int) -> None:
    """Collectives of two ranks, one after the other, that are not waited for each time."""
    rank = dist.get_rank()
    for step in range(steps):
        x = torch.full((1 << 16,), float(step + rank), device="cuda")
        dist.all_reduce(x)
        if step % 20 == 0:
            assert (x == 2 * step + 1).all()
    torch.cuda.synchronize()


def reduce_beside_queries(station: SimpleNamespace, steps: int) -> None:
    with asking(station):
        reduce(station, steps)


def leave_default_group(station: SimpleNamespace) -> None:
    dist.destroy_process_group()


def come_and_go(station: SimpleNamespace, port: int, times: int) -> None:
    for _ in range(times):
        pair.connect(station, port, CLIENT_GPU, SHARE)
        pair.query(station, 4)
        pair.leave(station)


def round_trip(station: SimpleNamespace, port: int, spec: TensorDict) -> None:
    device = f"cuda:{CLIENT_GPU}"
    client = pair.transport(CLIENT_GPU, SHARE, spec, role="client", port=port).client()
    with client:
        for seed in range(3):
            sent = spec.apply(lambda leaf, seed=seed: random_octets(leaf, seed)).to(device)
            found = client(sent, timeout=ROW_SECONDS).exclude("policy_version")
            assert pair.octets_of(found) == pair.octets_of(sent)


def random_octets(leaf: torch.Tensor, seed: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    shape = leaf.view(torch.uint8).shape
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=random).view(leaf.dtype)


def ask_with_tensors_of_every_kind(station: SimpleNamespace, port: int) -> None:
    """Views, broadcasts, tensors with a gradient, of inference mode, of a stream of their own, freed at once."""
    there = torch.device("cuda", CLIENT_GPU)
    spec = TensorDict({"x": torch.zeros(SHAPE)})
    numbers = torch.arange(float(spec["x"].numel()), device=there)
    side = torch.cuda.Stream(there)  # type: ignore[no-untyped-call]
    with pair.transport(CLIENT_GPU, SHARE, spec, role="client", port=port).client() as client:

        def ask(x: torch.Tensor) -> None:
            found = client(TensorDict({"x": x}), timeout=ROW_SECONDS)["x"]
            assert not found.requires_grad
            assert torch.equal(found.cpu(), x.detach().cpu())

        ask(numbers.view(SHAPE[::-1]).t())
        ask(numbers.repeat(2).view(2, -1)[1].view(SHAPE))
        ask(numbers[:1].expand(SHAPE))
        ask(numbers.view(SHAPE).clone().requires_grad_())
        with torch.inference_mode():
            ask(numbers.view(SHAPE) + 1)
        with torch.cuda.device(there), torch.cuda.stream(side):
            ask(numbers.view(SHAPE) + 2)
        futures = []
        for value in range(20):
            x = torch.full(SHAPE, float(value), device=there)
            futures.append(client.submit(TensorDict({"x": x})))
            del x
            torch.full(SHAPE, -1.0, device=there)  # takes the memory that was just freed
        for value, future in enumerate(futures):
            assert (future.result(ROW_SECONDS)["x"] == value).all()


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    with crew(3) as found:
        yield found


# --- Beside rows ---------------------------------------------------------------------------------


def test_nothing_waits_on_a_gpu_while_all_clients_idle(workers: list[Worker]) -> None:
    """A receive that is posted for an idle client would be a kernel that keeps the GPU busy, for ever."""
    server, one, other = workers
    pair.start(server, one, other)
    for _ in range(5):
        server.call(await_gpu, SERVER_GPU, within=ROW_SECONDS)
        for client in (one, other):
            client.call(await_gpu, CLIENT_GPU, within=ROW_SECONDS)
            client.call(pair.query, 3, within=SECONDS)
    for client in (one, other):
        client.call(pair.leave)
    server.call(pair.stop)


def test_collectives_go_on_beside_rows_and_while_clients_come_and_go(workers: list[Worker]) -> None:
    """The user's default group has the same two GPUs as the communicators of the library."""
    server, client, other = workers
    port = pair.start(server, client)
    meeting = server.call(open_store)
    for rank, worker in enumerate((server, client)):
        worker.begin(join_default_group, meeting, rank)
    for worker in (server, client):
        worker.outcome(SECONDS).get()
    server.begin(reduce, REDUCTIONS)
    client.begin(reduce_beside_queries, REDUCTIONS)
    other.begin(come_and_go, port, 3)
    for worker in (server, client, other):
        worker.outcome(SECONDS).get()
    for worker in (server, client):
        worker.begin(leave_default_group)
    for worker in (server, client):
        worker.outcome(SECONDS).get()
    client.call(pair.query, 4, within=SECONDS)
    client.call(pair.leave)
    server.call(pair.stop)


def test_graphs_are_captured_beside_rows(workers: list[Worker]) -> None:
    server, client, other = workers
    pair.start(server, client, other)
    other.begin(pair.query_until_told)
    client.call(capture_beside_queries, 20, within=SECONDS)
    other.tell()
    assert other.outcome(SECONDS).get() > 0
    for worker in (client, other):
        worker.call(pair.leave)
    server.call(pair.stop)


# --- Payloads ------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
def test_a_payload_of_one_rare_dtype(workers: list[Worker]) -> None:
    server, client, _ = workers
    for dtype in SINGLY:
        if not hasattr(torch, dtype):
            continue
        spec = spec_of(dtype)
        port = server.call(serve, spec, within=SECONDS)
        client.call(round_trip, port, spec, within=SECONDS)
        server.call(pair.stop)


def test_tensors_of_every_kind(workers: list[Worker]) -> None:
    server, client, _ = workers
    port = server.call(serve, TensorDict({"x": torch.zeros(SHAPE)}), within=SECONDS)
    client.call(ask_with_tensors_of_every_kind, port, within=SECONDS)
    server.call(pair.stop)


# --- What gets stuck -----------------------------------------------------------------------------


def freeze(victim: Worker) -> Any:
    """Between a header and its row."""
    victim.call(pair.freeze_at_the_next_row)
    victim.begin(pair.query, 1)
    frozen = psutil.Process(victim.pid)
    assert wait_until(lambda: frozen.status() == psutil.STATUS_STOPPED, SECONDS)


def test_a_client_that_stays_frozen_is_given_up_and_the_other_one_goes_on(
    workers: list[Worker],
) -> None:
    server, victim, other = workers
    pair.start(server, victim, other)
    freeze(victim)
    other.begin(pair.query_until_told)
    assert wait_until(lambda: server.call(clients_of) == 1, SECONDS)
    other.tell()
    assert other.outcome(SECONDS).get() > 0
    other.call(pair.leave)
    server.call(pair.stop)


def test_two_stuck_communicators_are_both_freed(workers: list[Worker]) -> None:
    """Each in a thread of its own: aborting one may wait for the kernel of the other."""
    server, *victims = workers
    pair.start(server, *victims)
    for victim in victims:
        freeze(victim)
    server.call(pair.stop, within=SECONDS)
    assert wait_until(lambda: server.call(pair.aborts_under_way) == 0, SECONDS)
    server.call(await_gpu, SERVER_GPU, within=SECONDS)
    for victim in victims:
        victim.kill()
