"""Servers and clients whose rows are announced and audited: in this process, and roles for ``failure_roles.Worker``."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from announced_audit import AuditedRows, Ledger, begin_audit, ledgers
from announced_mischief import Mischief
from failure_roles import SECONDS, SECRET, WHO, Worker, port_of, told
from support import wait_until
from tensordict import TensorDict, TensorDictBase

from meshinfer import (
    DistributedClient,
    DistributedTransport,
    InferenceServer,
    InferenceServerConfig,
    PeerLostError,
)
from meshinfer.inference.distributed.announced import AnnouncedRows

RANK = 7
NEIGHBOUR = 1
WIDTH = 16
LARGE = 1 << 17
"""int64 values: a row that takes more than one read."""


def request(value: int, width: int = WIDTH) -> TensorDict:
    """``x``: int64[width], all of it ``value``; ``mark``, at the front of the row, is the audit's."""
    return TensorDict({"mark": torch.zeros(1, dtype=torch.int64), "x": torch.full((width,), value)})


def reply(width: int = WIDTH) -> TensorDict:
    return TensorDict({"mark": torch.zeros(1, dtype=torch.int64), "y": torch.full((width,), 0)})


def check(answer: TensorDictBase, value: int) -> None:
    assert (answer["y"] == 2 * value).all(), (value, answer["y"])


def ask(client: DistributedClient, value: int, timeout: float | None = None) -> None:
    check(client(request(value), timeout), value)


class Doubler:
    """``y = 2 x``, after a while now and then; counts whom it has served."""

    def __init__(self, longest: float = 0.0, seed: int = 0) -> None:
        self.served: Counter[int] = Counter()
        self._longest = longest
        self._random = Random(seed)

    def __call__(self, batch: TensorDictBase) -> TensorDict:
        if self._longest and self._random.random() < 0.1:
            time.sleep(self._random.random() * self._longest)
        self.served.update(value // WHO for value in batch["x"][:, 0].tolist())
        return TensorDict(
            {"mark": torch.zeros_like(batch["mark"]), "y": 2 * batch["x"]}, batch.batch_size
        )

    def has_served(self, who: int, more: int = 3, timeout: float = SECONDS) -> bool:
        """Whether client ``who`` gets ``more`` replies from now on."""
        goal = self.served[who] + more
        return wait_until(lambda: self.served[who] >= goal, timeout)


@contextmanager
def serving(
    policy: Any = None,
    mischief: Mischief | None = None,
    *,
    timeout: float = 20.0,
    width: int = WIDTH,
    rows: Any = None,
    config: dict[str, Any] | None = None,
    **options: Any,
) -> Iterator[InferenceServer]:
    """A server in this process."""
    transport = DistributedTransport(
        request(0, width),
        reply(width),
        backend=AuditedRows(mischief=mischief or Mischief()) if rows is None else rows,
        timeout=timeout,
        secret=SECRET,
        **options,
    )
    with InferenceServer(
        policy or Doubler(), transport, server_config=InferenceServerConfig(**(config or {}))
    ) as server:
        yield server


def client_at(
    port: int,
    mischief: Mischief | None = None,
    *,
    rows: Any = None,
    width: int = WIDTH,
    timeout: float = 20.0,
    **options: Any,
) -> DistributedClient:
    transport = DistributedTransport(
        request(0, width),
        reply(width),
        backend=AuditedRows(mischief=mischief or Mischief()) if rows is None else rows,
        role="client",
        port=port,
        secret=SECRET,
        timeout=timeout,
        **options,
    )
    return transport.client()


def await_stop(worker: Worker) -> None:
    """Until the worker's process has stopped itself."""
    status = psutil.Process(worker.pid).status
    assert wait_until(lambda: status() == psutil.STATUS_STOPPED, SECONDS), status()


def planes_of(server: InferenceServer, *ranks: int) -> list[Any]:
    """The server's side of the rows of the clients that have these ranks."""
    assert isinstance(server.transport, DistributedTransport)
    assert server.transport._reception is not None
    sessions = server.transport._reception.sessions
    return [each._plane for each in sessions if each.identity.rank in ranks]


def hasten(plane: Any, seconds: float) -> None:
    """Have it wait no longer than that for a row from now on. Who joins, and other clients, keep the time they had."""
    if isinstance(plane, AnnouncedRows):  # else it has ended
        plane._timeout = seconds


def begin_neighbour(worker: Worker, report: str, server: InferenceServer) -> None:
    """A client that asks all the time, and whose requests nothing may hold up."""
    worker.call(connect, report, port_of(server), NEIGHBOUR)
    worker.begin(query_until_told)


def end_neighbour(worker: Worker) -> None:
    worker.tell()
    assert worker.outcome().get() > 0
    worker.call(leave)


def stop_at(
    at: str, victim: Worker, report: str, server: InferenceServer, **options: Any
) -> Ledger:
    """A client that has stopped at its second request; what the server knows of its rows."""
    before = ledgers()
    mischief = Mischief(at=at, what="stop", skip=1)
    victim.call(connect, report, port_of(server), RANK, mischief, rank=RANK, **options)
    (ledger,) = [each for each in ledgers() if each not in before]
    victim.begin(query, 2)
    await_stop(victim)
    if at == "sending":
        assert wait_until(lambda: ledger.posted == ledger.arrived + 1, SECONDS), vars(ledger)
    return ledger


# Roles. The first argument is the worker's station.


def serve(
    station: SimpleNamespace, report: str, mischief: Mischief | None = None, **options: Any
) -> int:
    """Become a server; the port."""
    begin_audit(report)
    station.context = serving(None, mischief, **options)
    station.server = station.context.__enter__()
    return port_of(station.server)


def connect(
    station: SimpleNamespace,
    report: str,
    port: int,
    who: int,
    mischief: Mischief | None = None,
    **options: Any,
) -> None:
    """Become a client, and make a first request."""
    begin_audit(report)
    station.who = who
    station.client = client_at(port, mischief, **options)
    ask(station.client, who * WHO)


def query(station: SimpleNamespace, number: int, timeout: float | None = None) -> None:
    ask(station.client, station.who * WHO + number, timeout)


def query_until_told(station: SimpleNamespace) -> int:
    """One request after another; how many."""
    count = 0
    while not told(station):
        count += 1
        query(station, count % WHO)
    return count


def leave(station: SimpleNamespace) -> None:
    station.client.close()


@dataclass(frozen=True)
class Habits:
    """How a client in a storm behaves.

    Args:
        threads: that share it.
        in_flight: requests of each thread.
        impatient: share of requests that are given up early.
        lost: whether it may find itself given up, because it is stopped at times.
    """

    threads: int = 1
    in_flight: int = 1
    impatient: float = 0.0
    lost: bool = False


def storm(station: SimpleNamespace, seed: int, habits: Habits) -> Counter[str]:
    """Ask in all the ways that there are until told; what became of the requests."""
    over = threading.Event()
    found: Counter[str] = Counter()
    errors: list[BaseException] = []

    def work(index: int) -> None:
        random = Random(f"{seed}/{station.who}/{index}")
        try:
            while not over.is_set():
                found.update(_ask_several(station, habits, random, index))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(habits.threads)]
    for thread in threads:
        thread.start()
    while not told(station) and not errors:
        time.sleep(0.02)
    over.set()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return found


def _ask_several(
    station: SimpleNamespace, habits: Habits, random: Random, index: int
) -> Iterator[str]:
    """What became of a few requests that were in flight together."""
    values = [station.who * WHO + random.randrange(WHO) for _ in range(habits.in_flight)]
    try:
        futures = [(station.client.submit(request(value)), value) for value in values]
        for future, value in futures:
            if random.random() < habits.impatient:
                yield _give_up(future, value, random)
            else:
                check(future.result(), value)
                yield "reply"
    except (PeerLostError, TimeoutError) as error:
        if not habits.lost:
            raise
        yield type(error).__name__


def _give_up(future: Any, value: int, random: Random) -> str:
    with suppress(TimeoutError):
        check(future.result(random.random() * 0.005), value)
        return "in time"
    return "cancelled" if future.cancel() else "late"


def freeze(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def thaw(pid: int) -> None:
    os.kill(pid, signal.SIGCONT)
