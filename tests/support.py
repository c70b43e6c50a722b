"""Helpers that several test files share."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import NoReturn, TypeVar

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


def no_more(now: Iterable[int], then: Iterable[int]) -> bool:
    """Whether no count has grown: what earlier tests have left may go meanwhile."""
    return all(after <= before for after, before in zip(now, then, strict=True))


def unavailable(reason: str) -> NoReturn:
    """Skip the test, for want of something that this machine may lack; fail it where everything must run."""
    if os.environ.get("MESHINFER_REQUIRE_ALL"):
        pytest.fail(f"{reason}, but MESHINFER_REQUIRE_ALL is set")
    pytest.skip(reason)
