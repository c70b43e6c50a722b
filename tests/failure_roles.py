"""Servers, and processes that play a client or a server, for the tests of failure behaviour."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from types import SimpleNamespace
from typing import Any

import psutil
import torch
from support import PRELOADED, wait_until
from tensordict import TensorDict, TensorDictBase

from meshinfer import (
    DistributedClient,
    DistributedTransport,
    InferenceServer,
    InferenceServerConfig,
)

SECRET = "a secret of the tests"
SECONDS = 60.0
"""For what must happen, but whose speed no test asserts."""

HELD = -1
"""A request that the policy computes until the test lets it go."""
SPOILED = -2
"""A request for which the policy raises."""
WHO = 1_000_000
"""``who * WHO + n`` is the n-th request of client ``who``."""

# torch asks for the name of every address that it connects to, and a name server that loses the question
# would stall it for five seconds; the tests measure failures of other kinds.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

# Its children are forked, in milliseconds, from a process that has imported these and done nothing else.
processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(PRELOADED)


def request(value: int, width: int = 1) -> TensorDict:
    """``x``: int64[width], all of it ``value``."""
    return TensorDict({"x": torch.full((width,), value, dtype=torch.int64)}, [])


def reply(width: int = 1) -> TensorDict:
    """``y``: int64[width]."""
    return TensorDict({"y": torch.zeros(width, dtype=torch.int64)}, [])


def ask(client: DistributedClient, value: int, timeout: float | None = None) -> None:
    """One request; its reply must be its own."""
    check(client(request(value), timeout), value)


def check(answer: TensorDictBase, value: int) -> None:
    assert answer["y"][0].item() == 2 * value


class Doubler:
    """A policy, ``y = 2 x``, that tells whom it has served, and waits or raises when a request says so."""

    def __init__(self) -> None:
        self.served: Counter[int] = Counter()
        self.computing = threading.Event()
        self.go_on = threading.Event()
        self.to_raise: Callable[[], BaseException] = lambda: ValueError("spoiled")

    def __call__(self, batch: TensorDictBase) -> TensorDict:
        x = batch["x"]
        values = x[:, 0].tolist()
        if HELD in values:
            self.computing.set()
            assert self.go_on.wait(SECONDS)
            self.go_on.clear()
        if SPOILED in values:
            raise self.to_raise()
        self.served.update(value // WHO for value in values)
        return TensorDict({"y": 2 * x}, batch.batch_size)

    def has_served(self, who: int, more: int = 5, timeout: float = SECONDS) -> bool:
        """Whether client ``who`` gets ``more`` replies from now on."""
        goal = self.served[who] + more
        return wait_until(lambda: self.served[who] >= goal, timeout)


@contextmanager
def serving(
    policy: Callable[..., Any],
    *,
    width: int = 1,
    timeout: float = 60.0,
    secret: str = SECRET,
    port: int = 0,
    expected_ranks: Sequence[int] = (),
    **config: Any,
) -> Iterator[InferenceServer]:
    """A server in this process."""
    transport = DistributedTransport(
        request(0, width),
        reply(width),
        timeout=timeout,
        secret=secret,
        port=port,
        expected_ranks=expected_ranks,
    )
    server = InferenceServer(policy, transport, server_config=InferenceServerConfig(**config))
    with server:
        yield server


def client_at(port: int, *, width: int = 1, **options: Any) -> DistributedClient:
    """A client of the server at ``port``, whoever runs it."""
    options = {"secret": SECRET, **options}
    transport = DistributedTransport(
        request(0, width), reply(width), role="client", port=port, **options
    )
    return transport.client()


def port_of(server: InferenceServer) -> int:
    assert isinstance(server.transport, DistributedTransport)
    assert server.transport.address is not None
    return server.transport.address.port


def store_keys(server: InferenceServer) -> list[str]:
    """The keys in the server's private store, the queue that it listens on aside."""
    assert isinstance(server.transport, DistributedTransport)
    assert server.transport._reception is not None
    return server.transport._reception.store_keys()


@dataclass(frozen=True)
class Held:
    """What this process holds of the system."""

    threads: int
    descriptors: int
    store_keys: int

    @classmethod
    def by(cls, server: InferenceServer) -> Held:
        gc.collect()
        me = psutil.Process()
        return cls(me.num_threads(), me.num_fds(), len(store_keys(server)))


@dataclass(frozen=True)
class Outcome:
    """What a function that ran in a :class:`Worker` returned or raised, and when (``time.monotonic``)."""

    value: Any
    error: BaseException | None
    began: float
    ended: float

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    def get(self) -> Any:
        if self.error is not None:
            raise self.error
        return self.value


class Worker:
    """A process, in a process group of its own, that runs one function after another.

    Each gets the worker's ``station`` first, where what it leaves is found by the next.
    """

    def __init__(self) -> None:
        self._pipe, theirs = processes.Pipe()
        self.process = processes.Process(target=_work, args=(theirs,))
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def begin(self, role: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._pipe.send((role, args, kwargs))

    def outcome(self, timeout: float = SECONDS) -> Outcome:
        """Of the function that was begun first among those whose outcome has not been fetched."""
        if not self._pipe.poll(timeout):
            raise AssertionError(f"no outcome within {timeout:g} s")
        outcome: Outcome = self._pipe.recv()
        return outcome

    def call(
        self, role: Callable[..., Any], *args: Any, within: float = SECONDS, **kwargs: Any
    ) -> Any:
        self.begin(role, *args, **kwargs)
        return self.outcome(within).get()

    def tell(self) -> None:
        """Ask a role that looks at :func:`told` to end."""
        self._pipe.send(None)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        assert wait([self.process.sentinel], SECONDS)

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)
        if number == signal.SIGSTOP:
            status = psutil.Process(self.pid).status
            assert wait_until(lambda: status() == psutil.STATUS_STOPPED, SECONDS)

    def close(self) -> None:
        """End it, whatever state it is in."""
        with contextlib.suppress(OSError):  # it has ended
            os.killpg(self.pid, signal.SIGKILL)
        self.process.kill()  # it may not have made its group yet
        self.process.join()
        self.process.close()
        self._pipe.close()


@contextmanager
def crew(size: int) -> Iterator[list[Worker]]:
    """``size`` workers; the test may add more to the list."""
    workers: list[Worker] = []
    try:
        for _ in range(size):
            workers.append(Worker())
        yield workers
    finally:
        for worker in workers:
            worker.close()


def _work(pipe: Connection) -> None:
    os.setpgid(0, 0)
    torch.set_num_threads(1)
    station = SimpleNamespace(pipe=pipe)
    while True:
        work = pipe.recv()
        if work is None:
            continue  # for a role that has ended by itself
        role, args, kwargs = work
        began = time.monotonic()
        value, error = None, None
        try:
            value = role(station, *args, **kwargs)
        except BaseException as raised:
            error = raised
        pipe.send(Outcome(value, error, began, time.monotonic()))


# Roles. The first argument is the worker's station.


def told(station: SimpleNamespace) -> bool:
    """Whether the test has told this worker to end its role."""
    if not station.pipe.poll():
        return False
    assert station.pipe.recv() is None
    return True


def connect(
    station: SimpleNamespace,
    port: int,
    *,
    who: int = 0,
    width: int = 1,
    first: int | None = 0,
    **options: Any,
) -> None:
    """Become a client, and with ``first`` make a first request."""
    station.who, station.width = who, width
    station.client = client_at(port, width=width, **options)
    if first is not None:
        query(station, who * WHO + first)


def query(station: SimpleNamespace, value: int, timeout: float | None = None) -> None:
    """One request, checked."""
    check(station.client(request(value, station.width), timeout), value)


def query_again_and_again(station: SimpleNamespace) -> tuple[int, float]:
    """Requests one after another until told; how many, and the longest that one took."""
    count, longest = 0, 0.0
    while not told(station):
        began = time.monotonic()
        query(station, station.who * WHO + count)
        longest = max(longest, time.monotonic() - began)
        count += 1
    return count, longest


def keep_in_flight(station: SimpleNamespace, requests: int) -> None:
    """At least ``requests - 1`` requests in flight at any moment, until told to end."""
    value = station.who * WHO
    futures = deque(station.client.submit(request(value)) for _ in range(requests))
    while not told(station):
        check(futures.popleft().result(SECONDS), value)
        futures.append(station.client.submit(request(value)))
    for future in futures:
        check(future.result(SECONDS), value)


def submit(station: SimpleNamespace, values: list[int]) -> None:
    """All of them are in flight, or wait for room, when this returns."""
    station.values = values
    station.futures = [station.client.submit(request(value, station.width)) for value in values]


def collect(station: SimpleNamespace, timeout: float | None = None) -> list[str]:
    """What became of them: the class of what each raised, or ``"reply"``."""
    found = []
    for future, value in zip(station.futures, station.values, strict=True):
        try:
            check(future.result(timeout), value)
            found.append("reply")
        except Exception as error:
            found.append(type(error).__name__)
    return found


def submit_and_collect(
    station: SimpleNamespace, values: list[int], timeout: float | None = None
) -> list[str]:
    """Both, one after the other."""
    submit(station, values)
    return collect(station, timeout)


def leave(station: SimpleNamespace) -> None:
    station.client.close()


def serve(station: SimpleNamespace, *, width: int = 1, **options: Any) -> int:
    """Become a server; the port."""
    station.policy = Doubler()
    station.context = serving(station.policy, width=width, **options)
    station.server = station.context.__enter__()
    return port_of(station.server)


def wait_until_computing(station: SimpleNamespace) -> bool:
    """At a server: whether it has begun with a held request."""
    computing: bool = station.policy.computing.wait(SECONDS)
    return computing


def go_on(station: SimpleNamespace) -> None:
    """At a server: let the held request go."""
    station.policy.go_on.set()


def shut_down(station: SimpleNamespace, timeout: float = 5.0) -> None:
    station.server.shutdown(timeout)
