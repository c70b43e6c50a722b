"""What trainers and servers on one host do with weights in shared memory, each in a process of its own."""

from __future__ import annotations

import faulthandler
import gc
import os
import random
import resource
import select
import signal
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from shared_roles import ended, forked, use_real_fence
from shared_sweeps import AtLine, Sweep

from meshinfer import PeerLostError, WeightUpdate

SECONDS = 30.0
"""For what must happen, but whose speed no test asserts."""

SWEPT = ("weights/shared_memory/", "meshinfer/memory.py", "meshinfer/semaphore.py")
"""Where a trainer or a server may be killed at any line."""


def weights(value: float, size: int = 1000) -> dict[str, torch.Tensor]:
    """All elements are ``value``."""
    shapes = {"body": (size,), "head": (3, 5), "scale": ()}
    return {name: torch.full(shape, float(value)) for name, shape in shapes.items()}


def check(update: WeightUpdate) -> int:
    """All weights must be of one version; which."""
    found = {extreme for each in update.weights.values() for extreme in each.aminmax()}
    assert {float(each) for each in found} == {float(update.version)}, (update, found)
    return update.version


def take(subscriber: Any, timeout: float = SECONDS) -> int:
    """The next version, which serves and is let go of."""
    update = subscriber.receive(timeout)
    subscriber.applied(update)
    version = check(update)
    update.release()
    return version


# Roles of workers. The first argument is the worker's station.


def train(station: SimpleNamespace, transport: Any, version: int = 0) -> None:
    """Become the trainer."""
    station.transport = transport
    station.publisher = transport.publisher(version=version)


def publish(station: SimpleNamespace, count: int = 1, size: int = 1000) -> int:
    """The last of so many versions."""
    for _ in range(count):
        station.publisher.publish(weights(station.publisher.version + 1, size))
    version: int = station.publisher.version
    return version


def publish_for_ever(station: SimpleNamespace) -> None:
    while True:
        publish(station)


def serve(station: SimpleNamespace, transport: Any) -> None:
    """Become a server."""
    station.subscriber, station.held = transport.subscriber(), []


def hold(station: SimpleNamespace) -> int:
    """Receive a version, and keep it."""
    station.held.append(station.subscriber.receive(SECONDS))
    return check(station.held[-1])


def held(station: SimpleNamespace) -> list[int]:
    """What is kept, checked again."""
    return [check(update) for update in station.held]


def receive(station: SimpleNamespace) -> int:
    return take(station.subscriber)


def receive_until(station: SimpleNamespace, last: int, seed: int, real_fence: bool = False) -> int:
    """Versions until ``last``, of which some are kept for a while and looked at again; how many were received."""
    if real_fence:
        use_real_fence(setattr)
    chance, kept, version, count = random.Random(seed), [], 0, 0
    while version < last:
        update = station.subscriber.receive(SECONDS)
        assert update.version > version
        version, count = check(update), count + 1
        station.subscriber.applied(update)
        kept.append(update)
        while len(kept) > chance.randrange(5):
            done = kept.pop(chance.randrange(len(kept)))
            check(done)
            done.release()
    for update in kept:
        check(update)
        update.release()
    return count


def in_a_child(station: SimpleNamespace) -> int:
    """Fork while a version is kept; the child, a server of its own, lets go of everything. Its exit status."""
    return ended(forked(_child, station))


def _child(station: SimpleNamespace) -> None:
    for update in station.held:
        update.release()
    assert take(station.subscriber) > 0
    station.subscriber.close()
    station.__dict__.clear()
    gc.collect()


def publish_without(station: SimpleNamespace, what: str, size: int) -> str:
    """Publish where there is no room for another block: the error; and publish again when there is."""
    kind = {"descriptors": resource.RLIMIT_NOFILE, "memory": resource.RLIMIT_AS}[what]
    limits, before = resource.getrlimit(kind), station.publisher.version
    source = weights(before + 1, size)
    resource.setrlimit(kind, (_in_use(what), limits[1]))
    try:
        station.publisher.publish(source)
    except OSError as error:
        text = str(error)
    finally:
        resource.setrlimit(kind, limits)
    assert station.publisher.version == before
    assert station.publisher.publish(source) == before + 1
    return text


def _in_use(what: str) -> int:
    if what == "descriptors":
        lowest_free = os.dup(0)
        os.close(lowest_free)
        return lowest_free
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize() + (1 << 20)


# A death at any line.


def sweep_publishers(station: SimpleNamespace, transport: Any) -> tuple[list[str], int, int]:
    """Kill the trainer at every line, each time replaced at once, while a server takes what comes.

    Returns:
        The lines, how many versions the server has received, and how many trainers have seen that one serves.
    """
    transport.subscriber().close()  # it is open from now on, for the children as well
    (counts, count), (marks, mark) = os.pipe(), os.pipe()
    server = forked(_serve_until_negative, transport, count)
    sweep, alive = Sweep(SWEPT), True
    while alive:
        alive = sweep.next(_train, transport, 10 * len(sweep.places), mark)
    with transport.publisher() as publisher:
        publisher.publish(weights(LAST))
        assert ended(server) == 0
    return sweep.places, int(os.read(counts, 20)), len(os.read(marks, 1 << 12))


LAST = -1.0
"""The value of the weights after which a server ends."""


def _train(transport: Any, first: int, mark: int, death: AtLine) -> None:
    with death:
        publisher = transport.publisher(version=first)
        for version in range(first + 1, first + 5):
            publisher.publish(weights(version))
        publisher.wait(first + 1, SECONDS)
        os.write(mark, b"s")
        publisher.close()


def _serve_until_negative(transport: Any, count: int) -> None:
    subscriber, received, last = transport.subscriber(), 0, 0
    while True:
        go_on()
        try:
            update = subscriber.receive(SECONDS)
        except PeerLostError:
            continue
        if float(update.weights["scale"]) == LAST:
            os.write(count, str(received).encode())
            return
        version = check(update)
        assert version > last, "a version came twice, or late"
        subscriber.applied(update)
        update.release()
        last, received = version, received + 1


def sweep_subscribers(station: SimpleNamespace, transport: Any) -> tuple[list[str], int]:
    """Kill a server at every line, each time replaced at once, while a trainer publishes to it and to another one.

    Returns:
        The lines, and how many blocks the trainer has at the end.
    """
    transport.subscriber().close()
    (stopped, stop), (ending, end), (counts, count) = os.pipe(), os.pipe(), os.pipe()
    trainer = forked(_train_until, transport, ending, count)
    survivor = forked(_serve_until, transport, stopped)
    sweep, alive = Sweep(SWEPT), True
    while alive:
        alive = sweep.next(_serve, transport)
    os.write(stop, b".")
    assert ended(survivor) == 0
    os.write(end, b".")
    assert ended(trainer) == 0
    return sweep.places, int(os.read(counts, 20))


def _serve(transport: Any, death: AtLine) -> None:
    with death:
        subscriber = transport.subscriber()
        first = subscriber.receive(SECONDS)
        subscriber.applied(first)
        check(first)
        second = subscriber.receive(SECONDS)
        check(first)
        first.release()
        subscriber.close()
        second.release()


def _train_until(transport: Any, ending: int, count: int) -> None:
    publisher = transport.publisher()
    while not select.select([ending], [], [], 0.001)[0]:
        go_on()
        publisher.publish(weights(publisher.version + 1))
    os.write(count, str(memory_files()).encode())


def _serve_until(transport: Any, stopped: int) -> None:
    subscriber = transport.subscriber()
    while not select.select([stopped], [], [], 0)[0]:
        go_on()
        take(subscriber)


def go_on() -> None:
    """A child that lives as long as the sweep does is not one that hangs."""
    faulthandler.cancel_dump_traceback_later()
    signal.alarm(int(SECONDS))


def memory_files() -> int:
    """How many anonymous files this process has open, but for what garbage has."""
    gc.collect()
    count = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            count += "/memfd:meshinfer" in os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:  # of the listing itself
            continue
    return count


def footprint(station: SimpleNamespace | None = None) -> tuple[int, int]:
    """Descriptors, and KiB of memory, of this process; of files that are mapped, only those that have no name."""
    gc.collect()
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    memory = sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem"))
    return len(os.listdir("/proc/self/fd")), memory


def elapsed(function: Callable[[], object]) -> float:
    began = time.monotonic()
    function()
    return time.monotonic() - began
