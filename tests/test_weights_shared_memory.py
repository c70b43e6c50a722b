"""Weights through shared memory: what one copy costs, and who may die, freeze or stay away meanwhile."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from failure_roles import crew
from shared_sweeps import AtLine
from shared_weights_roles import (
    SECONDS,
    SWEPT,
    check,
    elapsed,
    footprint,
    held,
    hold,
    in_a_child,
    memory_files,
    publish,
    publish_for_ever,
    publish_without,
    receive,
    receive_until,
    serve,
    sweep_publishers,
    sweep_subscribers,
    take,
    train,
    weights,
)

from meshinfer import ClosedError, PeerLostError, TransportError, WeightLayout
from meshinfer.weights.shared_memory import SharedMemoryWeights
from meshinfer.weights.shared_memory.pool import WINDOW

PROMPTLY = SECONDS / 2
"""In so many seconds everybody goes on, or knows why not, when somebody has died."""


@pytest.fixture
def transport() -> Iterator[SharedMemoryWeights]:
    with SharedMemoryWeights(weights(0)) as transport:
        yield transport


def put(publisher: Any, count: int = 1) -> int:
    """Publish so many versions; the last."""
    for _ in range(count):
        publisher.publish(weights(publisher.version + 1))
    version: int = publisher.version
    return version


# Memory.


def test_servers_read_the_memory_that_was_published_into(transport: SharedMemoryWeights) -> None:
    publisher = transport.publisher()
    before, places = memory_files(), set()
    with transport.subscriber() as one, transport.subscriber() as other:
        for _ in range(20):
            put(publisher)
            mine, theirs = one.receive(SECONDS), other.receive(SECONDS)
            assert mine.weights["body"].data_ptr() == theirs.weights["body"].data_ptr()
            places.add(mine.weights["body"].data_ptr())
            for update in (mine, theirs):
                assert check(update) == publisher.version
                update.release()
    assert len(places) == memory_files() - before == 2


def test_memory_grows_with_what_is_kept_and_is_given_back(transport: SharedMemoryWeights) -> None:
    publisher, before = transport.publisher(), memory_files()
    subscriber = transport.subscriber()
    kept = []
    for version in range(1, 9):
        put(publisher)
        kept.append(subscriber.receive(SECONDS))
        assert [check(update) for update in kept] == list(range(1, version + 1))
    put(publisher)
    with pytest.raises(RuntimeError, match=r"8 updates .* release\(\)"):
        subscriber.receive(SECONDS)
    assert memory_files() - before == 9
    for update in kept:
        update.release()
    assert take(subscriber) == 9
    put(publisher, 50)
    assert take(subscriber) == 59
    assert memory_files() - before <= 3


def test_what_a_closed_server_keeps_stays_valid() -> None:
    transport = SharedMemoryWeights(weights(0), max_subscribers=1)
    publisher = transport.publisher()
    put(publisher)
    with transport.subscriber() as subscriber:
        update = subscriber.receive(SECONDS)
    put(publisher, 20)
    assert check(update) == 1
    assert publisher.subscribers == 0
    with pytest.raises(TransportError, match="all 1 places"):
        transport.subscriber()
    update.release()
    with transport.subscriber() as other:
        del transport  # in use until nobody has anything of it
        assert take(other) == publisher.version == 21


def test_what_is_being_written_is_not_received(monkeypatch: pytest.MonkeyPatch) -> None:
    """At any line of a server's, one more version is published, and the next one begun."""
    writing, go_on, write = threading.Event(), threading.Event(), WeightLayout.write

    def write_slowly(layout: Any, views: Any, given: Any, base: Any = None) -> None:
        if float(given["scale"]) == 3.0:
            views["body"].fill_(-1.0)
            writing.set()
            assert go_on.wait(SECONDS)
        write(layout, views, given, base)

    monkeypatch.setattr(WeightLayout, "write", write_slowly)
    number, going_on = 0, True
    with ThreadPoolExecutor(1) as pool:
        while going_on:
            number += 1
            with SharedMemoryWeights(weights(0)) as transport:
                publisher, subscriber = transport.publisher(), transport.subscriber()
                put(publisher)
                begun: list[Any] = []

                def publish_more(
                    place: str, begun: Any = begun, publisher: Any = publisher
                ) -> None:
                    sys.settrace(None)
                    put(publisher)
                    begun.append(pool.submit(put, publisher))
                    assert writing.wait(SECONDS)

                line = AtLine(number, publish_more, SWEPT[:1])
                with line:
                    update = subscriber.receive(SECONDS)
                assert check(update) in (1, 2)
                going_on = line.reached
                go_on.set()
                for third in begun:
                    third.result(SECONDS)
                assert check(update) in (1, 2)
                writing.clear()
                go_on.clear()
    assert number > 20


def test_nothing_grows_over_a_thousand_versions(transport: SharedMemoryWeights) -> None:
    """Whatever servers keep, and for how long; with the fences of machines that reorder stores, too."""
    publisher, sizes = transport.publisher(), []
    with crew(3) as workers:
        for worker in workers:
            worker.call(serve, pickle.loads(pickle.dumps(transport)))
        for last in (100, 1000):
            for number, worker in enumerate(workers):
                worker.begin(receive_until, last, number, real_fence=number == 0)
            put(publisher, last - publisher.version)
            assert all(worker.outcome().get() > 0 for worker in workers)
            for _ in range(2 * WINDOW):  # how many blocks were kept at last is chance; now none is
                put(publisher)
                assert {worker.call(receive) for worker in workers} == {publisher.version}
            sizes.append([footprint(), *(worker.call(footprint) for worker in workers)])
        publisher.wait(timeout=SECONDS)
    for (files_before, memory_before), (files, memory) in zip(*sizes, strict=True):
        assert files <= files_before  # what earlier tests have left here may go meanwhile
        assert memory - memory_before < 4096


def test_what_is_missing_is_said_and_the_old_version_stays() -> None:
    size = 1 << 24
    with SharedMemoryWeights(weights(0, size)) as transport, crew(1) as (trainer,):
        trainer.call(train, transport)
        trainer.call(publish, size=size)
        with transport.subscriber() as subscriber:
            update = subscriber.receive(SECONDS)
            text = trainer.call(publish_without, "memory", size)
            assert "cannot map 671" in text
            assert check(update) == 1
            newer = subscriber.receive(SECONDS)
            assert check(newer) == 2
            text = trainer.call(publish_without, "descriptors", size)
            assert "buffer 3" in text
            assert "ulimit -n" in text
            assert check(newer) == 2
            assert take(subscriber) == 3
    huge = {"body": torch.zeros(1).expand(1 << 44)}
    with (
        SharedMemoryWeights(huge) as transport,
        pytest.raises(OSError, match=r"buffer 1 .*needs 703\d{11} bytes .* are available.*release"),
    ):
        transport.publisher(huge).publish()


# Processes.


def serve_once(transport: Any, say: Any) -> None:
    with transport.subscriber() as subscriber:
        say.send(take(subscriber))
        say.send(take(subscriber))


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_server_in_a_process_of_any_kind(transport: SharedMemoryWeights, method: str) -> None:
    publisher = transport.publisher()
    put(publisher)
    context: Any = multiprocessing.get_context(method)
    here, there = context.Pipe()
    child = context.Process(target=serve_once, args=(transport, there))
    child.start()
    assert here.poll(3 * SECONDS)
    assert here.recv() == 1
    put(publisher)
    assert here.poll(SECONDS)
    assert here.recv() == 2
    child.join()


def test_a_forked_server_is_another_one(transport: SharedMemoryWeights) -> None:
    with crew(1) as (worker,):
        publisher = transport.publisher()
        worker.call(serve, transport)
        for version in (1, 2):
            put(publisher)
            assert worker.call(hold) == version
        assert worker.call(in_a_child) == 0
        put(publisher, 20)
        assert worker.call(held) == [1, 2]
        assert worker.call(receive) == 22
        publisher.wait(timeout=SECONDS)


def test_places_are_limited_and_those_of_the_dead_come_back() -> None:
    with SharedMemoryWeights(weights(0), max_subscribers=2) as transport, crew(1) as (worker,):
        worker.call(serve, transport)
        kept = transport.subscriber()
        with pytest.raises(TransportError, match=r"all 2 places .* larger max_subscribers"):
            transport.subscriber()
        publisher = transport.publisher()
        put(publisher)
        assert publisher.subscribers == 2
        worker.call(hold)
        worker.kill()
        assert publisher.subscribers == 1
        before = memory_files()
        put(publisher, 20)
        assert memory_files() - before == 1
        with transport.subscriber() as subscriber:
            assert take(subscriber) == take(kept) == 21
            publisher.wait(timeout=SECONDS)
    for wrong in (0, 5000, 1.5):
        with pytest.raises((ValueError, TypeError), match=f"max_subscribers={wrong}"):
            SharedMemoryWeights(weights(0), max_subscribers=wrong)  # type: ignore[arg-type]


def test_a_stopped_server_holds_nobody_up(transport: SharedMemoryWeights) -> None:
    with crew(1) as (worker,), transport.subscriber() as subscriber:
        publisher = transport.publisher()
        worker.call(serve, transport)
        put(publisher)
        worker.call(hold)
        worker.signal(signal.SIGSTOP)
        assert elapsed(lambda: put(publisher, 100)) < PROMPTLY
        assert take(subscriber) == 101
        with pytest.raises(TimeoutError, match=f"version 101 .* process {worker.pid} "):
            publisher.wait(timeout=0.1)
        worker.signal(signal.SIGCONT)
        assert worker.call(held) == [1]
        assert worker.call(receive) == 101
        publisher.wait(timeout=SECONDS)


def test_a_trainer_is_killed_and_another_one_begins(transport: SharedMemoryWeights) -> None:
    copy = pickle.loads(pickle.dumps(transport))
    with crew(2) as (first, second), copy.subscriber() as subscriber:
        first.call(train, transport, version=70)
        first.call(publish)
        kept = subscriber.receive(SECONDS)
        with pytest.raises(RuntimeError, match=f"publisher already, in process {first.pid}"):
            second.call(train, transport)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(subscriber.receive, SECONDS)
            first.kill()
            error = waiting.exception(2 * SECONDS)
        assert isinstance(error, PeerLostError), error
        assert check(kept) == 71
        with pytest.raises(TimeoutError):
            subscriber.receive(0.0)
        second.call(serve, transport)
        second.begin(receive)  # too late: it has never had the memory
        assert isinstance(second.outcome().error, PeerLostError)
        second.call(train, transport)
        second.call(publish)
        assert take(subscriber) == second.call(receive) == 1
        assert check(kept) == 71
        second.begin(publish_for_ever)
        assert take(subscriber) > 1
        second.kill()
        with pytest.raises(PeerLostError):
            take_for_ever(subscriber)


def take_for_ever(subscriber: Any) -> None:
    while True:
        take(subscriber)


def test_the_maker_dies() -> None:
    with crew(2) as (maker, trainer):
        transport, unopened = maker.call(made), maker.call(made)
        trainer.call(train, transport)
        with transport.subscriber() as subscriber:
            maker.kill()
            trainer.call(publish)
            assert take(subscriber) == 1
        with pytest.raises(PeerLostError, match=f"process {maker.pid}"):
            unopened.subscriber()
    with crew(1) as (maker,), maker.call(made).subscriber() as subscriber:
        maker.kill()
        with pytest.raises(PeerLostError, match=f"process {maker.pid}, which made"):
            subscriber.receive(SECONDS)


def made(station: Any) -> SharedMemoryWeights:
    transport = SharedMemoryWeights(weights(0))
    station.__dict__.setdefault("made", []).append(transport)
    return transport


def test_closing_reaches_other_processes() -> None:
    with crew(2) as (server, trainer):
        with SharedMemoryWeights(weights(0)) as transport:
            server.call(serve, transport)
            trainer.call(train, transport)
            server.begin(receive)
        assert isinstance(server.outcome().error, ClosedError)
        trainer.begin(publish)
        assert isinstance(trainer.outcome().error, ClosedError)


# A death at any line.


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_anybody_may_be_killed_at_any_line() -> None:
    transports = [SharedMemoryWeights(weights(0), max_subscribers=3) for _ in range(2)]
    with crew(2) as (trainers, servers):
        trainers.begin(sweep_publishers, transports[0])
        servers.begin(sweep_subscribers, transports[1])
        places, received, served = trainers.outcome(300.0).get()
        assert files(places) == {
            "board.py",
            "memory.py",
            "pool.py",
            "publisher.py",
            "semaphore.py",
            "transport.py",
        }
        assert received >= served > 1
        places, blocks = servers.outcome(300.0).get()
        assert files(places) == {
            "board.py",
            "memory.py",
            "semaphore.py",
            "subscriber.py",
            "transport.py",
        }
        assert blocks < 10
    for transport in transports:
        transport.close()


def files(places: list[str]) -> set[str]:
    return {place.partition(":")[0] for place in places}
