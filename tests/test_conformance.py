"""Every transport keeps every promise, in threads and in processes of every start method."""

from __future__ import annotations

import inspect
import pkgutil
import threading
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from conformance_rows import ROWS, Row
from support import PRELOADED

from meshinfer.testing import (
    CONFORMANCE_CHECKS,
    ActorPool,
    ConformanceCheck,
    ProcessHarness,
    RayHarness,
    ThreadHarness,
    TransportHarness,
    WorkerPool,
    checks,
    raises,
    report,
    run_conformance,
)
from meshinfer.testing.monarch_actors import MonarchHarness, MonarchWorkers
from meshinfer.transport import INFERENCE_TRANSPORTS

SECONDS = 60.0
SECONDS_TO_IMPORT = 100.0
"""For a new interpreter on a busy machine."""

BY_NAME = {check.name: check for check in CONFORMANCE_CHECKS}

# What a start method can spoil: what a client is made of when it gets there, and what it inherits. New interpreters
# take seconds to start, so those have only checks that need one of them.
SPAWNED = (
    "a_reply_never_changes_later",
    "an_exception_keeps_its_type_and_traceback",
    "a_class_that_only_the_server_knows_is_described",
    "a_client_is_a_context_manager",
    "a_client_can_be_pickled",
)
FORKED = (
    "each_client_gets_its_own_replies",
    "rows_of_a_batch_go_to_their_requests",
    "a_reply_never_changes_later",
    "a_burst_of_timeouts_does_no_damage",
    "an_exception_keeps_its_type_and_traceback",
    "waiting_clients_learn_that_the_server_closed",
    "closing_gives_up_what_is_in_flight",
    "a_client_is_a_context_manager",
    "a_killed_client_hinders_nobody",
    "a_killed_server_is_noticed",
)
# Likewise, with no more than two clients at once.
ACTORS = (
    *SPAWNED,
    "rows_of_a_batch_go_to_their_requests",
    "a_burst_of_timeouts_does_no_damage",
    "closing_gives_up_what_is_in_flight",
    "a_flood_is_answered_in_full",
    "a_killed_client_hinders_nobody",
)
SUITES = {
    "threads": tuple(BY_NAME),
    "threads-inline": tuple(BY_NAME),
    "forkserver": tuple(BY_NAME),
    "spawn": SPAWNED,
    "fork": FORKED,
    "ray-threads": tuple(BY_NAME),
    "ray-actors": ACTORS,
    "monarch-threads": tuple(BY_NAME),
    "monarch-actors": (*FORKED, "a_client_can_be_pickled"),
}
RUNTIMES = ("ray-", "monarch-")


def cases(runtime: str = "") -> Iterator[Any]:
    """Each check of each transport in each place with a runtime, but those that say nothing there."""
    for row in ROWS:
        for place in row.places:
            if not place.startswith(runtime or place) or place.startswith(RUNTIMES) != bool(
                runtime
            ):
                continue
            harness = harness_for(row, place, WorkerPool())
            for name in SUITES[place]:
                if BY_NAME[name].applies_to(harness):
                    yield pytest.param(row, place, BY_NAME[name], id=f"{row.name}-{place}-{name}")


def harness_for(row: Row, place: str, pool: WorkerPool | None) -> TransportHarness:
    if "threads" in place:
        return ThreadHarness(row.factory, **row.capabilities)
    assert pool is not None
    if isinstance(pool, ActorPool):
        return RayHarness(row.factory, workers=pool, **row.capabilities)
    if isinstance(pool, MonarchWorkers):
        return MonarchHarness(row.factory, workers=pool, **row.capabilities)
    return ProcessHarness(row.factory, workers=pool, **row.capabilities)


@pytest.fixture(scope="module")
def forkserver() -> Iterator[WorkerPool]:
    with WorkerPool(preload=PRELOADED) as pool:
        yield pool


@pytest.fixture(scope="module")
def spawn() -> Iterator[WorkerPool]:
    with WorkerPool(1, "spawn") as pool:
        pool.run(len, []).result(SECONDS_TO_IMPORT)
        yield pool


@pytest.fixture(scope="module")
def fork() -> Iterator[WorkerPool]:
    with WorkerPool(start_method="fork") as pool:
        yield pool


@pytest.fixture
def pool(request: pytest.FixtureRequest, place: str) -> WorkerPool | None:
    """The processes of one start method, all of them ready."""
    if "threads" in place:
        return None
    pool: WorkerPool = request.getfixturevalue(
        "monarch_workers" if place == "monarch-actors" else place.replace("-", "_")
    )
    pool.replenish()
    return pool


@pytest.fixture
def place() -> str:
    """Where the clients are; by parameter."""
    return "threads"


@pytest.fixture(autouse=True)
def nothing_left_behind(pool: WorkerPool | None, nothing_left_behind: None) -> None:
    """Workers outlive each test: those that the last one killed are replaced before it is looked around."""


@pytest.mark.parametrize(("row", "place", "check"), list(cases()))
def test_the_promise(
    row: Row, place: str, check: ConformanceCheck, pool: WorkerPool | None
) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if place == "threads-inline" else 2)
    try:
        check(harness_for(row, place, pool))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("row", "place", "check"), list(cases("ray-")))
def test_the_promise_under_ray(
    row: Row, place: str, check: ConformanceCheck, ray_cluster: Any, pool: WorkerPool | None
) -> None:
    check(harness_for(row, place, pool))


@pytest.mark.parametrize(("row", "place", "check"), list(cases("monarch-")))
def test_the_promise_under_monarch(
    row: Row, place: str, check: ConformanceCheck, monarch: None, pool: WorkerPool | None
) -> None:
    check(harness_for(row, place, pool))


def test_every_transport_is_here() -> None:
    """In threads, and where the compatibility table says so, in processes.

    But for gloo between monarch's actors, which test_monarch_mesh.py has: their processes take long to start.
    """
    for entry in INFERENCE_TRANSPORTS:
        factories = [row for row in ROWS if row.kind == entry.kind]
        for backend, place in (
            ("threading", "threads"),
            ("multiprocessing", "forkserver"),
            ("ray", "ray-actors"),
            ("monarch", "monarch-actors"),
        ):
            if backend in entry.policy_backends and (entry.kind, backend) != (
                "distributed",
                "monarch",
            ):
                places = [each for row in factories for each in row.places]
                assert any(each.endswith(place) for each in places), (entry.class_name, place)


def test_what_does_not_apply_is_left_out() -> None:
    names = ["a_client_can_be_pickled", "a_client_is_a_context_manager"]
    harness = ThreadHarness(ROWS[0].factory)
    assert run_conformance(harness, [BY_NAME[name] for name in names]) == names[1:]


def test_every_check_is_in_the_suite() -> None:
    modules = [
        import_module(f"{checks.__name__}.{m.name}") for m in pkgutil.iter_modules(checks.__path__)
    ]
    written = {x for m in modules for x in vars(m).values() if isinstance(x, ConformanceCheck)}
    assert len(modules) == 9
    assert written == set(CONFORMANCE_CHECKS)
    assert len(BY_NAME) == len(CONFORMANCE_CHECKS)


def test_every_promise_is_one_sentence() -> None:
    for check in CONFORMANCE_CHECKS:
        assert check.promise.endswith("."), check.name
        assert "\n" not in check.promise, check.name
        assert inspect.getdoc(check.function) == check.promise, check.name


def test_raises_fails_without_the_error_that_is_expected() -> None:
    with pytest.raises(AssertionError, match="nothing was raised"), raises(ValueError):
        pass
    with pytest.raises(AssertionError, match="obs"), raises(ValueError, "obs"):
        raise ValueError("action")
    with pytest.raises(KeyError), raises(ValueError):
        raise KeyError("obs")


@pytest.mark.parametrize("place", ["forkserver", "fork"])
def test_a_client_that_dies_ends_its_run(place: str, pool: WorkerPool) -> None:
    run = pool.run(_report_and_wait, None)
    assert run.next_report(SECONDS) == "here"
    run.kill()
    with pytest.raises(ChildProcessError):
        run.result(SECONDS)


def _report_and_wait(_: None) -> None:
    report("here")
    threading.Event().wait()
