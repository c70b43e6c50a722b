"""Rows over NCCL, from GPU to GPU: each side is a process of its own."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from failure_roles import SECRET, Worker, crew, told
from support import wait_until
from tensordict import TensorDict, TensorDictBase

from meshinfer import (
    DistributedTransport,
    InferenceServer,
    PeerLostError,
    RefusedError,
    ServerClosedError,
)
from meshinfer.inference.distributed.nccl_channel import NcclChannel

SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"
SECONDS = 120.0
ROW_SECONDS = 20.0
GPUS = torch.cuda.device_count()
NCCL = (0, 0)
if torch.distributed.is_nccl_available():
    NCCL = torch.distributed.ProcessGroupNCCL.get_runtime_nccl_version()[:2]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(GPUS == 0, reason="needs a CUDA device"),
    pytest.mark.skipif(NCCL == (0, 0), reason="needs a torch with NCCL"),
    pytest.mark.timeout(300),
]
needs_a_pair = pytest.mark.skipif(
    GPUS < 2 and NCCL < (2, 30), reason="needs two CUDA devices, or NCCL 2.30 for two ranks on one"
)
SERVER_GPU, CLIENT_GPU = 0, min(1, GPUS - 1)

CYCLES = 2_000_000
"""About a millisecond of a GPU."""
NUMBERS = TensorDict({"x": torch.zeros(1024, dtype=torch.int64)})
DTYPES = (
    *(torch.uint8, torch.int8, torch.int32, torch.int64, torch.bool),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64),
    torch.float8_e4m3fn,
)


def payload(seed: int = 0, device: str = "cpu") -> TensorDict:
    """A leaf of each dtype, and one of a megabyte."""
    random = torch.Generator().manual_seed(seed)
    octets = {
        str(dtype).removeprefix("torch."): torch.randint(
            0, 2, (4 * dtype.itemsize,), dtype=torch.uint8, generator=random
        ).view(dtype)
        for dtype in DTYPES
    }
    pixels = torch.randint(0, 256, (3, 512, 700), dtype=torch.uint8, generator=random)
    return TensorDict({**octets, "pixels": pixels}).to(device)


def octets_of(payload: TensorDictBase) -> dict[str, bytes]:
    return {
        key: leaf.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
        for key, leaf in payload.items()
    }


def echo(batch: TensorDictBase) -> TensorDictBase:
    assert all(leaf.device.type == "cuda" for leaf in batch.values())
    # TensorDict.clone() adds 0 where a device is set, which torch cannot do with every dtype.
    return batch.apply(torch.clone)


def slowly(batch: TensorDictBase) -> TensorDictBase:
    """The numbers that it gets, long after it has returned."""
    torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]
    return batch.apply(torch.clone)


def transport(
    device: int, share: bool, spec: TensorDict | None = None, **options: Any
) -> DistributedTransport:
    os.environ[SHARING] = "1" if share else "0"  # before NCCL is asked for anything
    spec = payload() if spec is None else spec
    return DistributedTransport(
        spec,
        spec,
        backend="nccl",
        device=device,
        secret=SECRET,
        timeout=ROW_SECONDS,
        **options,
    )


# Roles. The first argument is the worker's station.


def serve(station: SimpleNamespace, share: bool, numbers: bool = False) -> int:
    """Become a server; the port."""
    device = f"cuda:{SERVER_GPU}"
    policy, spec = (slowly, NUMBERS) if numbers else (echo, None)
    station.server = InferenceServer(
        policy, transport(SERVER_GPU, share, spec), policy_device=device
    )
    station.server.start()
    address = station.server.transport.address
    assert address is not None
    return int(address.port)


def connect(station: SimpleNamespace, port: int, device: int, share: bool) -> None:
    """Become a client, and make a first request."""
    station.device = f"cuda:{device}"
    station.client = transport(device, share, role="client", port=port).client()
    query(station, 1)


def ask_from_the_cpu(station: SimpleNamespace, port: int, device: int) -> None:
    """As a client on a GPU that may not be there, so that nothing can lie on it."""
    with transport(device, False, role="client", port=port).client() as client:
        client(payload())


def query(station: SimpleNamespace, requests: int) -> None:
    """Requests whose replies must be their own, on this client's GPU."""
    for seed in range(0, requests, 2):
        sent = [payload(each, station.device) for each in range(seed, min(seed + 2, requests))]
        futures = [station.client.submit(each) for each in sent]
        for each, future in zip(sent, futures, strict=True):
            found = future.result(ROW_SECONDS).exclude("policy_version")
            assert all(str(leaf.device) == station.device for leaf in found.values())
            assert octets_of(found) == octets_of(each)


def query_until_told(station: SimpleNamespace) -> int:
    count = 0
    while not told(station):
        query(station, 2)
        count += 2
    return count


def count(station: SimpleNamespace, port: int, device: int, share: bool, steps: int) -> None:
    """Numbers that are written late, in a stream of the client's own."""
    there = torch.device("cuda", device)
    side = torch.cuda.Stream(there)  # type: ignore[no-untyped-call]
    with transport(device, share, NUMBERS, role="client", port=port).client() as client:
        for step in range(steps):
            with torch.cuda.device(there), torch.cuda.stream(side):
                torch.cuda._sleep(CYCLES)  # type: ignore[no-untyped-call]
                numbers = torch.full((1024,), step, dtype=torch.int64, device=there)
                future = client.submit(TensorDict({"x": numbers}))
            found = future.result(ROW_SECONDS)["x"]
            assert found.cpu().unique().tolist() == [step]


def freeze_at_the_next_row(station: SimpleNamespace) -> None:
    """Its header has left by then."""

    def freeze(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGSTOP)
        raise RuntimeError("too late")

    NcclChannel.send = freeze  # type: ignore[method-assign]


def aborts_under_way(station: SimpleNamespace) -> int:
    return sum(thread.name == "meshinfer-abort" for thread in threading.enumerate())


def die_at_the_next_row(station: SimpleNamespace) -> None:
    """Its header has left by then."""

    def die(*_: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    NcclChannel.send = die  # type: ignore[method-assign]


def ends_with(station: SimpleNamespace) -> str:
    """Make requests until that fails."""
    try:
        while True:
            query(station, 1)
    except (PeerLostError, ServerClosedError) as error:
        return str(error)


def leave(station: SimpleNamespace) -> None:
    station.client.close()


def stop(station: SimpleNamespace) -> None:
    station.server.shutdown()


@pytest.fixture
def workers() -> Iterator[list[Worker]]:
    with crew(3) as found:
        yield found


def start(server: Worker, *clients: Worker) -> int:
    share = CLIENT_GPU == SERVER_GPU
    port = server.call(serve, share, within=SECONDS)
    for client in clients:
        client.call(connect, port, CLIENT_GPU, share, within=SECONDS)
    return int(port)


@needs_a_pair
def test_every_dtype_goes_there_and_back(workers: list[Worker]) -> None:
    server, one, other = workers
    start(server, one, other)
    for client in (one, other):
        client.begin(query, 50)
    for client in (one, other):
        client.outcome(SECONDS).get()
        client.call(leave)
    server.call(stop)


@needs_a_pair
def test_a_client_killed_between_header_and_row(workers: list[Worker]) -> None:
    """The other goes on, and so does the server's process."""
    server, victim, other = workers
    start(server, victim, other)
    other.begin(query_until_told)
    victim.call(die_at_the_next_row)
    victim.begin(query, 1)
    victim.process.join(SECONDS)
    assert victim.process.exitcode == -signal.SIGKILL
    other.tell()
    assert other.outcome(SECONDS).get() > 0
    other.call(query, 10, within=SECONDS)
    other.call(leave)
    server.call(stop)


@needs_a_pair
def test_a_server_killed_in_the_middle_of_a_reply(workers: list[Worker]) -> None:
    server, *clients = workers
    start(server, *clients)
    server.call(die_at_the_next_row)
    for client in clients:
        client.begin(ends_with)
    for client in clients:
        assert client.outcome(SECONDS).get()


@needs_a_pair
def test_rows_wait_for_the_streams_that_write_them(workers: list[Worker]) -> None:
    """At the client and at the server, whose policy is not done when it returns."""
    server, *clients = workers
    share = CLIENT_GPU == SERVER_GPU
    port = server.call(serve, share, numbers=True, within=SECONDS)
    for client in clients:
        client.begin(count, port, CLIENT_GPU, share, 200)
    for client in clients:
        client.outcome(SECONDS).get()
    server.call(stop)


@needs_a_pair
def test_a_client_frozen_between_header_and_row_does_not_hold_up_the_end(
    workers: list[Worker],
) -> None:
    """The server shuts down, tells the other one, and frees what was stuck."""
    server, victim, other = workers
    start(server, victim, other)
    victim.call(freeze_at_the_next_row)
    victim.begin(query, 1)
    frozen = psutil.Process(victim.pid)
    assert wait_until(lambda: frozen.status() == psutil.STATUS_STOPPED, SECONDS)
    other.begin(ends_with)
    server.call(stop, within=SECONDS)
    assert "shut down" in other.outcome(SECONDS).get()
    assert wait_until(lambda: server.call(aborts_under_way) == 0, SECONDS)
    victim.kill()


def test_a_client_whose_gpu_is_not_there(workers: list[Worker]) -> None:
    server, client, _ = workers
    port = server.call(serve, False, within=SECONDS)
    with pytest.raises(ValueError, match=f"device={GPUS}: this process has {GPUS} CUDA devices"):
        client.call(ask_from_the_cpu, port, GPUS, within=SECONDS)
    server.call(stop)


def test_two_ranks_on_one_gpu_are_refused_unless_both_consent(workers: list[Worker]) -> None:
    server, client, _ = workers
    port = server.call(serve, False, within=SECONDS)
    with pytest.raises(RefusedError, match="client and server have one GPU"):
        client.call(connect, port, SERVER_GPU, True, within=SECONDS)
    server.call(stop)
