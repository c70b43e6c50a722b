"""Processes that die at every line of the library, one after another, and what else may happen at any line."""

from __future__ import annotations

import gc
import mmap
import os
import random
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType, SimpleNamespace
from typing import Any

import pytest
import torch
from failure_roles import SECONDS, WHO, check, request
from shared_roles import ended, ended_within, endless, forked
from tensordict import TensorDict

from meshinfer import PeerLostError, RemoteError, TransportError
from meshinfer.inference.shared import PoolClient

TRACED = (
    "inference/shared/",
    "meshinfer/memory.py",
    "meshinfer/semaphore.py",
    "meshinfer/slots.py",
)
"""Where a process may be killed, or the garbage collector run, at any line."""

LARGE = 300_000
"""Characters of a message that does not fit into a slot."""


class AtLine:
    """Does something when the ``number``-th line of the library, in the order of their first times, is about to run.

    Args:
        number: from 1 on.
        action: what; it is told the line.
        parts: of the paths of the files that count.
    """

    def __init__(
        self, number: int, action: Callable[[str], object], parts: tuple[str, ...] = TRACED
    ) -> None:
        self._number = number
        self._action = action
        self._parts = parts
        self._seen: set[tuple[CodeType, int]] = set()

    @property
    def reached(self) -> bool:
        return len(self._seen) >= self._number

    def __enter__(self) -> AtLine:
        sys.settrace(self._call)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _call(self, frame: FrameType, event: str, arg: object) -> Any:
        return self._line if any(part in frame.f_code.co_filename for part in self._parts) else None

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        place = frame.f_code, frame.f_lineno
        if event == "line" and not self.reached and place not in self._seen:
            self._seen.add(place)
            if self.reached:
                code = frame.f_code
                self._action(
                    f"{os.path.basename(code.co_filename)}:{frame.f_lineno} {code.co_name}"
                )
        return self._line


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Sweep:
    """Children, each killed one line later than the one before."""

    def __init__(self, parts: tuple[str, ...] = TRACED) -> None:
        self.places: list[str] = []
        self._parts = parts
        self._places, self._place = os.pipe()
        gc.freeze()  # or each child would copy what the collector looks at

    def next(self, life: Callable[..., object], *args: Any) -> bool:
        """Fork a child for ``life(*args, death)``, which dies somewhere ``with death:``; whether it did."""
        code = ended(
            forked(life, *args, AtLine(len(self.places) + 1, self._tell_and_die, self._parts))
        )
        if code == 0:
            return False
        assert code == -signal.SIGKILL, f"ended with {code} after {self.places[-1:]}"
        self.places.append(os.read(self._places, 200).decode())
        return True

    def _tell_and_die(self, place: str) -> None:
        os.write(self._place, place.encode())
        die()


# What clients do in a sweep.


def first_call(client: Any, value: int, death: AtLine) -> None:
    with death:
        check(client(request(value), SECONDS), value)
        client.close()


def next_submit(client: Any, value: int, death: AtLine) -> None:
    check(client(request(value)), value)
    with death:
        check(client.submit(request(value + 1)).result(), value + 1)


def cancelling(client: Any, value: int, death: AtLine) -> None:
    check(client(request(value)), value)
    future = client.submit(request(value + 1))
    with death:
        future.cancel()


def sweep_clients(
    station: SimpleNamespace,
    victims: list[Any],
    survivor: Any,
    parts: tuple[str, ...] = TRACED,
) -> tuple[list[str], float]:
    """Kill a client at every line of its life; the survivor makes a request after each death.

    Returns:
        The lines, and the longest that the survivor waited, in seconds.
    """
    asked, ask = os.pipe()
    answers, say = os.pipe()
    other = forked(_survive, survivor, asked, say)
    places, longest = [], 0.0
    for life in (first_call, next_submit, cancelling):
        sweep, alive = Sweep(parts), True
        while alive:
            number = len(sweep.places)
            alive = sweep.next(life, victims[number % len(victims)], WHO + number)
            began = time.monotonic()
            os.write(ask, b"?")
            assert os.read(answers, 1) == b"!", f"not served after a death at {sweep.places[-1:]}"
            longest = max(longest, time.monotonic() - began)
        places += sweep.places
    os.write(ask, b".")
    assert ended(other) == 0
    return places, longest


def _survive(client: Any, asked: int, say: int) -> None:
    """A request whenever the sweep asks for one."""
    value = 0
    while os.read(asked, 1) == b"?":
        signal.alarm(int(SECONDS))
        value += 1
        check(client(request(value), SECONDS), value)
        os.write(say, b"!")


# What a server does in a sweep.

SMALL_ERROR, LARGE_ERROR = -3, -4


def serve_by_hand(transport: Any, until: set[int]) -> None:
    """Answer requests as :func:`answer` does, or with errors, until one of each kind was answered."""
    requests, replies = transport.request_batch(8), transport.response_batch(8)
    while until:
        transport.wait_for_work(SECONDS)
        slots = transport.drain_slots(8)
        if not slots:
            continue
        values = transport.gather_requests(slots, requests)["x"][:, 0].tolist()
        fine = [slot for slot, value in zip(slots, values, strict=True) if value >= 0]
        for slot, value in zip(slots, values, strict=True):
            if value < 0:
                text = "small" if value == SMALL_ERROR else "l" * LARGE
                transport.resolve_exception(slot, ValueError(text))
                until.discard(value)
        if fine:
            x = torch.tensor([[value] for value in values if value >= 0])
            transport.resolve_batch(fine, TensorDict({"y": 2 * x}, [len(fine)]), replies)
            until.discard(0)


def sweep_servers(
    station: SimpleNamespace, serve: Callable[[], Any], clients: list[Any], parts: tuple[str, ...]
) -> list[str]:
    """Kill the server of four clients at every line, each time replaced at once; returns the lines.

    A request may wait while one server after another is killed before it has answered: those lines are half of the
    sweep. So clients have no deadline while it goes on; what was lost on the way shows when the last server lives.
    """
    stopped, stop = os.pipe()
    kinds = (0, 0, SMALL_ERROR, LARGE_ERROR)
    askers = [
        forked(_ask_until, stopped, client, kind)
        for client, kind in zip(clients, kinds, strict=True)
    ]
    sweep, alive = Sweep(parts), True
    while alive:
        alive = sweep.next(_serve, serve)
    last = forked(_serve_for_ever, serve)
    os.write(stop, b".")
    codes = [ended_within(asker, SECONDS) for asker in askers]
    os.kill(last, signal.SIGKILL)
    ended(last)
    assert codes == [0] * len(askers), codes
    return sweep.places


def _serve(serve: Callable[[], Any], death: AtLine) -> None:
    with death:
        transport = serve()
        serve_by_hand(transport, {0, SMALL_ERROR, LARGE_ERROR})
    os._exit(0)  # not in good order, which would tell the clients


def _serve_for_ever(serve: Callable[[], Any]) -> None:
    endless()
    serve_by_hand(serve(), {1})


def _ask_until(stopped: int, client: Any, kind: int) -> None:
    """Requests of one kind, and afterwards one more that must succeed. A lost server is asked again."""
    endless()
    parent, value = os.getppid(), 0
    going_on = True
    while going_on:
        going_on = not select.select([stopped], [], [], 0)[0]
        answered = False
        while not answered:
            value += 1
            try:
                _ask_for(client, kind or value)
                answered = True
            except PeerLostError:
                assert os.getppid() == parent, "there will be no other server"


def _ask_for(client: Any, value: int) -> None:
    if value > 0:
        return check(client(request(value)), value)
    # The text of a large one goes with its server.
    kinds = (ValueError,) if value == SMALL_ERROR else (ValueError, RemoteError)
    with pytest.raises(kinds) as caught:
        client(request(value))
    if caught.type is ValueError:
        assert str(caught.value) == {SMALL_ERROR: "small", LARGE_ERROR: "l" * LARGE}[value]
    return None


# Clients that are killed at random.

KILLS = 20


def kill_at_random(
    station: SimpleNamespace, clients: list[Any], seconds: float, seed: int
) -> tuple[int, int]:
    """A process for each client; one of them is killed, and replaced at once, every 100 ms.

    Goes on for ``seconds``, and until :data:`KILLS` were killed and more were answered, however slow the machine is.

    Returns:
        Kills, and replies.
    """
    chance, pause = random.Random(seed), threading.Event()
    progress = memoryview(mmap.mmap(-1, 8 * len(clients))).cast("q")
    stopped, stop = os.pipe()
    gc.freeze()

    def start(index: int) -> int:
        return forked(_pump, clients[index], index, progress, stopped)

    processes = [start(index) for index in range(len(clients))]
    kills, deadline = 0, time.monotonic() + seconds
    while time.monotonic() < deadline or not KILLS <= kills < sum(progress):
        pause.wait(0.1)
        index = chance.randrange(len(clients))
        os.kill(processes[index], signal.SIGKILL)
        assert ended(processes[index]) == -signal.SIGKILL
        processes[index] = start(index)
        kills += 1
    before = list(progress)
    os.write(stop, b".")
    codes = [ended(process) for process in processes]
    assert codes == [0] * len(clients), codes
    assert all(now > then for now, then in zip(progress, before, strict=True)), (
        before,
        list(progress),
    )
    return kills, sum(progress)


def _pump(client: Any, index: int, progress: memoryview, stopped: int) -> None:
    """Two requests at a time where the transport allows it; at least one pair after ``stopped``."""
    pair = isinstance(client, PoolClient)
    last = False
    while not last:
        last = bool(select.select([stopped], [], [], 0)[0])
        signal.alarm(int(SECONDS))
        value = index * WHO + progress[index]
        values = (value, value + 1) if pair else (value,)
        futures = [client.submit(request(each)) for each in values]
        for future, each in reversed(list(zip(futures, values, strict=True))):
            check(future.result(SECONDS), each)
        progress[index] += len(values)


# What may happen to a client in the middle of a call.


def collect_garbage_at_any_line(station: SimpleNamespace, clients: list[Any]) -> int:
    """Each time with a future that only the collector finds; how many lines there were."""
    (client, other), number, going_on = clients, 0, True
    gc.freeze()
    gc.disable()  # only where it is told to
    while going_on:
        number += 1
        _forget_in_flight(other)
        line = AtLine(number, lambda place: gc.collect())
        with line:
            check(client(request(number), SECONDS), number)
            client.submit(request(1)).cancel()
        gc.collect()
        going_on = line.reached
    return number


def _forget_in_flight(client: Any) -> None:
    ring = SimpleNamespace(future=client.submit(request(1)))
    ring.itself = ring


def fork_at_any_line(station: SimpleNamespace, client: Any, parts: tuple[str, ...]) -> int:
    """A thread may fork while another is anywhere in a call; the child uses the client. How many lines there were."""

    def fork(place: str) -> None:
        status = ended(forked(_use_inherited, client))
        assert status == 0, f"{status} in a child forked at {place}"

    number, going_on = 0, True
    check(client(request(0), SECONDS), 0)
    gc.freeze()
    while going_on:
        number += 1
        line = AtLine(number, fork, parts)
        with line:
            check(client(request(number), SECONDS), number)
        going_on = line.reached
    return number


def _use_inherited(client: Any) -> None:
    sys.settrace(None)
    if isinstance(client, PoolClient):
        return check(client(request(7), SECONDS), 7)
    with pytest.raises(TransportError, match="in use"):
        client(request(7), SECONDS)
    return None
