"""What waits on the GPUs while rows travel over NCCL: nothing while all idle, and never in a circle.

NCCL's sends and receives are kernels: one waits on its GPU, in front of whatever shares its stream or its hardware
queue, until the other side has begun its half. The stand-in for NCCL tells what was begun, in which order.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import nccl_stand_in
import pytest
import torch
from announced_audit import AuditedChannel, Ledger, begin_audit, ledger_of
from announced_mischief import Mischief, released
from announced_roles import Doubler, ask, check, reply, request
from nccl_stand_in import StandIn, Work
from support import wait_until

from meshinfer import DistributedClient, DistributedTransport, InferenceServer
from meshinfer.inference.distributed.announced import AnnouncedRows
from meshinfer.inference.distributed.nccl import NcclRows
from meshinfer.inference.distributed.pair import CLIENT, SERVER

SECONDS = 30.0
WINDOW = 2
CLIENTS = 4
LATE = Mischief(delay=0.005, share=0.3)


@dataclass(frozen=True)
class Launch:
    """One half of a message."""

    channel: int
    """Requests of the first client that came, its replies, requests of the second..."""
    number: int
    """In its channel; the first one connects the GPUs."""
    rank: int
    call: str
    work: Work

    @property
    def message(self) -> tuple[int, int]:
        return self.channel, self.number

    @property
    def client(self) -> int:
        return self.channel // 2


class Log:
    """What was begun, in the order of the calls of each side."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self.most_under_way: dict[tuple[int, int], int] = defaultdict(int)
        """By channel and rank: messages that were begun there and had not arrived."""
        self.before: Callable[[int, str, int], None] = lambda rank, call, number: None
        """Called before a message is begun."""
        self._lock = threading.Lock()

    def begin(self, group: StandIn, call: str, launch: Callable[[], Work]) -> Work:
        channel = nccl_stand_in.machine.groups.index(group) // 2
        number = sum(each.call == call for each in self._of(channel, group.rank))
        self.before(group.rank, call, number)
        with self._lock:
            work = launch()
            self.launches.append(Launch(channel, number, group.rank, call, work))
            receiver = 1 - group.rank if call == "send" else group.rank
            arrived = sum(each.work.over.is_set() for each in self._of(channel, receiver))
            most = self.most_under_way[channel, group.rank]
            self.most_under_way[channel, group.rank] = max(most, number + 1 - arrived)
        return work

    def _of(self, channel: int, rank: int) -> list[Launch]:
        return [
            each for each in list(self.launches) if (each.channel, each.rank) == (channel, rank)
        ]

    def under_way(self) -> list[Launch]:
        """Kernels that run, or wait, now."""
        return [each for each in list(self.launches) if not each.work.over.is_set()]

    def waits_in_a_circle(self, queue_of: Callable[[Launch], Hashable]) -> bool:
        """Whether some messages each wait for the next if halves in one queue of one side run one after the other."""
        behind: TopologicalSorter[tuple[int, int]] = TopologicalSorter()
        last: dict[Hashable, tuple[int, int]] = {}
        for each in self.launches:
            queue = queue_of(each)
            if queue in last:
                behind.add(each.message, last[queue])
            last[queue] = each.message
        try:
            behind.prepare()
        except CycleError:
            return True
        return False


class AuditedNccl(NcclRows):
    """NCCL rows whose channels check that nothing is begun before its header."""

    def __init__(self, device: int, ledger: Ledger | None = None) -> None:
        super().__init__(device)
        self.ledger = ledger

    def channel(self, *arguments: Any, **options: Any) -> Any:
        assert self.ledger is not None
        inner = super().channel(*arguments, **options)
        return AuditedChannel(inner, self.ledger, LATE, Random(id(self.ledger)))


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    """The stand-in is in place, and audited."""
    log = Log()

    class Logged(StandIn):
        def _call(self, call: str, *arguments: Any) -> Work:
            return log.begin(self, call, lambda: super(Logged, self)._call(call, *arguments))

    report, bound = tmp_path / "breaches", AnnouncedRows.__init__

    def init(plane: AnnouncedRows, backend: Any, pair: Any, *more: Any) -> None:
        bound(plane, AuditedNccl(backend.device.index or 0, ledger_of(pair)), pair, *more)

    with (
        nccl_stand_in.in_place(),
        mock.patch.object(torch.distributed, "ProcessGroupNCCL", Logged, create=True),
        begin_audit(str(report)),
        mock.patch.object(AnnouncedRows, "__init__", init),
    ):
        here = nccl_stand_in.machine
        yield log
        released.set()
        here.groups.clear()
    assert here.mistakes == []
    assert not report.exists(), report.read_text()


def transport(device: int, **options: Any) -> DistributedTransport:
    given = {"backend": "nccl", "device": device, "secret": "of the tests", "timeout": SECONDS}
    return DistributedTransport(request(0), reply(), **given | options)


@pytest.fixture
def served(log: Log) -> Iterator[InferenceServer]:
    with InferenceServer(Doubler(0.002), transport(0)) as server:
        yield server


def client_of(server: InferenceServer, **options: Any) -> DistributedClient:
    """One that is connected."""
    assert isinstance(server.transport, DistributedTransport)
    assert server.transport.address is not None
    port = server.transport.address.port
    client = transport(1, role="client", port=port, **options).client()
    ask(client, 1, SECONDS)
    return client


def query(client: DistributedClient, requests: int, window: int) -> None:
    """With so many in flight."""
    futures: list[Any] = []
    for value in range(requests):
        futures.append((value, client.submit(request(value))))
        if len(futures) == window:
            value, future = futures.pop(0)
            check(future.result(SECONDS), value)
    for value, future in futures:
        check(future.result(SECONDS), value)


def query_all(clients: list[DistributedClient], requests: int, window: int) -> None:
    with ThreadPoolExecutor(len(clients)) as pool:
        list(pool.map(lambda client: query(client, requests, window), clients))


# --- What waits ----------------------------------------------------------------------------------


def test_nothing_waits_on_a_gpu_while_clients_idle(log: Log, served: InferenceServer) -> None:
    """After each of many rounds: connected, asked, idle."""
    clients = [client_of(served) for _ in range(CLIENTS)]
    for _ in range(10):
        query_all(clients, 3, WINDOW)
        assert wait_until(lambda: not log.under_way(), SECONDS), log.under_way()
    halves = 2 * (
        1 + 1 + 10 * 3
    )  # of the row that connects the GPUs, of the first request, and of the others
    assert wait_until(lambda: len(log.launches) > 2 * CLIENTS * halves, 0.1) is False
    assert len(log.launches) == 2 * CLIENTS * halves
    for client in clients:
        client.close()


def test_nothing_waits_on_a_gpu_while_the_policy_computes(log: Log) -> None:
    computing, go_on = threading.Event(), threading.Event()
    go_on.set()

    def policy(batch: Any) -> Any:
        computing.set()
        assert go_on.wait(SECONDS)
        return Doubler()(batch)

    with InferenceServer(policy, transport(0)) as server, client_of(server) as client:
        computing.clear()
        go_on.clear()
        future = client.submit(request(3))
        assert computing.wait(SECONDS)
        assert wait_until(lambda: not log.under_way(), SECONDS), log.under_way()
        go_on.set()
        check(future.result(SECONDS), 3)


def test_nothing_waits_on_a_gpu_for_a_client_that_has_left(
    log: Log, served: InferenceServer
) -> None:
    """Nor while another one comes."""
    for _ in range(3):
        with client_of(served) as client:
            query(client, 5, WINDOW)
        assert wait_until(lambda: served.stats().clients == 0, SECONDS)
        assert wait_until(lambda: not log.under_way(), SECONDS), log.under_way()


def test_at_most_one_receive_of_each_client_waits_and_as_many_sends_as_its_window(
    log: Log, served: InferenceServer
) -> None:
    """Rows that a client has not asked for would fill the GPU, and its queues, with kernels that wait."""
    clients = [client_of(served) for _ in range(CLIENTS)]
    query_all(clients, 60, 2 * WINDOW)  # the others wait in their process
    for client in clients:
        client.close()
    sends = {(launch.channel, launch.rank) for launch in log.launches if launch.call == "send"}
    for place, most in log.most_under_way.items():
        assert most <= (WINDOW if place in sends else 1), (place, most)
    assert len(log.most_under_way) == 2 * 2 * CLIENTS


# --- In which order ------------------------------------------------------------------------------


def side(launch: Launch) -> Hashable:
    """Each server and each client is a process with a GPU."""
    return launch.rank, launch.rank * launch.client


def one_queue(launch: Launch) -> Hashable:
    """As with ``CUDA_DEVICE_MAX_CONNECTIONS=1``: all of a process are in one."""
    return side(launch)


def one_queue_at_the_server(launch: Launch) -> Hashable:
    """A process with one client has a queue for each direction; the server may have too few for all of its clients."""
    return (side(launch), launch.call) if launch.rank == CLIENT else SERVER


@pytest.mark.parametrize("window", [1, 2])
def test_clients_of_processes_of_their_own_never_wait_in_a_circle(
    log: Log, served: InferenceServer, window: int
) -> None:
    """However few queues the server has."""
    clients = [client_of(served, window=window) for _ in range(CLIENTS)]
    query_all(clients, 60, 2 * WINDOW)
    for client in clients:
        client.close()
    assert not log.waits_in_a_circle(one_queue_at_the_server)
    halves = {(launch.rank, launch.message) for launch in log.launches}
    assert len(halves) == len(log.launches) == 2 * (2 * CLIENTS + 61 * 2 * CLIENTS)


def test_with_one_request_on_the_wire_one_queue_is_enough(
    log: Log, served: InferenceServer
) -> None:
    clients = [client_of(served, window=1) for _ in range(CLIENTS)]
    query_all(clients, 60, 2 * WINDOW)
    for client in clients:
        client.close()
    assert not log.waits_in_a_circle(one_queue)


def test_with_two_requests_on_the_wire_and_one_queue_rows_wait_for_each_other(
    log: Log, served: InferenceServer
) -> None:
    """Which is why too few queues are refused. A reply and a request cross: each is begun first at its sender."""
    begun = {SERVER: threading.Event(), CLIENT: threading.Event()}
    first = 2  # the first message of a channel connects the GPUs, the second is the first request

    def before(rank: int, call: str, number: int) -> None:
        crossing = first if (rank == SERVER) == (call == "send") else first + 1
        if number != crossing:
            return
        if call == "send":
            begun[rank].set()
        else:
            assert begun[rank].wait(SECONDS)

    client = client_of(served)
    log.before = before
    futures = [client.submit(request(value)) for value in range(WINDOW)]
    for value, future in enumerate(futures):
        check(future.result(SECONDS), value)
    client.close()
    assert log.waits_in_a_circle(one_queue)
    assert not log.waits_in_a_circle(one_queue_at_the_server)
