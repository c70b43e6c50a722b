"""Load for a server of this process: client processes with as many requests in flight as a batch has, or twice that.

No client touches the GPU. Numbers come from the server's own statistics, over a window in which all clients ask.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import forkserver
from typing import TYPE_CHECKING, Any

from ..client import CONNECT, answer, client_main
from ..peers import START_METHOD, Session
from ..workload import Leaf, Workload

if TYPE_CHECKING:
    import torch

VECTORS = Workload("vectors", (Leaf("observation", (64,)),))
PIXELS = Workload("pixels", (Leaf("pixels", (4, 84, 84), "uint8"),))
TRANSPORTS = ("process_slot", "shared_memory", "distributed")

_PRELOADED = (
    "benchmarks.gpu_parts.load",
    "benchmarks.gpu_parts.nccl_client",
    "benchmarks.policy",
    "meshinfer",
)
_HOST = "127.0.0.1"
_WINDOW = 2  # requests of one distributed client that the server has room for
_CLOSE_SECONDS = 5.0
_SETTLE_SECONDS = 0.1
_COUNT_SECONDS = 30.0


@dataclass(frozen=True)
class Load:
    """How batches of `rows` rows are asked for: `requests` of `each` rows, by `processes` client processes.

    `depth` times the requests of one batch are in flight, so that with 2 the server finds the next batch when it has
    answered one.
    """

    transport: str
    workload: Workload
    rows: int
    each: int = 1
    processes: int = 8
    depth: int = 2

    @property
    def requests(self) -> int:
        """Of one batch."""
        return self.rows // self.each

    @property
    def in_flight(self) -> int:
        """Requests of all clients at once; each process has as many, so it may be a few more than asked for."""
        return self.processes * -(-self.depth * self.requests // self.processes)

    @property
    def handles(self) -> int:
        """Clients in each process: a slot has one request in flight, a distributed client two, a pool any number."""
        flights = self.in_flight // self.processes
        if self.transport == "shared_memory":
            return 1
        return flights if self.transport == "process_slot" else -(-flights // _WINDOW)


class Hand:
    """A process that obeys commands over a pipe, as `client.client_main` does."""

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        context: Any = multiprocessing.get_context(START_METHOD)
        self.process = context.Process(target=target, args=(*arguments, theirs), daemon=True)
        self.process.start()
        # With this copy closed, the death of the process ends the pipe and no read hangs.
        theirs.close()

    def tell(self, command: Any) -> None:
        self._pipe.send(command)

    def answer(self, seconds: float = 60.0) -> Any:
        """The command's outcome. RuntimeError with the process's own traceback, or because it died or is late."""
        return answer(self._pipe, "a client process", self.process, seconds)

    def let_go(self) -> None:
        """It ends by itself once it has nothing to do."""
        self._pipe.close()

    def end(self) -> None:
        """Whatever it does, it has gone when this returns."""
        self.let_go()
        self.process.join(_CLOSE_SECONDS)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()


@dataclass
class Flights:
    """A `Connector` of `handles`, each with `flights` requests of `rows` rows in flight at any time."""

    handles: Sequence[Any]
    flights: int
    rows: int

    def connect(self, workload: Workload, client: int) -> Session:
        """Ask for the first time. From then on `request` is a turn: the oldest reply, and the next question."""
        import torch

        from ..policy import expected_action

        torch.set_num_threads(1)
        payload, expected = requests_of(workload, client, self.rows), None
        waiting: deque[Any] = deque()

        def turn() -> torch.Tensor:
            nonlocal expected
            while len(waiting) < len(self.handles) * self.flights:
                handle = self.handles[len(waiting) % len(self.handles)]
                waiting.append((handle, handle.submit(payload)))
            handle, future = waiting.popleft()
            action = future.result(_COUNT_SECONDS)["action"]
            waiting.append((handle, handle.submit(payload)))
            if expected is None:
                expected = expected_action(workload, client).expand_as(action)
            if not torch.allclose(action, expected, rtol=1e-3, atol=1e-4):
                raise AssertionError(f"client {client} got {action}, expected {expected}")
            return action if self.rows == 1 else action[0]

        return Session(turn, self._close)

    def _close(self) -> None:
        for handle in self.handles:
            handle.close()


class Crew:
    """The client processes of one load."""

    def __init__(self, load: Load, clients: Sequence[Any]) -> None:
        flights = -(-load.in_flight // (load.processes * load.handles))
        self._hands: list[Hand] = []
        for number in range(load.processes):
            mine = clients[number * load.handles : (number + 1) * load.handles]
            connector = Flights(mine, flights, load.each)
            self._hands.append(Hand(client_main, connector, load.workload, number))

    def connect(self) -> None:
        self._ask(CONNECT)

    def burst(self, seconds: float) -> None:
        """All ask for `seconds`."""
        start = time.monotonic() + _SETTLE_SECONDS
        self._ask((start, start + seconds))

    def begin(self, seconds: float) -> None:
        """The same, without waiting for the end: `finish` does."""
        start = time.monotonic()
        for hand in self._hands:
            hand.tell((start, start + seconds))

    def finish(self) -> None:
        for hand in self._hands:
            hand.answer()

    def end(self) -> None:
        for hand in self._hands:
            hand.let_go()
        for hand in self._hands:
            hand.end()

    def leave(self) -> None:
        """The orderly end: each client checks a last reply."""
        self._ask(None)

    def _ask(self, command: Any) -> None:
        for hand in self._hands:
            hand.tell(command)
        self.finish()


@dataclass
class Served:
    """A server of this process under its load."""

    server: Any
    crew: Crew
    load: Load

    def measure(self, seconds: float) -> dict[str, float]:
        """Times in microseconds, means over all batches of a window of `seconds` unless they say otherwise.

        `busy` is what the server needs for one batch, the device included; `launch` (a median) is the policy's call,
        which on a GPU returns before its work is done; `latency` of a request follows from the rate and the requests
        in flight.
        """
        self.crew.begin(seconds + 2 * _SETTLE_SECONDS)
        time.sleep(_SETTLE_SECONDS)
        self.server.stats(reset=True)
        time.sleep(seconds)
        found = self.server.stats()
        self.crew.finish()
        batches, rows = max(found.batches, 1), max(found.requests, 1) * self.load.each
        return {
            "batches": found.batches,
            "mean_rows": found.mean_batch_size * self.load.each,
            "rows_per_s": rows / found.seconds,
            "us_per_row": 1e6 * found.seconds / rows,
            "us_per_batch": 1e6 * found.seconds / batches,
            "busy_us": 1e6 * (1 - found.idle_fraction) * found.seconds / batches,
            "launch_us_p50": 1e3 * found.forward_ms_p50,
            "latency_us": 1e6 * self.load.in_flight * self.load.each * found.seconds / rows,
            "errors": found.errors,
        }

    def settle(self) -> Any:
        """Wait until the last request is answered; the statistics then."""
        deadline, found = time.monotonic() + _COUNT_SECONDS, self.server.stats()
        while time.monotonic() < deadline:
            time.sleep(3 * _SETTLE_SECONDS)  # longer than a batch waits for its last requests
            before, found = found, self.server.stats()
            if before.requests == found.requests:
                break
        return found


def warm_forkserver() -> None:
    """Client processes are forked from one that has made their imports, which it makes from now on."""
    multiprocessing.set_forkserver_preload([*_PRELOADED])
    forkserver.ensure_running()


def requests_of(workload: Workload, client: int, rows: int) -> Any:
    """What client number `client` sends: one row without a batch dimension, or `rows` equal ones."""
    from tensordict import TensorDict

    from ..policy import observation

    one = TensorDict(observation(workload, client), [])
    return one if rows == 1 else one.expand(rows).contiguous()


def make_transport(load: Load) -> Any:
    from meshinfer import DistributedTransport
    from meshinfer.inference.shared import ProcessSlotTransport, SharedMemoryTransport

    from ..policy import specs

    request, reply = specs(load.workload)
    if load.each > 1:
        request, reply = (spec.expand(load.each).contiguous() for spec in (request, reply))
    if load.transport == "distributed":
        return DistributedTransport(request, reply, host=_HOST)
    kinds: dict[str, Any] = {
        "process_slot": ProcessSlotTransport,
        "shared_memory": SharedMemoryTransport,
    }
    return kinds[load.transport](request, reply, num_slots=load.in_flight)


@contextmanager
def serving(load: Load, policy: Any, device: torch.device, **options: Any) -> Iterator[Served]:
    """Serve `policy` on `device` to connected clients; every batch waits for all of its requests.

    `options` go to the server; with `prepared=True` it is prepared before it starts.
    """
    import meshinfer

    prepared = options.pop("prepared", False)
    most = options.pop("max_batch_size", load.requests)
    keys = {"in_keys": [leaf.key for leaf in load.workload.request]}
    keys["out_keys"] = [leaf.key for leaf in load.workload.reply]
    with ExitStack() as stack:
        transport = stack.enter_context(make_transport(load))
        server = meshinfer.InferenceServer(
            policy,
            transport,
            policy_device=device,
            max_batch_size=most,
            min_batch_size=load.requests,
            timeout=2 * _SETTLE_SECONDS,
            **keys,
            **options,
        )
        if prepared:
            server.prepare()
        stack.enter_context(server)
        crew = Crew(load, [transport.client() for _ in range(load.processes * load.handles)])
        stack.callback(crew.end)
        crew.connect()
        yield Served(server, crew, load)
        crew.leave()
