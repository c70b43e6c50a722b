"""What every test must leave as it found it: processes, threads, sockets, shared memory."""

from __future__ import annotations

import gc
import os
import signal
import threading
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray_cluster as rays
import warm
from hypothesis import HealthCheck, settings
from support import unavailable, wait_until

from meshinfer.optional import load_monarch
from meshinfer.testing.monarch_actors import MonarchWorkers

pytest_plugins = ["cluster.fixtures"]

# torch looks up the name of every address that it connects to. A resolver that answers seldom, as in
# many containers, would hold each up for seconds.
os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")

SHARED_MEMORY = Path("/dev/shm")
SECONDS_TO_SETTLE = 60.0

# Inherited by every process that a test starts, also by those whose parent has died.
SESSION_VARIABLE = "MESHINFER_TEST_SESSION"
SESSION = uuid.uuid4().hex

LASTING = ("ray_cluster", "monarch")
"""Fixtures that stay in the process that once had them."""
LARGE = ("test_monarch_transport", "test_service_backend")

call_passed = pytest.StashKey[bool]()

# How long an example takes says more of the machine than of what is tested.
settings.register_profile("unhurried", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unhurried")


@dataclass(frozen=True)
class Held:
    """What this process holds at one moment, and the ids of all processes of the machine."""

    processes: frozenset[int]
    threads: frozenset[threading.Thread]
    sockets: frozenset[Any]
    shared_memory: frozenset[str]

    @classmethod
    def now(cls) -> Held:
        return cls(
            processes=frozenset(psutil.pids()),
            threads=frozenset(t for t in threading.enumerate() if is_ours(t)),
            sockets=frozenset(
                (c.fd, c.laddr, c.raddr) for c in psutil.Process().net_connections("tcp")
            ),
            shared_memory=frozenset(os.listdir(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else ()),
        )

    def new_since(self, before: Held) -> dict[str, list[Any]]:
        new = {f.name: getattr(self, f.name) - getattr(before, f.name) for f in fields(self)}
        new["processes"] = frozenset(filter(started_here, new["processes"]))
        return {name: sorted(held, key=str) for name, held in new.items() if held}


def is_ours(thread: threading.Thread) -> bool:
    """Whether the library must have ended the thread by now.

    ``meshinfer-store`` is a call into torch's store that was given up: it cannot be ended, and ends
    by itself when torch's own timeout does (a connection that met a store which was closing).
    """
    return thread.name.startswith("meshinfer") and thread.name != "meshinfer-store"


def started_here(pid: int) -> bool:
    """Whether a test of this session started the process, itself or through another process."""
    lasting = resource_tracker._resource_tracker._pid, forkserver._forkserver._forkserver_pid
    if pid in (*lasting, *warm.standing()):  # these stay until the interpreter ends
        return False
    if rays.owns(pid):  # until the session ends
        return False
    try:
        process = psutil.Process(pid)
        return process.ppid() == os.getpid() or process.environ().get(SESSION_VARIABLE) == SESSION
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False


def pytest_configure() -> None:
    os.environ[SESSION_VARIABLE] = SESSION
    heed_signals()
    # monarch logs to one file of the user's, for all of its programs, unless it is given another name
    os.environ["MONARCH_LOG_SUFFIX"] = f"meshinfer_{SESSION}"


def heed_signals() -> None:
    """A shell has what it starts in the background ignore Ctrl-C, and all processes of the tests would inherit that."""
    for number, usual in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGTERM, signal.SIG_DFL),
    ):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


def pytest_unconfigure() -> None:
    for log in Path("/tmp").glob(f"*/monarch_log_meshinfer_{SESSION}*"):
        log.unlink(missing_ok=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with Ray or monarch in this process come last: nothing forks a process with their threads.

    Where several processes share the work, each takes whole groups: what is set up for one test serves its neighbours.
    The small ones are the last, so that all are done at about the same time.
    """
    items.sort(key=turn_of)
    for item in items:
        item.add_marker(pytest.mark.xdist_group(group_of(item)))


def turn_of(item: pytest.Item) -> int:
    """Ray's group is the largest; the tests of monarch are several, and the two in :data:`LARGE` take longest."""
    lasting = [name in fixtures_of(item) for name in LASTING]
    return 3 - (item.path.stem in LARGE) if lasting[1] else int(lasting[0])


def fixtures_of(item: pytest.Item) -> Sequence[str]:
    return getattr(item, "fixturenames", ())


def group_of(item: pytest.Item) -> str:
    for name in ("ray_cluster", "slurm"):
        if name in fixtures_of(item):
            return name
    if "monarch" in fixtures_of(item):
        return f"{item.path.stem}-monarch"
    place = getattr(item, "callspec", None) and item.callspec.params.get("place")  # type: ignore[attr-defined]
    return f"{item.path.stem}-{place}" if place else item.path.stem


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[Any]:
    """The module ``ray``, connected to a local cluster."""
    with rays.running() as ray:
        yield ray


@pytest.fixture(scope="session")
def ray_pool(ray_cluster: Any) -> Iterator[Any]:
    """Two actors for clients."""
    from meshinfer.testing.actors import ActorPool

    with ActorPool(2) as pool:
        yield pool


@pytest.fixture
def ray_actors(ray_pool: Any) -> Any:
    """The same, ready: those that the last test killed are replaced."""
    ray_pool.replenish()
    return ray_pool


@pytest.fixture(scope="session")
def monarch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """monarch, in this process from now on; its processes are forked from one that has imported torch."""
    for kind in (
        "ACTOR",
        "PROC",
    ):  # a process that imports torch answers nobody, for long on a busy machine
        os.environ.setdefault(f"HYPERACTOR_MESH_GET_{kind}_STATE_MAX_IDLE", "60s")
    try:
        monarch = load_monarch("this test")
    except ImportError as error:
        unavailable(str(error))
    with warm.warm_monarch(warm.python_command(tmp_path_factory.mktemp("monarch"))):
        monarch.context()
        yield


@pytest.fixture(scope="session")
def monarch_workers(monarch: None) -> Iterator[MonarchWorkers]:
    """Actors in processes of their own. Whoever may have killed one replenishes them."""
    with MonarchWorkers() as workers:
        yield workers


def pytest_collection_finish() -> None:
    """Keep what was imported out of every later collection, which it would make ten times slower."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report = yield
    if report.when == "call":
        item.stash[call_passed] = report.passed
    return report


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail the test that leaves a process, a thread, a TCP socket or shared memory behind."""
    before = Held.now()
    yield
    leaked = Held.now().new_since(before)
    if not leaked:
        return
    # After a failure the traceback keeps objects alive, so what they hold says nothing.
    passed = request.node.stash.get(call_passed, False)
    if passed:
        gc.collect()
        wait_until(lambda: not leaked_since(before), SECONDS_TO_SETTLE)
        leaked = leaked_since(before)
    for pid in leaked.get("processes", ()):
        kill(pid)
    if passed and leaked:
        pytest.fail(f"left behind: {describe(leaked)}")


def leaked_since(before: Held) -> dict[str, list[Any]]:
    """What is new, less the shared memory that a process of somebody else has mapped, and Ray's connections."""
    leaked = Held.now().new_since(before)
    ports = rays.ports() if "sockets" in leaked else frozenset()
    sockets = [each for each in leaked.get("sockets", ()) if not ports & ports_of(each)]
    names = set(leaked.get("shared_memory", ()))
    for pid in psutil.pids() if names else ():
        if pid != os.getpid() and not started_here(pid):
            mapped = mapped_files(pid)
            names -= {name for name in names if file_number(name) in mapped}
    kept = {**leaked, "shared_memory": sorted(names), "sockets": sockets}
    return {name: held for name, held in kept.items() if held}


def ports_of(connection: tuple[Any, ...]) -> set[int]:
    _, *ends = connection
    return {end.port for end in ends if end}


def mapped_files(pid: int) -> set[int]:
    """Their numbers: a semaphore gets its name after it was mapped, and whoever made it has it under none."""
    try:
        lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    except OSError:  # it has ended, or belongs to another user
        return set()
    return {int(line.split()[4]) for line in lines if f" {SHARED_MEMORY}/" in line}


def file_number(name: str) -> int | None:
    try:
        return (SHARED_MEMORY / name).stat().st_ino
    except FileNotFoundError:
        return None


def describe(leaked: dict[str, list[Any]]) -> str:
    return "; ".join(f"{name}: {', '.join(map(str, held))}" for name, held in leaked.items())


def kill(pid: int) -> None:
    try:
        psutil.Process(pid).kill()
    except psutil.NoSuchProcess:
        return
