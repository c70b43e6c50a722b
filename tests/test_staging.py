"""One copy each way for a batch: rows of clients, a policy's device, and what lies between them.

A second CPU memory stands in for a device, and rows there for those of clients that have one; the meta device stands in
where copies between devices are counted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from staging_rows import CPU, Request, Transport, double, served, transport, x_of, y_of
from support import wait_until
from tensordict import TensorDict, TensorDictBase
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import meshinfer.device_rows
from meshinfer import DistributedTransport, InferenceServer
from meshinfer.device_rows import DeviceReplies, DeviceRequests, LandedRequests
from meshinfer.inference.shared import ProcessSlotTransport, SharedMemoryTransport
from meshinfer.rows import RowBlock
from meshinfer.server.devices import DevicePass, device_pass, staging_device
from meshinfer.server.sources import RowSource
from meshinfer.server.static import StaticBatch

SECONDS = 20.0
META, CUDA = torch.device("meta"), torch.device("cuda")
VERSION = ("policy_version",)
DTYPES = [
    torch.bool,
    torch.uint8,
    torch.uint16,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.complex64,
    torch.float8_e5m2,
]


def on_device(made: Transport, capacity: int = 8, static: int | None = None) -> RowSource:
    pad = None if static is None else StaticBatch(static)
    return RowSource(made, capacity, pad, CPU)


ALL_WAYS = pytest.mark.parametrize(
    "away",
    [[False] * 4, [True] * 4, [True, False, False, True], [False], [True]],
    ids=["host", "device", "mixed", "one of the host", "one of the device"],
)
EACH = pytest.mark.parametrize("each", [0, 2])
WIDTH = pytest.mark.parametrize("width", [3, 5000], ids=["small", "large"])


# --- Rows of the host and of a device, in one batch ----------------------------------------------


def landed(made: Transport) -> RowSource:
    """For a policy on the CPU, with clients that have rows on a device."""
    made.row_device = CPU
    return RowSource(made, 8)


@pytest.mark.parametrize("make", [on_device, landed], ids=["policy there", "policy here"])
@ALL_WAYS
@EACH
@WIDTH
def test_each_request_gets_its_own_rows(make: Any, away: Any, each: int, width: int) -> None:
    made = transport(each, width)
    source = make(made)
    for shift in (0, 10):  # staging is used again
        requests = [
            Request(made, x_of(shift + index, each, width), there)
            for index, there in enumerate(away)
        ]
        seen = served(source, requests, version=7)
        assert seen.batch_size == (len(away) * (each or 1),)
        assert seen["x"][:: each or 1, 0].tolist() == [shift + index for index in range(len(away))]
        for index, request in enumerate(requests):
            ((reply, version),) = request.replies
            assert version == 7
            assert (reply == y_of(2 * (shift + index), each, width)).all()
            assert request.released


def test_the_staging_follows_the_policy_and_the_rows() -> None:
    made = transport()
    assert type(made.request_batch(2)) is type(made.response_batch(2)) is RowBlock
    assert type(made.request_batch(2, CPU)) is DeviceRequests
    assert type(made.response_batch(2, CPU)) is DeviceReplies
    made.row_device = META
    assert type(made.request_batch(2)) is LandedRequests
    assert type(made.response_batch(2)) is DeviceReplies
    assert type(made.request_batch(2, CPU)) is DeviceRequests


@ALL_WAYS
def test_the_batch_says_where_it_is(away: Any) -> None:
    made = transport()
    source = on_device(made)
    batch = source.gather([Request(made, x_of(1), there) for there in away])
    assert batch.device == CPU


def test_one_row_on_the_device_is_read_where_it_lies() -> None:
    made = transport()
    request = Request(made, x_of(1), away=True)
    batch = on_device(made).gather([request])
    assert batch["x"].data_ptr() == request.frame.row.tensor.data_ptr()
    assert not request.released


def test_rows_are_released_when_they_have_been_gathered() -> None:
    made = transport()
    requests = [Request(made, x_of(index), away=bool(index % 2)) for index in range(4)]
    batch = on_device(made).gather(requests)
    assert [request.released for request in requests] == [1] * 4
    for request in requests:
        request.frame.row.tensor.zero_()
    assert batch["x"][:, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@EACH
def test_every_dtype_and_shape_crosses(away: bool, dtype: torch.dtype, each: int) -> None:
    lead = (each,) if each else ()

    def payload(seed: int) -> TensorDict:
        generator = torch.Generator().manual_seed(seed)

        def of(*shape: int) -> torch.Tensor:
            size = (*lead, *shape)
            return torch.randint(0, 2, size, generator=generator).to(dtype)

        leaves = {"scalar": of(), "empty": of(0), "a": {"matrix": of(2, 3)}}
        return TensorDict(leaves, lead)

    made = Transport(payload(0), payload(0))
    requests = [Request(made, payload(seed), away) for seed in range(3)]
    source = on_device(made)
    source.scatter(requests, source.gather(requests), None)
    for seed, request in enumerate(requests):
        for key, leaf in payload(seed).items(True, True):
            found = request.answer[key]
            assert found.dtype == dtype
            assert torch.equal(found.to(torch.complex128), leaf.to(torch.complex128))


@pytest.mark.parametrize("make", [on_device, landed])
@EACH
@pytest.mark.parametrize("away", [[False] * 3, [True, False, True], [False, False, True]])
def test_a_row_that_was_written_over_spoils_no_neighbour(make: Any, each: int, away: Any) -> None:
    made = transport(each)
    source = make(made)
    requests = [Request(made, x_of(index, each), there) for index, there in enumerate(away)]
    requests[1].given_up = True
    seen = served(source, requests)
    assert seen["x"][:: each or 1, 0].tolist() == [0, 0, 2]
    assert [len(request.replies) for request in requests] == [1, 0, 1]
    assert (requests[2].answer["y"] == 4).all()


@EACH
def test_a_row_that_was_written_over_spoils_no_neighbour_on_the_host(each: int) -> None:
    made = transport(each)
    requests = [Request(made, x_of(index, each)) for index in range(3)]
    requests[0].given_up = True
    seen = served(RowSource(made, 4), requests)
    assert seen["x"][:: each or 1, 0].tolist() == [1, 1, 2]
    assert [len(request.replies) for request in requests] == [0, 1, 1]


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("number", [1, 3])
def test_when_all_have_given_up_nobody_is_answered(away: bool, number: int) -> None:
    made = transport()
    requests = [Request(made, x_of(index), away) for index in range(number)]
    for request in requests:
        request.given_up = True
    served(on_device(made), requests)
    assert all(request.released and not request.replies for request in requests)


def test_who_gives_up_while_the_results_come_back_is_not_answered(monkeypatch: Any) -> None:
    made = transport()
    source = on_device(made)
    requests = [Request(made, x_of(index)) for index in range(3)]
    batch = source.gather(requests)

    class GivesUp(meshinfer.streams.Passed):
        def wait(self) -> None:
            requests[1].given_up = True

    monkeypatch.setattr(meshinfer.device_rows, "mark", lambda _: GivesUp())
    source.scatter(requests, double(batch), None)
    assert [len(request.replies) for request in requests] == [1, 0, 1]


# --- Results -------------------------------------------------------------------------------------


@ALL_WAYS
@EACH
def test_a_declared_version_is_that_which_computed(away: Any, each: int) -> None:
    lead = [each] if each else []
    response = y_of(0, each).set("policy_version", torch.zeros(lead, dtype=torch.int64))
    made = Transport(x_of(0, each), response, version_key=VERSION)
    source = on_device(made)
    for version in (3, 4):
        requests = [Request(made, x_of(1, each), there) for there in away]
        served(source, requests, version)
        for request in requests:
            assert (request.answer["policy_version"] == version).all()
            assert request.replies[0][1] == version


@ALL_WAYS
@pytest.mark.parametrize(
    ("spoil", "error"),
    [
        (lambda td: td.exclude("y"), KeyError),
        (lambda td: td.set("y", td["y"].double()), TypeError),
        (lambda td: td.set("y", td["y"][:, :2]), ValueError),
        (lambda td: td["y"], TypeError),
    ],
    ids=["missing", "dtype", "shape", "no TensorDict"],
)
def test_results_that_do_not_fit_are_sent_to_nobody(away: Any, spoil: Any, error: Any) -> None:
    made = transport()
    source = on_device(made)
    requests = [Request(made, x_of(index), there) for index, there in enumerate(away)]
    batch = source.gather(requests)
    with pytest.raises(error, match="response"):
        source.scatter(requests, spoil(double(batch)), None)
    assert not any(request.replies for request in requests)
    source.scatter(requests, double(batch), None)
    assert [request.answer["y"][0].item() for request in requests] == [0.0, 2.0, 4.0, 6.0][
        : len(away)
    ]


def test_results_may_need_gradients_and_come_from_inference_mode() -> None:
    made = transport()
    source = on_device(made)
    for away in (False, True):
        requests = [Request(made, x_of(1), away) for _ in range(2)]
        batch = source.gather(requests)
        with torch.inference_mode():
            source.scatter(requests, double(batch), None)
        grown = TensorDict({"y": (2 * batch["x"]).requires_grad_()}, [2])
        source.scatter(requests, grown, None)
        for request in requests:
            assert [reply["y"].tolist() for reply, _ in request.replies] == [[2.0] * 3] * 2
            assert not request.replies[1][0]["y"].requires_grad


def test_staging_that_was_made_in_inference_mode_serves_outside() -> None:
    made = transport()
    with torch.inference_mode():
        source = on_device(made, static=4)
        served(source, [Request(made, x_of(1)) for _ in range(2)])
    requests = [Request(made, x_of(index)) for index in range(3)]
    served(source, requests)
    assert [request.answer["y"][0].item() for request in requests] == [0.0, 2.0, 4.0]


@pytest.mark.parametrize("static", [None, 6])
def test_what_a_policy_does_to_its_batch_is_undone(static: int | None) -> None:
    made = transport()
    source = on_device(made, static=static)
    for away in (False, True, False):
        requests = [Request(made, x_of(index), away) for index in range(3)]
        batch = source.gather(requests)
        results = double(batch)
        batch["x"].mul_(100.0)
        batch["x"].unsqueeze_(0)
        batch["x"].requires_grad_()
        batch["more"] = torch.zeros(batch.batch_size)
        source.scatter(requests, results, None)
        assert [request.answer["y"][0].item() for request in requests] == [0.0, 2.0, 4.0]


@ALL_WAYS
@EACH
def test_a_static_batch_stays_where_it_is(away: Any, each: int) -> None:
    made = transport(each)
    source = on_device(made, static=6)
    places = set()
    for there in (away, [False], [True] * 6, away[:2]):
        requests = [Request(made, x_of(index, each), far) for index, far in enumerate(there)]
        batch = source.gather(requests)
        places.add((batch["x"].data_ptr(), batch["x"].stride(), batch["x"].shape, batch.device))
        values = batch["x"][:: each or 1, 0].tolist()
        last = len(there) - 1
        assert values == [*range(len(there)), *[last] * (6 - len(there))]
        source.scatter(requests, double(batch), None)
        for index, request in enumerate(requests):
            assert (request.answer["y"] == 2 * index).all()
    assert len(places) == 1


@ALL_WAYS
def test_results_are_sent_without_staging_too(away: Any) -> None:
    made = transport()
    made.row_device = CPU
    requests = [Request(made, x_of(index), there) for index, there in enumerate(away)]
    made.resolve_batch(requests, TensorDict({"y": torch.ones(len(away), 3)}, [len(away)]))
    assert all((request.answer["y"] == 1).all() for request in requests)


def test_staging_that_does_not_fit_says_what_to_do() -> None:
    made = transport()
    with pytest.raises(ValueError, match=r"4611686018427387904 request rows.*lower max_batch_size"):
        made.request_batch(1 << 62, CPU)


# --- When copies take time -----------------------------------------------------------------------


class Marks:
    """Stands in for :func:`meshinfer.streams.mark`: nothing is done before it has been waited for."""

    def __init__(self) -> None:
        self.made: list[Mark] = []
        self.on_wait: Callable[[], None] = lambda: None

    def __call__(self, _: torch.device) -> Mark:
        self.made.append(Mark(self))
        return self.made[-1]


class Mark:
    def __init__(self, marks: Marks) -> None:
        self._marks = marks
        self.waited = False

    def wait(self) -> None:
        self._marks.on_wait()
        self.waited = True

    def passed(self) -> bool:
        return self.waited

    def hold_up(self, _: object) -> None:
        raise AssertionError("the serving thread has one stream")


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> Marks:
    made = Marks()
    monkeypatch.setattr(meshinfer.device_rows, "mark", made)
    return made


class Copies(TorchDispatchMode):
    """Puts off what is copied while Python goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and len(args) > 2 and args[2]:
            self.under_way.append((args[0], args[1], args[1].clone()))
            return args[0]
        return func(*args, **(kwargs or {}))

    def finish(self) -> None:
        """As if they were done only now. What they read must have stayed as it was."""
        for target, source, then in self.under_way:
            assert torch.equal(source, then), "it was written while it was being copied"
            target.copy_(then)
        self.under_way.clear()


def test_results_are_read_when_they_have_come_back(marks: Marks) -> None:
    made = transport()
    source = on_device(made)
    requests = [Request(made, x_of(index), away=index == 1) for index in range(3)]
    batch = source.gather(requests)
    gathered, copies = len(marks.made), Copies()

    def come_back() -> None:
        assert not any(request.replies for request in requests), "an error could not be told now"
        copies.finish()

    marks.on_wait = come_back
    with copies:
        source.scatter(requests, double(batch), None)
    assert len(marks.made) == gathered + 1, "one mark for all that comes back"
    assert [request.answer["y"][0].item() for request in requests] == [0.0, 2.0, 4.0]


def test_replies_on_the_device_are_waited_for_by_nobody(marks: Marks) -> None:
    made = transport()
    source = on_device(made)
    for _ in range(3):
        served(source, [Request(made, x_of(index), away=True) for index in range(3)])
    assert not any(mark.waited for mark in marks.made)


def test_a_pass_waits_once(marks: Marks) -> None:
    """What has been copied to the device by the end of a pass needs no wait in the next one."""
    made = transport()
    source = on_device(made)
    for number in range(1, 4):
        served(source, [Request(made, x_of(index)) for index in range(3)])
        for mark in marks.made:  # those before the one that was waited for have passed with it
            mark.waited = True
        waits: list[int] = []
        marks.on_wait = lambda: waits.append(1)  # noqa: B023
        served(source, [Request(made, x_of(index)) for index in range(3)])
        assert len(waits) == 1, number


@pytest.mark.parametrize("mixed", [False, True])
def test_rows_stay_while_they_are_copied_though_the_policy_raised(
    marks: Marks, mixed: bool
) -> None:
    made = transport()
    source, copies = on_device(made), Copies()
    with copies:
        source.gather([Request(made, x_of(1), away=mixed and index == 1) for index in range(3)])
    assert copies.under_way
    (upload,) = marks.made
    marks.on_wait = copies.finish
    batch = source.gather([Request(made, x_of(index)) for index in range(3)])
    assert upload.waited
    assert batch["x"][:, 0].tolist() == [0, 1, 2]


def test_results_stay_while_they_are_copied_to_the_clients(marks: Marks) -> None:
    """A policy on the CPU, whose clients have their rows on a device."""
    made = transport()
    made.row_device = META
    source, copies = RowSource(made, 8), Copies()
    requests = [
        Request(made, x_of(1), away=index == 1, device=(CPU, META)[index]) for index in (0, 1)
    ]
    with copies:
        source.scatter(requests, TensorDict({"y": torch.ones(2, 3)}, [2]), None)
    assert (requests[0].answer["y"] == 1).all()
    assert requests[1].answer["y"].device == META
    assert len(copies.under_way) == 1
    upload = marks.made[-1]
    assert not upload.waited
    marks.on_wait = copies.finish
    served(source, [Request(made, x_of(5)) for _ in range(2)])
    assert upload.waited


def test_what_the_clients_have_is_waited_for_by_a_policy_on_the_cpu(marks: Marks) -> None:
    made = transport()
    source, copies = landed(made), Copies()
    marks.on_wait = copies.finish
    with copies:
        batch = source.gather([Request(made, x_of(index), away=True) for index in range(3)])
    assert batch["x"][:, 0].tolist() == [0, 1, 2]


# --- How much is copied --------------------------------------------------------------------------


class Transfers(TorchDispatchMode):
    """Counts copies between the CPU and the meta device, and leaves out those that it cannot do."""

    def __init__(self) -> None:
        super().__init__()
        self.up = self.down = self.others = 0

    def __torch_dispatch__(self, func: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        places = {tensor.device for tensor in tensors} | {kwargs.get("device")} - {None}
        if not tensors or len(places) == 1:
            return func(*args, **kwargs)
        if func is not torch.ops.aten.copy_.default:
            self.others += 1
            return func(*args, **kwargs)
        target, source = args[:2]
        assert args[2], "the host waits for this copy"
        assert target.is_contiguous()
        assert source.is_contiguous()
        self.up += target.device == META
        self.down += target.device == CPU
        return target

    @property
    def counts(self) -> tuple[int, int, int]:
        return self.up, self.down, self.others


def eight_leaves() -> TensorDict:
    leaves = {f"{index}": torch.zeros(index + 1) for index in range(7)}
    return TensorDict({**leaves, "policy_version": torch.zeros((), dtype=torch.int64)})


@pytest.mark.parametrize("static", [None, 64])
@pytest.mark.parametrize("number", [1, 40, 64])
@pytest.mark.parametrize("big", [False, True])
def test_one_copy_to_the_device_and_one_back(static: int | None, number: int, big: bool) -> None:
    example = eight_leaves()
    if big:
        example["0"] = torch.zeros(9000)
    made = Transport(example, example, version_key=VERSION)
    source = RowSource(made, 64, None if static is None else StaticBatch(static), META)
    for _ in range(2):
        requests = [Request(made, example) for _ in range(number)]
        with Transfers() as gathering:
            batch = source.gather(requests)
            batch = TensorDict(dict(batch.items()), batch.batch_size)  # it says not where it is
        assert {leaf.device for leaf in batch.values()} == {META}
        with Transfers() as scattering:
            source.scatter(requests, batch, 3)
        assert gathering.counts == (1, 0, 0)
        assert scattering.counts == (0, 1, 0)
        assert all(len(request.replies) == 1 for request in requests)


def test_results_on_the_cpu_need_no_copy_to_the_device() -> None:
    made = transport()
    source = RowSource(made, 8, None, META)
    requests = [Request(made, x_of(index)) for index in range(4)]
    with Transfers() as gathering:
        source.gather(requests)
    with Transfers() as scattering:
        source.scatter(requests, double(TensorDict({"x": torch.ones(4, 3)}, [4])), None)
    assert (gathering.counts, scattering.counts) == ((1, 0, 0), (0, 0, 0))
    assert all((request.answer["y"] == 2).all() for request in requests)


def test_rows_of_another_device_come_over() -> None:
    """Each by itself, between devices; there is one to each client."""
    made = transport()
    source = RowSource(made, 8, None, META)
    requests = [Request(made, x_of(index), away=bool(index % 2)) for index in range(4)]
    with Transfers() as gathering:
        batch = source.gather(requests)
    assert batch["x"].shape == (4, 3)
    assert batch["x"].device == META
    assert gathering.counts == (1, 0, 2)


@pytest.mark.parametrize("mixed", [False, True])
def test_a_policy_on_the_cpu_gets_the_rows_of_a_device_in_one_copy(mixed: bool) -> None:
    made = transport()
    made.row_device = META
    source = RowSource(made, 8)
    requests = [Request(made, x_of(1)) for _ in range(3 if mixed else 0)]
    requests += [Request(made, x_of(1), away=True, device=META) for _ in range(4)]
    with Transfers() as gathering:
        batch = source.gather(requests)
    assert batch["x"].device == CPU
    with Transfers() as scattering:
        source.scatter(requests, double(batch), None)
    assert gathering.counts == (int(mixed), 1, 0)
    assert scattering.counts == (1, 0, 0)
    assert all(len(request.replies) == 1 for request in requests)


# --- Who brings rows to the device ---------------------------------------------------------------


class Foreign:
    """A transport with rows that knows no devices."""

    def __init__(self, made: Transport) -> None:
        self._made = made

    def __getattr__(self, name: str) -> Any:
        if name in ("stages_devices", "row_device"):
            raise AttributeError(name)
        return getattr(self._made, name)

    def request_batch(self, capacity: int) -> Any:
        return self._made.request_batch(capacity)

    def response_batch(self, capacity: int) -> Any:
        return self._made.response_batch(capacity)


def of_memory() -> SharedMemoryTransport:
    return SharedMemoryTransport(x_of(0), y_of(0), num_slots=2)


def test_who_moves_a_batch() -> None:
    with of_memory() as made:
        assert staging_device(made, None, CUDA) == CUDA
        assert device_pass(made, CUDA, None) is None
        for device in (None, CPU, META):
            assert staging_device(made, None, device) is None
        assert staging_device(made, list, CUDA) is None
        assert isinstance(device_pass(made, CUDA, None, list), DevicePass)
        foreign: Any = Foreign(made)  # type: ignore[arg-type]
        assert staging_device(foreign, None, CUDA) is None
        assert isinstance(device_pass(foreign, CUDA, None), DevicePass)
        assert device_pass(foreign, CPU, None) is device_pass(made, None, None) is None


def test_a_transport_that_knows_no_devices_serves_a_policy_on_the_cpu() -> None:
    made = transport()
    source = RowSource(Foreign(made), 4, StaticBatch(4))  # type: ignore[arg-type]
    requests = [Request(made, x_of(index)) for index in range(3)]
    served(source, requests)
    assert [request.answer["y"][0].item() for request in requests] == [0.0, 2.0, 4.0]


def test_replies_go_where_the_clients_rows_are() -> None:
    made: Any = SimpleNamespace(row_device=META)
    with pytest.raises(ValueError, match=r"output_device.*where each client has its rows"):
        device_pass(made, CPU, META)
    assert device_pass(made, CPU, CPU) is None
    assert isinstance(device_pass(made, None, None, list), DevicePass)


# --- With servers and clients --------------------------------------------------------------------


def staged(kind: type, **options: Any) -> Any:
    """The transport, as with a policy on a device."""

    class Staged(kind):  # type: ignore[misc]
        def request_batch(self, capacity: int) -> Any:
            return super().request_batch(capacity, CPU)

        def response_batch(self, capacity: int) -> Any:
            return super().response_batch(capacity, CPU)

    return Staged(x_of(0), y_of(0), **options)


TRANSPORTS: dict[str, Callable[[], Any]] = {
    "distributed": lambda: staged(DistributedTransport),
    "shared_memory": lambda: staged(SharedMemoryTransport, num_slots=8),
    "process_slot": lambda: staged(ProcessSlotTransport, num_slots=4),
}


@pytest.fixture(params=list(TRANSPORTS))
def made(request: pytest.FixtureRequest) -> Iterator[Any]:
    with TRANSPORTS[request.param]() as made:
        yield made


@pytest.mark.parametrize("static", [None, 4])
def test_clients_get_their_own_replies(made: Any, static: int | None) -> None:
    sizes: set[int] = set()

    def policy(batch: TensorDictBase) -> TensorDict:
        assert batch.device == CPU
        sizes.add(batch.batch_size[0])
        if (batch["x"] == 13).any():
            raise ArithmeticError("thirteen")
        return double(batch)

    with InferenceServer(policy, made, static_batch_size=static, max_batch_size=4) as server:
        clients = server.clients(4)
        for turn in range(20):
            futures = [
                client.submit(x_of(100 * turn + index)) for index, client in enumerate(clients)
            ]
            for index, future in enumerate(futures):
                assert (future.result(SECONDS)["y"] == 200 * turn + 2 * index).all()
        with pytest.raises(ArithmeticError, match="thirteen"):
            clients[0](x_of(13), timeout=SECONDS)
        assert (clients[1](x_of(14), timeout=SECONDS)["y"] == 28).all()
        assert wait_until(lambda: server.stats().requests == 82, SECONDS)
        for client in clients:
            client.close()
    assert sizes == {4} if static else sizes <= {1, 2, 3, 4}
