"""Helpers that several test files share."""

from __future__ import annotations

import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn, TypeVar

import psutil
import pytest

T = TypeVar("T")

PRELOADED = ["pytest", "psutil", "meshinfer.testing.preloaded"]
"""For multiprocessing's fork server: what its processes would import otherwise. There is one server for all tests."""


def wait_until(predicate: Callable[[], T], timeout: float, interval: float = 0.01) -> T:
    """Call ``predicate`` until it is true or ``timeout`` seconds have passed; its last value.

    For what the kernel or another process does and nobody announces. Assert on the value.
    """
    deadline = time.monotonic() + timeout
    pause = threading.Event()
    while not (value := predicate()) and time.monotonic() < deadline:
        pause.wait(interval)
    return value


def is_gone(pid: int) -> bool:
    """Whether no such process runs; one that nobody has asked for its exit code does not."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def no_more(now: Iterable[int], then: Iterable[int]) -> bool:
    """Whether no count has grown: what earlier tests have left may go meanwhile."""
    return all(after <= before for after, before in zip(now, then, strict=True))


PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_turns = itertools.count(os.getpid() * 101)


def unused_port() -> int:
    """A port of 127.0.0.1 to listen at later: none that the system gives to who asks for any, such as other tests."""
    first = int(PORT_RANGE.read_text().split()[0])
    room = min(first - 1024, 12_000)
    for _ in range(room):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", first - 1 - next(_turns) % room))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    with socket.socket() as probe:  # the system has all ports, or they are all taken
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def deaf_port() -> Iterator[int]:
    """A port of 127.0.0.1 that refuses every connection, and that nobody else gets meanwhile."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])


def unavailable(reason: str) -> NoReturn:
    """Skip the test, for want of something that this machine may lack; fail it where everything must run."""
    if os.environ.get("MESHINFER_REQUIRE_ALL"):
        pytest.fail(f"{reason}, but MESHINFER_REQUIRE_ALL is set")
    pytest.skip(reason)
