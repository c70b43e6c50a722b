"""Processes on one host that die or freeze at any moment: what their server and the other clients notice."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from failure_roles import (
    HELD,
    SECONDS,
    Doubler,
    Worker,
    ask,
    check,
    crew,
    go_on,
    query,
    request,
    wait_until_computing,
)
from failure_scripts import programs
from shared_roles import (
    KINDS,
    all_slots,
    answer,
    ask_for_ever,
    collect,
    hold,
    make,
    own,
    own_transport,
    serve_slots,
    serving_slots,
    speak_to,
    take,
)
from shared_sweeps import (
    TRACED,
    kill_at_random,
    sweep_clients,
    sweep_servers,
)
from support import wait_until
from tensordict import TensorDict
from tensordict.nn import InteractionType, set_interaction_type

from meshinfer import ClosedError, InferenceServer, PeerLostError, ServerClosedError

PROMPTLY = SECONDS / 2
"""In so many seconds everybody goes on, or knows why not, when somebody has died."""

SWEEP_SECONDS = 300.0
"""For some two hundred processes, one after another, on a busy machine."""

BOTH = pytest.mark.parametrize("kind", list(KINDS))

OWN_LINES = ("shared/pool.py", "shared/client.py", "shared/future.py")
"""Of a pool's clients; how they find the memory is swept with the other kind."""


def files(places: list[str]) -> set[str]:
    return {place.partition(":")[0] for place in places}


# A death at any line.


@pytest.mark.slow
@pytest.mark.timeout(2 * SWEEP_SECONDS)
def test_a_client_may_be_killed_at_any_line() -> None:
    with (
        crew(2) as (fixed, pooled),
        serving_slots(Doubler(), "process_slot", 4) as slots,
        serving_slots(Doubler(), "shared_memory", 4) as pool,
    ):
        *victims, survivor = slots.clients(4)
        fixed.begin(sweep_clients, victims, survivor)
        pooled.begin(sweep_clients, pool.clients(1), pool.client(), OWN_LINES)
        places, longest = fixed.outcome(SWEEP_SECONDS).get()
        assert files(places) >= {"board.py", "client.py", "future.py", "memory.py", "slots.py"}
        assert {"process_slot.py", "semaphore.py"} <= files(places)
        assert longest < PROMPTLY
        for client in slots.clients(3):
            ask(client, 1, SECONDS)
            client.close()
        places, longest = pooled.outcome(SWEEP_SECONDS).get()
        assert files(places) == {"client.py", "future.py", "pool.py"}
        assert longest < PROMPTLY
        pooled.call(all_slots, pool.client(), 4)


@pytest.mark.slow
@pytest.mark.timeout(2 * SWEEP_SECONDS)
def test_a_server_may_be_killed_at_any_line_and_the_next_one_serves_the_same_clients() -> None:
    with crew(2) as (fixed, pooled), make("process_slot") as slots, make("shared_memory") as pool:
        clients = [slots.client() for _ in range(4)]
        parts = (*TRACED, "inference/rowwise.py")
        fixed.begin(sweep_servers, slots.serve_elsewhere(), clients, parts)
        clients = [pool.client() for _ in range(4)]
        pooled.begin(sweep_servers, pool.serve_elsewhere(), clients, ("shared/desk.py",))
        places = fixed.outcome(SWEEP_SECONDS).get()
        assert files(places) >= {"board.py", "desk.py", "memory.py", "rowwise.py", "semaphore.py"}
        assert files(pooled.outcome(SWEEP_SECONDS).get()) == {"desk.py"}
        pooled.call(serve_slots, pool.serve_elsewhere())
        fixed.call(all_slots, pool.client(), 4)


@pytest.mark.slow
@pytest.mark.timeout(2 * SWEEP_SECONDS)
def test_clients_may_be_killed_at_random_and_replaced_at_once() -> None:
    """In the pool there are fewer slots than clients, so some die while they wait for one."""
    with (
        crew(2) as (fixed, pooled),
        serving_slots(Doubler(), "process_slot", 8) as slots,
        serving_slots(Doubler(), "shared_memory", 4) as pool,
    ):
        fixed.begin(kill_at_random, slots.clients(8), 4.0, seed=3)
        pooled.begin(kill_at_random, pool.clients(8), 4.0, seed=4)
        for nursery in (fixed, pooled):
            kills, replies = nursery.outcome(SWEEP_SECONDS).get()
            assert replies > kills >= 20
        pooled.call(all_slots, pool.client(), 4)


# Replacement.


@BOTH
def test_a_respawned_worker_never_gets_the_action_of_its_predecessor(kind: str) -> None:
    policy = Doubler()

    def keep(batch: Any) -> Any:  # what the row held when it was taken, whatever comes there
        return policy(batch.clone())

    with serving_slots(keep, kind, 1) as server, crew(2) as (old, new):
        client = server.client()
        old.call(own, client)
        old.begin(query, HELD)
        assert policy.computing.wait(SECONDS)
        old.kill()
        new.call(own, client)
        new.call(hold, [5])  # the server has taken its predecessor's, and answers that first
        policy.go_on.set()
        assert new.call(collect) == [10]
        assert new.call(hold, [6]) is None
        assert new.call(collect) == [12]


@BOTH
def test_a_server_restarts_for_the_same_clients(kind: str) -> None:
    with make(kind) as transport, crew(2) as workers:
        client = transport.client()
        for number in range(3):
            server = Worker()
            workers.append(server)
            server.call(serve_slots, transport.serve_elsewhere())
            ask(client, number, SECONDS)
            held = client.submit(request(HELD))
            assert not held.done()
            server.kill()
            began = time.monotonic()
            with pytest.raises(PeerLostError):
                held.result(SECONDS)
            with pytest.raises(PeerLostError):
                client(request(1))
            assert time.monotonic() - began < PROMPTLY


@BOTH
def test_the_next_server_answers_what_its_predecessor_has_left(kind: str) -> None:
    with make(kind, 1) as transport, crew(3) as (client, old, new):
        client.call(own, transport.client())
        old.call(serve_slots, transport.serve_elsewhere())
        client.begin(query, HELD)
        assert old.call(wait_until_computing)
        client.signal(signal.SIGSTOP)  # who looks in between learns of the death
        old.kill()
        new.call(serve_slots, transport.serve_elsewhere())
        assert new.call(wait_until_computing)
        client.signal(signal.SIGCONT)
        new.call(go_on)
        client.outcome().get()


@BOTH
def test_a_server_elsewhere_ends_when_the_transport_is_closed(kind: str) -> None:
    """Its thread would else look for work that nobody can bring, without a pause."""
    with make(kind, 1) as transport, crew(1) as (server,):
        server.call(serve_slots, transport.serve_elsewhere())
        ask(transport.client(), 1, SECONDS)
        transport.close()
        assert server.call(has_ended, within=2 * SECONDS)


def has_ended(station: SimpleNamespace) -> bool:
    """At a server: whether it ends by itself."""
    return wait_until(lambda: not station.server.is_alive, SECONDS)


@BOTH
def test_a_late_reply_to_what_was_given_up_does_not_touch_the_next(kind: str) -> None:
    with make(kind, 2) as transport:
        client, other = transport.client(), transport.client()
        for late in (
            lambda old: transport.resolve(old[0], answer(1)),
            lambda old: transport.resolve_batch(old[:1], answer(1).unsqueeze(0)),
            lambda old: transport.resolve_exception(old[0], ValueError("late")),
            lambda old: transport.resolve_batch(old, torch.stack([answer(1), answer(5)])),
        ):
            given_up, kept = client.submit(request(1)), other.submit(request(5))
            old = take(transport, 2)
            assert given_up.cancel()
            future = client.submit(request(2))
            (new,) = take(transport, 1)
            transport.resolve(new, answer(2))
            late(old)
            check(future.result(SECONDS), 2)
            if not kept.done():
                transport.resolve(old[1], answer(5))
            check(kept.result(SECONDS), 5)


def test_a_request_given_up_while_a_batch_is_collected_spoils_nobody() -> None:
    """The same slot twice in one batch, in two forward passes: the older one's is the later."""
    with make("shared_memory", 2) as transport:
        client = transport.client()
        config = {"min_batch_size": 3, "timeout": SECONDS}
        first = client.submit(request(1))
        with InferenceServer(Doubler(), transport, **config):
            with set_interaction_type(InteractionType.RANDOM):
                given_up = client.submit(request(2))
            assert wait_until(lambda: transport.num_waiting == 0, SECONDS)
            assert given_up.cancel()
            again = client.submit(request(3))
            check(first.result(SECONDS), 1)
            check(again.result(SECONDS), 3)


# The pool.


def test_a_killed_client_gives_its_slots_back() -> None:
    with make("shared_memory", 3) as transport, crew(1) as (worker,):
        client = transport.client()
        worker.call(own, client)
        worker.call(hold, [1, 2, 3])
        assert len(take(transport, 3)) == 3
        with pytest.raises(TimeoutError):
            client.submit(request(4), 0.3)
        worker.kill()
        futures = [client.submit(request(value), SECONDS) for value in (5, 6, 7)]
        for slot, value in zip(take(transport, 3), (5, 6, 7), strict=True):
            transport.resolve(slot, answer(value))
        for future, value in zip(futures, (5, 6, 7), strict=True):
            check(future.result(SECONDS), value)


@pytest.mark.slow
def test_the_slot_of_a_killed_client_comes_back_while_others_keep_the_pool_busy() -> None:
    """Whoever waits for a slot is woken all the time, by those that give theirs back."""
    policy = Crowd()
    with serving_slots(policy, "shared_memory", 2) as server, crew(4) as (victim, *busy):
        client = server.client()
        victim.call(own, client)
        victim.call(hold, [1])
        assert wait_until(lambda: policy.largest == 1, SECONDS)
        for worker in busy:
            worker.call(own, client)
        victim.kill()
        for worker in busy:
            worker.begin(ask_for_ever)
        assert wait_until(lambda: policy.largest == 2, SECONDS), "one of two slots is lost"


class Crowd:
    """A policy that takes its time, and knows its largest batch."""

    def __init__(self) -> None:
        self.largest = 0
        self._pause = threading.Event()

    def __call__(self, batch: Any) -> Any:
        self.largest = max(self.largest, len(batch))
        self._pause.wait(0.002)
        return TensorDict({"y": 2 * batch["x"]}, batch.batch_size)


def test_a_blocked_submit_gets_the_slot_that_another_process_gives_back() -> None:
    policy = Doubler()
    with serving_slots(policy, "shared_memory", 1) as server, crew(1) as (worker,):
        client = server.client()
        worker.call(own, client)
        for begin_at in (HELD, HELD):
            worker.begin(query, begin_at)
            assert policy.computing.wait(SECONDS)
            policy.computing.clear()
            with ThreadPoolExecutor(1) as thread:
                blocked = thread.submit(ask, client, 5, SECONDS)
                with pytest.raises(FutureTimeoutError):
                    blocked.result(0.3)
                policy.go_on.set()
                blocked.result(SECONDS)
            worker.outcome().get()


def test_a_submit_that_gets_no_slot_says_how_many_there_are() -> None:
    with make("shared_memory", 2, timeout=0.2) as transport:
        first, second = transport.client(), transport.client()
        kept = [first.submit(request(1)), first.submit(request(2))]
        for attempt in (lambda: second.submit(request(3)), lambda: second(request(3), 0.2)):
            began = time.monotonic()
            with pytest.raises(TimeoutError, match=r"all 2 slots .* more slots"):
                attempt()
            assert 0.15 < time.monotonic() - began < PROMPTLY
        assert kept.pop().cancel()
        second.submit(request(4), 0.0).cancel()


@pytest.mark.parametrize("how", ["closed", "killed", "client_closed"])
def test_a_blocked_submit_learns_that_nobody_will_serve_it(how: str) -> None:
    with make("shared_memory", 1) as transport, crew(1) as (server,):
        server.call(serve_slots, transport.serve_elsewhere())
        client, other = transport.client(), transport.client()
        ask(client, 1, SECONDS)
        held = client.submit(request(HELD))
        with ThreadPoolExecutor(1) as thread:
            blocked = thread.submit(other.submit, request(2), 2 * SECONDS)
            with pytest.raises(FutureTimeoutError):
                blocked.result(0.3)
            {"closed": transport.close, "killed": server.kill, "client_closed": other.close}[how]()
            error = blocked.exception(SECONDS)
        expected = {
            "closed": ServerClosedError,
            "killed": PeerLostError,
            "client_closed": ClosedError,
        }
        assert isinstance(error, expected[how]), error
        held.cancel()


# Whoever is stopped.


@BOTH
def test_a_stopped_client_delays_neither_the_server_nor_the_others(kind: str) -> None:
    policy = Doubler()
    with serving_slots(policy, kind, 2) as server, crew(2) as (stopped, other):
        for worker in (stopped, other):
            worker.call(own, server.client())
        stopped.begin(query, HELD)
        assert policy.computing.wait(SECONDS)
        stopped.signal(signal.SIGSTOP)
        policy.go_on.set()
        for value in range(100):
            other.call(query, value)
        stopped.signal(signal.SIGCONT)
        stopped.outcome().get()
        stopped.call(query, 7)


@BOTH
def test_deadlines_hold_while_the_server_is_stopped(kind: str) -> None:
    with make(kind, 1) as transport, crew(1) as (server,):
        server.call(serve_slots, transport.serve_elsewhere())
        with transport.client() as client:
            ask(client, 1, SECONDS)
            server.signal(signal.SIGSTOP)
            for timeout in (0.0, 0.2, 0.4):
                began = time.monotonic()
                with pytest.raises(TimeoutError):
                    client(request(2), timeout)
                assert timeout <= time.monotonic() - began < timeout + PROMPTLY
            future = client.submit(request(3))
            assert not future.done()
            with pytest.raises(TimeoutError):
                future.result(0.2)
            server.signal(signal.SIGCONT)
            check(future.result(SECONDS), 3)


# How programs end.

ENDINGS = {
    "returns": ("process_slot", ("fork", "spawn"), "", 0),
    "raises": ("shared_memory", ("fork",), "raise KeyError('at top level')", 1),
    "exits": ("process_slot", ("fork",), "sys.exit(3)", 3),
}

OWNER = """
from shared_roles import own_transport

if __name__ == "__main__":
    own_transport(None, {kind!r}, *{methods!r})
    {ending}
"""


@pytest.mark.slow
def test_an_owner_may_end_without_a_word(tmp_path: Path) -> None:
    """What it leaves in /dev/shm, or as processes, fails the test afterwards."""
    sources = {
        name: OWNER.format(kind=kind, methods=methods, ending=ending)
        for name, (kind, methods, ending, _) in ENDINGS.items()
    }
    with programs(tmp_path, **sources) as running:
        for name, program in running.items():
            ending = program.ending(90.0)
            assert ending.code == ENDINGS[name][3], (name, ending.stderr)
            if name == "raises":
                assert ending.complaints()[-1] == "KeyError: 'at top level'"
                assert ending.stderr.count("Traceback") == 1
            else:
                assert ending.complaints() == [], name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "methods", "number"),
    [
        ("shared_memory", ("fork",), signal.SIGTERM),
        ("process_slot", ("fork", "forkserver"), signal.SIGKILL),
    ],
)
def test_an_owner_may_be_killed(
    tmp_path: Path, kind: str, methods: tuple[str, ...], number: int
) -> None:
    output = tmp_path / "output"
    with crew(1) as (owner,):
        owner.call(speak_to, str(output))
        owner.call(own_transport, kind, *methods, within=60.0)
        assert uses_no_name(owner.pid)
        owner.signal(number)
        assert wait_until(lambda: output.read_text().count("child") == len(methods), SECONDS)
    assert output.read_text().splitlines() == ["child PeerLostError"] * len(methods)


def uses_no_name(pid: int) -> bool:
    """Whether neither a process nor its children have anything of /dev/shm."""
    family = [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]
    return not any("/dev/shm" in Path(f"/proc/{one}/maps").read_text() for one in family)
