"""What users do to NCCL rows from outside: environment, graphs, slices of a GPU, an interpreter that ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import nccl_stand_in
import pytest
import torch
from nccl_stand_in import settle
from support import wait_until
from tensordict import TensorDict

from meshinfer import DistributedTransport, InferenceServer, NcclRows
from meshinfer.streams import refuse_captures

SECONDS = 30.0
SPEC = TensorDict({"x": torch.zeros(3)})
SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"


@pytest.fixture(autouse=True)
def machine() -> Iterator[nccl_stand_in.Machine]:
    with nccl_stand_in.without_mistakes() as here:
        yield here


def transport(device: int, **options: Any) -> DistributedTransport:
    given = {"backend": "nccl", "device": device, "secret": "of the tests", "timeout": SECONDS}
    return DistributedTransport(SPEC, SPEC, **given | options)


@pytest.fixture
def served() -> Iterator[InferenceServer]:
    with InferenceServer(lambda batch: batch.apply(torch.clone), transport(0)) as server:
        yield server


def client_of(server: InferenceServer) -> Any:
    assert isinstance(server.transport, DistributedTransport)
    assert server.transport.address is not None
    return transport(1, role="client", port=server.transport.address.port).client()


def test_channels_are_freed_where_no_thread_can_be_started(
    machine: nccl_stand_in.Machine, served: InferenceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at the end of an interpreter of Python 3.12 whose script has not closed its client."""
    client = client_of(served)
    client(SPEC, timeout=SECONDS)
    start, failures = threading.Thread.start, []

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "meshinfer-abort":
            failures.append(thread)
            raise RuntimeError("can't create new thread at interpreter shutdown")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    client.close()
    settle(machine.groups)
    assert [group.aborts > 0 for group in machine.groups] == [True] * 4
    assert failures


def test_a_request_from_inside_of_a_capture_is_refused_before_anything_happens(
    served: InferenceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    capturing = [True]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    with client_of(served) as client:
        with monkeypatch.context() as patch:
            patch.setattr(NcclRows, "device", torch.device("cuda", 1))
            with pytest.raises(ValueError, match="capturing a CUDA graph"):
                client(SPEC, timeout=SECONDS)
        assert client.in_flight == 0
        refuse_captures(torch.device("cpu"))
        capturing[0] = False
        refuse_captures(torch.device("cuda", 1))
        assert torch.equal(client(SPEC, timeout=SECONDS)["x"], SPEC["x"])


def test_no_thread_asks_a_gpu_that_is_not_its_own(
    served: InferenceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread begins with the first GPU, where the question alone would take some hundred megabytes."""
    query, asked = nccl_stand_in.Event.query, {}

    def note(event: nccl_stand_in.Event) -> bool:
        asked[threading.current_thread().name] = getattr(nccl_stand_in._thread, "device", None)
        return query(event)

    monkeypatch.setattr(nccl_stand_in.Event, "query", note)
    with client_of(served) as client:
        client(SPEC, timeout=SECONDS)
        assert wait_until(lambda: "meshinfer-watch" in asked, SECONDS)
    assert None not in asked.values(), asked


@pytest.mark.parametrize(
    ("name", "value", "match"),
    [
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", r"CUDA_DEVICE_MAX_CONNECTIONS=1: .*8 to 32"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "7", r"CUDA_DEVICE_MAX_CONNECTIONS=7: .*8 to 32"),
        ("NCCL_COMM_ID", "10.0.0.1:5000", r"NCCL_COMM_ID='10.0.0.1:5000'.*unset it"),
    ],
)
def test_what_would_make_nccl_hang_is_refused(
    name: str, value: str, match: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=match):
        transport(0)


@pytest.mark.parametrize("value", ["", "8", "32"])
def test_queues_enough(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", value)
    assert NcclRows(1).describe()["device"] == 1


def place(monkeypatch: pytest.MonkeyPatch, *buses: int) -> None:
    """The GPUs at these places, each with an id of its own."""

    def properties(device: int) -> SimpleNamespace:
        address = {"pci_domain_id": 0, "pci_bus_id": buses[device], "pci_device_id": 0}
        return SimpleNamespace(name="a stand-in", uuid=f"MIG-{device}", **address)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)


def test_slices_of_one_gpu_are_one_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    place(monkeypatch, 7, 7)
    monkeypatch.delenv(SHARING, raising=False)
    said = NcclRows(0).objection(NcclRows(1).describe())
    assert said is not None
    assert "client and server have slices of one GPU (a stand-in, MIG-0" in said
    assert SHARING in said


def test_gpus_at_two_places_or_in_two_systems_are_two(monkeypatch: pytest.MonkeyPatch) -> None:
    place(monkeypatch, 7, 8)
    theirs = NcclRows(1).describe()
    assert NcclRows(0).objection(theirs) is None
    ours = NcclRows(0).describe()["slot"]
    assert ours is not None
    assert NcclRows(0).objection(theirs | {"slot": f"another {ours}"}) is None
