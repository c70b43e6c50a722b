"""NCCL rows, with a stand-in for NCCL and for CUDA: how they are built, moved, given up, and refused."""

from __future__ import annotations

import inspect
import os
import pickle
import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from datetime import timedelta
from typing import Any

import nccl_stand_in
import pytest
import torch
from nccl_stand_in import StandIn, settle
from tensordict import TensorDict, TensorDictBase
from torch.distributed import HashStore, Store

from meshinfer import DistributedClient, DistributedTransport, InferenceServer, RefusedError
from meshinfer.inference.distributed.nccl import NcclRows
from meshinfer.inference.distributed.pair import CLIENT, SERVER
from meshinfer.streams import PASSED

SECONDS = 20.0
SHORTLY = 0.3
SHARING = "NCCL_MULTI_RANK_GPU_ENABLE"


@pytest.fixture(autouse=True)
def machine() -> Iterator[nccl_stand_in.Machine]:
    with nccl_stand_in.without_mistakes() as here:
        yield here


@pytest.fixture
def sides() -> Iterator[list[ThreadPoolExecutor]]:
    """The thread of each side."""
    with ThreadPoolExecutor(1) as server, ThreadPoolExecutor(1) as client:
        yield [server, client]


def build(
    sides: list[ThreadPoolExecutor], *, sender: int = CLIENT, **arguments: Any
) -> list[Future[Any]]:
    """Both ends of a channel, each in the thread of its side."""
    store = HashStore()
    store.set_timeout(timedelta(seconds=SECONDS))  # of what is given up and still waits there
    given = {"timeout": SECONDS} | arguments
    return [
        side.submit(NcclRows(rank).channel, store, rank, sends=rank == sender, **given)
        for rank, side in enumerate(sides)
    ]


def channels(sides: list[ThreadPoolExecutor], **arguments: Any) -> list[Any]:
    return [built.result(SECONDS) for built in build(sides, **arguments)]


def row(value: int, nbytes: int = 1000) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


# --- Rows ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sender", [SERVER, CLIENT])
def test_rows_arrive_in_order(sides: list[ThreadPoolExecutor], sender: int) -> None:
    ends = channels(sides, sender=sender)

    def send() -> None:
        marks = [ends[sender].send(row(value), PASSED) for value in range(100)]
        for mark in marks:
            mark.wait()
            assert mark.passed()

    def receive() -> list[int]:
        arrived = []
        for _ in range(100):
            target = row(255)
            ends[1 - sender].receive(target, PASSED).wait()
            assert set(target.tolist()) == {int(target[0])}
            arrived.append(int(target[0]))
        return arrived

    sent, received = sides[sender].submit(send), sides[1 - sender].submit(receive)
    assert received.result(SECONDS) == list(range(100))
    sent.result(SECONDS)
    for end in ends:
        end.abort()


def test_a_row_leaves_after_what_it_waits_for(
    sides: list[ThreadPoolExecutor], machine: nccl_stand_in.Machine
) -> None:
    """As when the kernel that writes it has not begun yet."""
    ends = channels(sides)
    written, sent, target = nccl_stand_in.Work("", row(0), []), row(1), row(255)

    class Writing:
        def hold_up(self, stream: Any) -> None:
            stream.pending.append(written)

    mark = sides[CLIENT].submit(ends[CLIENT].send, sent, Writing()).result(SECONDS)
    arriving = sides[SERVER].submit(ends[SERVER].receive, target, PASSED).result(SECONDS)
    assert not mark.passed()
    sent.fill_(7)
    written.over.set()
    sides[SERVER].submit(arriving.wait).result(SECONDS)
    assert set(target.tolist()) == {7}
    for end in ends:
        end.abort()


def test_each_communicator_has_one_thread_and_one_direction(
    sides: list[ThreadPoolExecutor], machine: nccl_stand_in.Machine
) -> None:
    """After the thread that built it, which is gone by then."""
    ends = channels(sides)
    sides[CLIENT].submit(lambda: [ends[CLIENT].send(row(1), PASSED) for _ in range(3)])
    sides[SERVER].submit(
        lambda: [ends[SERVER].receive(row(1), PASSED).wait() for _ in range(3)]
    ).result(SECONDS)
    for group, side in zip(sorted(machine.groups, key=lambda each: each.rank), sides, strict=True):
        (_, builder), *calls = group.calls
        assert {thread for _, thread in calls} == {side.submit(threading.get_ident).result(SECONDS)}
        assert builder not in {thread for _, thread in calls}
        assert group.options.config.max_ctas == 4
        assert group.options.is_high_priority_stream
    for end in ends:
        end.abort()


def test_the_environment_is_left_as_it_was(
    sides: list[ThreadPoolExecutor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "no")
    before = dict(os.environ)
    for end in channels(sides):
        end.abort()
    assert dict(os.environ) == before
    seen = subprocess.check_output(["env"], text=True).splitlines()
    assert "TORCH_NCCL_BLOCKING_WAIT=no" in seen
    assert not [line for line in seen if line.startswith("TORCH_NCCL_CUDA_EVENT_CACHE")]


def test_memory_for_rows_is_zeroed_and_no_inference_tensor() -> None:
    with torch.inference_mode():
        found = NcclRows(0).new_row(5)
    assert found.tolist() == [0] * 5
    assert found.dtype == torch.uint8
    assert not found.is_inference()


# --- What gets stuck -----------------------------------------------------------------------------


def test_aborting_ends_a_receive_that_waits(
    sides: list[ThreadPoolExecutor], machine: nccl_stand_in.Machine
) -> None:
    ends = channels(sides)
    waiting = sides[SERVER].submit(lambda: ends[SERVER].receive(row(0), PASSED).wait())
    with pytest.raises(FutureTimeoutError):
        waiting.result(SHORTLY)
    ends[SERVER].abort()
    with pytest.raises(RuntimeError, match="aborted: the other side has gone, or a row got stuck"):
        waiting.result(SECONDS)
    with pytest.raises(RuntimeError, match="was aborted"):
        ends[SERVER].receive(row(0), PASSED)
    ends[SERVER].abort()
    ends[CLIENT].abort()
    assert [group.aborts for group in machine.groups] == [1, 1]


def test_a_row_whose_receiver_has_gone_waits_to_be_aborted(
    sides: list[ThreadPoolExecutor], machine: nccl_stand_in.Machine
) -> None:
    """NCCL does not say that a peer has gone; the watch asks gloo."""
    ends = channels(sides)
    ends[SERVER].abort()
    mark = sides[CLIENT].submit(ends[CLIENT].send, row(1), PASSED).result(SECONDS)
    assert not mark.passed()
    ends[CLIENT].abort()
    with pytest.raises(RuntimeError, match="was aborted"):
        mark.wait()
    assert mark.passed()


def test_a_call_that_nccl_refuses_says_so_in_one_line(
    sides: list[ThreadPoolExecutor], machine: nccl_stand_in.Machine
) -> None:
    ends = channels(sides)
    machine.fails_after = 1
    with pytest.raises(RuntimeError, match="NCCL could not begin to move a row") as caught:
        sides[CLIENT].submit(ends[CLIENT].send, row(1), PASSED).result(SECONDS)
    assert str(caught.value).endswith("unhandled system error")
    assert "and more" in str(caught.value.__cause__)
    for end in ends:
        end.abort()


def test_whoever_moves_a_row_has_its_own_stream_again(
    sides: list[ThreadPoolExecutor], machine: nccl_stand_in.Machine
) -> None:
    """Also after a call that failed."""
    ends = channels(sides)
    before = [side.submit(torch.cuda.current_stream).result(SECONDS) for side in sides]
    for fails_after in (None, 0):
        machine.fails_after = fails_after
        for side, move in zip(sides, (ends[SERVER].receive, ends[CLIENT].send), strict=True):
            moved = side.submit(move, row(1), PASSED)
            assert (moved.exception(SECONDS) is None) == (fails_after is None)
        after = [side.submit(torch.cuda.current_stream).result(SECONDS) for side in sides]
        assert after == before
    for end in ends:
        end.abort()


def test_a_call_that_is_stuck_in_nccl_is_aborted_all_the_same(
    sides: list[ThreadPoolExecutor], machine: nccl_stand_in.Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds what keeps aborting from freeing a communicator that a call is about to use."""
    monkeypatch.setattr("meshinfer.inference.distributed.nccl_channel._LEAVE_SECONDS", SHORTLY)
    ends = channels(sides)
    entered = threading.Event()

    def stuck(self: StandIn, *_: Any) -> Any:
        entered.set()
        self._aborted.wait()
        raise RuntimeError("NCCL communicator was aborted")

    monkeypatch.setattr(StandIn, "send", stuck)
    sending = sides[CLIENT].submit(ends[CLIENT].send, row(1), PASSED)
    assert entered.wait(SECONDS)
    ends[CLIENT].abort()
    with pytest.raises(RuntimeError, match="the channel was aborted"):
        sending.result(SECONDS)
    ends[SERVER].abort()


# --- What cannot be built ------------------------------------------------------------------------


class Alone(Store):
    """Nobody comes."""

    def set(self, key: str, value: bytes) -> None:
        """Nobody sees it."""

    def get(self, key: str) -> bytes:
        raise TimeoutError("nobody came")

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self.get(keys[0])


@pytest.mark.parametrize("rank", [SERVER, CLIENT])
def test_a_side_that_does_not_come_is_a_timeout(rank: int, machine: nccl_stand_in.Machine) -> None:
    with pytest.raises(TimeoutError, match=r"did not build its half.*NCCL_DEBUG=INFO") as caught:
        NcclRows(0).channel(Alone(), rank, sends=True, timeout=SECONDS)
    assert "nobody came" in str(caught.value.__cause__)
    settle(machine.groups)
    assert [group.aborts for group in machine.groups] == [1]


def test_a_build_that_never_finishes_is_a_timeout_and_is_freed_when_it_does(
    sides: list[ThreadPoolExecutor], machine: nccl_stand_in.Machine
) -> None:
    machine.never_connects = True
    for building in build(sides, timeout=SHORTLY):
        with pytest.raises(TimeoutError, match="did not build its half"):
            building.result(SECONDS)
    machine.let_go.set()
    settle(machine.groups)
    assert all(group.aborts for group in machine.groups)


@pytest.mark.parametrize(
    ("pretended", "match"),
    [
        ({"no_constructor": "no memory\nand more"}, r"no channel for rows: no memory; NCCL_DEBUG"),
        ({"no_connection": "no route\nand more"}, "no channel for rows: no route; NCCL_DEBUG"),
        ({"damages": True}, "the first row arrived damaged"),
    ],
)
def test_what_nccl_says_about_a_build_is_passed_on(
    sides: list[ThreadPoolExecutor],
    machine: nccl_stand_in.Machine,
    pretended: dict[str, Any],
    match: str,
) -> None:
    for name, value in pretended.items():
        setattr(machine, name, value)
    building = build(sides)[SERVER]
    with pytest.raises(RuntimeError, match=match):
        building.result(SECONDS)
    for group in machine.groups:
        group.abort()


def test_a_server_does_not_enter_nccl_before_its_client_is_about_to(
    sides: list[ThreadPoolExecutor], machine: nccl_stand_in.Machine
) -> None:
    """It could not be stopped there."""
    machine.never_connects = True  # entering is what the thread would not come back from
    with pytest.raises(TimeoutError):
        NcclRows(0).channel(Alone(), SERVER, sends=True, timeout=SECONDS)
    assert not [thread for thread in threading.enumerate() if thread.name == "meshinfer-nccl"]


# --- Devices -------------------------------------------------------------------------------------


def test_the_device_is_the_current_one_of_the_thread_that_asks_first(
    sides: list[ThreadPoolExecutor], machine: nccl_stand_in.Machine
) -> None:
    rows = NcclRows()
    torch.cuda.set_device(1)
    try:
        assert rows.describe()["device"] == 1
        assert sides[0].submit(rows.describe).result(SECONDS)["device"] == 1
        assert (
            sides[0].submit(pickle.loads(pickle.dumps(rows)).describe).result(SECONDS)["device"]
            == 0
        )
    finally:
        torch.cuda.set_device(0)


@pytest.mark.parametrize("device", [1, "cuda:1", torch.device("cuda", 1)])
def test_a_device_by_its_number_or_name(device: Any) -> None:
    assert pickle.loads(pickle.dumps(NcclRows(device))).describe()["device"] == 1


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ({"device": "cpu"}, ValueError, "device='cpu': NCCL needs a CUDA device"),
        ({"device": -1}, ValueError, "device=-1: expected the index"),
        ({"device": "gpu"}, ValueError, "device='gpu': "),
        ({"device": True}, TypeError, "device=True: expected a CUDA device or its index"),
        ({"device": 1.5}, TypeError, "device=1.5"),
        ({"ctas": 0}, ValueError, "ctas=0: expected 1 to 32"),
        ({"ctas": 2.0}, TypeError, "ctas=2.0: expected an int"),
    ],
)
def test_arguments_that_no_machine_has(arguments: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=re.escape(match)):
        NcclRows(**arguments)


def test_a_device_that_this_process_does_not_have() -> None:
    with pytest.raises(ValueError, match="device=2: this process has 2 CUDA devices"):
        _ = NcclRows(2).device


def test_a_process_without_a_gpu(machine: nccl_stand_in.Machine) -> None:
    machine.devices = 0
    with pytest.raises(ValueError, match=r"sees no CUDA device.*CUDA_VISIBLE_DEVICES.*'gloo'"):
        _ = NcclRows().device


def test_a_torch_without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(ValueError, match=r"has no NCCL; install a CUDA build of torch, or use"):
        _ = NcclRows().device


# --- Who does not fit ----------------------------------------------------------------------------


def objection(**theirs: Any) -> str | None:
    return NcclRows(0).objection(NcclRows(1).describe() | theirs)


def test_sides_that_fit() -> None:
    assert objection() is None


def test_another_nccl_is_refused() -> None:
    said = objection(nccl=[2, 28, 9])
    assert said is not None
    assert said.startswith("NCCL 2.28.9 at the client and 2.30.7 at the server")
    assert "the same torch" in said


def test_another_bound_on_memory_is_refused() -> None:
    said = objection(ctas=1)
    assert said is not None
    assert said.startswith("ctas=1 at the client and 4 at the server")


def test_two_ranks_on_one_gpu_need_a_newer_nccl(
    machine: nccl_stand_in.Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SHARING, "1")
    machine.version = (2, 29, 7)
    said = NcclRows(0).objection(NcclRows(0).describe())
    assert said is not None
    assert "have one GPU (a stand-in, GPU-0" in said
    assert "which NCCL 2.29.7 does not allow, and 2.30 does" in said
    assert "different device=" in said


@pytest.mark.parametrize(
    ("there", "here", "missing"),
    [
        (True, "1", None),
        (False, "1", "missing at the client)"),
        (True, "0", "missing at the server)"),
        (False, "", "missing at the client and the server)"),
    ],
)
def test_two_ranks_on_one_gpu_need_the_consent_of_both(
    there: bool, here: str, missing: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SHARING, here)
    said = NcclRows(0).objection(NcclRows(0).describe() | {"shares_gpu": there})
    assert (said is None) if missing is None else (said is not None and missing in said)
    assert said is None or f"{SHARING}=1" in said


# --- The transport -------------------------------------------------------------------------------

REQUEST = TensorDict({"x": torch.zeros(3), "flag": torch.zeros((), dtype=torch.bool)})
RESPONSE = TensorDict({"y": torch.zeros(3)})


def double(batch: TensorDictBase) -> TensorDict:
    return TensorDict({"y": 2 * batch["x"]}, batch.batch_size)


def transport(device: int, **options: Any) -> DistributedTransport:
    given = {"backend": "nccl", "device": device, "secret": "of the tests", "timeout": SECONDS}
    return DistributedTransport(REQUEST, RESPONSE, **given | options)


def client_of(server: InferenceServer, device: int, **options: Any) -> DistributedClient:
    port = server.transport.address.port
    return transport(device, role="client", port=port, **options).client()


def ask(client: DistributedClient, value: float) -> None:
    payload = REQUEST.clone()
    payload["x"].fill_(value)
    assert client(payload, timeout=SECONDS)["y"].tolist() == [2 * value] * 3


def test_requests_and_replies_of_several_clients(machine: nccl_stand_in.Machine) -> None:
    with InferenceServer(double, transport(0)) as server:
        with (
            client_of(server, 1) as one,
            client_of(server, 1) as other,
            server.transport.client(backend="gloo") as over_gloo,
        ):
            for value in range(20):
                for client in (one, other, over_gloo):
                    ask(client, float(value))
        assert len(machine.groups) == 2 * 2 * 2
    settle(machine.groups)
    assert all(group.aborts for group in machine.groups)


def test_a_client_on_the_server_s_gpu_is_refused() -> None:
    with InferenceServer(double, transport(0)) as server, client_of(server, 0) as client:
        with pytest.raises(RefusedError, match=f"have one GPU.*{SHARING}=1"):
            ask(client, 1.0)
        with client_of(server, 1) as other:
            ask(other, 1.0)


def test_a_server_whose_gpu_is_not_there() -> None:
    with pytest.raises(ValueError, match="device=7: this process has 2 CUDA devices"):
        transport(7)


def test_a_client_whose_gpu_is_not_there() -> None:
    with (
        InferenceServer(double, transport(0)) as server,
        client_of(server, 7) as client,
        pytest.raises(ValueError, match="device=7: this process has 2 CUDA devices"),
    ):
        ask(client, 1.0)


# --- The stand-in --------------------------------------------------------------------------------


def names_of(method: Callable[..., Any]) -> list[str]:
    """The arguments of one of pybind's methods, as its first line of documentation has them."""
    found = re.search(r"\((.*)\) ->", (method.__doc__ or "").strip().splitlines()[0])
    assert found is not None
    return re.findall(r"(\w+): (?:torch|collections|typing|datetime)", found[1])[1:]


def test_the_stand_in_is_called_as_the_original_is() -> None:
    """Where this torch has one."""
    original = pytest.importorskip("torch._C._distributed_c10d")
    if not hasattr(original, "ProcessGroupNCCL"):
        pytest.skip("this torch has no NCCL")
    group = original.ProcessGroupNCCL
    for name in ("send", "recv"):
        assert (
            names_of(getattr(group, name))
            == list(inspect.signature(getattr(StandIn, name)).parameters)[1:]
        )
    assert "torch.device" in group.eager_connect_single_device.__doc__
    assert len(group.get_runtime_nccl_version()) == 3
    assert group.abort.__doc__.startswith("abort(self")
    assert torch.distributed.Work.block_current_stream.__doc__.startswith("block_current_stream(")
    options, ours = group.Options(), nccl_stand_in.Options()
    for name in vars(ours):
        assert hasattr(options, name), name
    for name in vars(ours.config):
        setattr(options.config, name, 1)
    options._timeout = timedelta(days=3650)
    assert "options" in group.__init__.__doc__
