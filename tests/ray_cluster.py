"""One local Ray for all tests, on the loopback interface."""

from __future__ import annotations

import importlib.util
import os
import secrets
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import warm
from support import unavailable, wait_until

SECONDS_TO_END = 60.0
MIB = 1 << 20
TESTS = Path(__file__).parent
_WORKER = str(TESTS / "warm" / "ray_worker.py")

# Ray reads them when it is imported, by whatever test that is.
os.environ.update(
    RAY_USAGE_STATS_ENABLED="0",
    RAY_DEDUP_LOGS="0",
    RAY_AUTH_MODE="token",  # by default it would leave a token in the home directory
    RAY_AUTH_TOKEN=secrets.token_hex(32),
    RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",  # how it is told to stay on the loopback interface
)

_roots: set[int] = set()
_own_ports: set[int] = set()


@contextmanager
def running() -> Iterator[Any]:
    """The module ``ray``, initialised; everything it started has ended afterwards."""
    if importlib.util.find_spec("ray") is None:
        unavailable("ray is not installed")
    # The workers inherit it, and find meshinfer and the modules of the tests.
    path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    variables = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", warm.VARIABLE: str(warm.address())}
    before = frozenset(psutil.Process().children()), _listening(os.getpid())
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # the paths of its sockets must be short
    import ray

    with _environment(**variables), _forked_workers():
        ray.init(
            num_cpus=4,
            include_dashboard=False,
            object_store_memory=80 * MIB,
            log_to_driver=False,
            configure_logging=False,
            _temp_dir=folder,
        )
    started = frozenset(psutil.Process().children()) - before[0]
    _roots.update(process.pid for process in started)
    _own_ports.update(_listening(os.getpid()) - before[1])
    try:
        yield ray
    finally:
        ours = [*started, *(child for each in started for child in _below(each.pid))]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # Ray does not close its log files
            ray.shutdown()
        left = _ended(ours)
        _roots.clear()
        _own_ports.clear()
        shutil.rmtree(folder, ignore_errors=True)
        assert not left, f"Ray left {left}"


@contextmanager
def _forked_workers() -> Iterator[None]:
    """The workers of a Ray that starts meanwhile are forked from a process that has imported torch."""
    services = importlib.import_module("ray._private.services")
    start = services.start_raylet

    def start_raylet(*args: Any, **kwargs: Any) -> Any:
        warm = [_WORKER if str(each).endswith("/setup_worker.py") else each for each in args]
        assert warm != [*args], "Ray starts its workers in another way"
        return start(*warm, **kwargs)

    services.start_raylet = start_raylet
    try:
        yield
    finally:
        services.start_raylet = start


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    saved = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in saved.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _below(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _ended(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that have not ended in time."""
    wait_until(lambda: not _living(processes), SECONDS_TO_END)
    return _living(processes)


def _living(processes: list[psutil.Process]) -> list[psutil.Process]:
    return [
        each for each in processes if each.is_running() and each.status() != psutil.STATUS_ZOMBIE
    ]


def owns(pid: int) -> bool:
    """Whether the process is Ray's, or was started by one of Ray's: these come and go as Ray likes."""
    if not _roots:
        return False
    try:
        if warm.is_forked(pid):
            return any(warm.stands_for(each, pid) for root in _roots for each in _below(root))
        return pid in _roots or any(each.pid in _roots for each in psutil.Process(pid).parents())
    except psutil.Error:
        return False


def ports() -> frozenset[int]:
    """At which Ray's processes listen, and this one for Ray."""
    found = set(_own_ports)
    for process in psutil.process_iter() if _roots else ():
        if owns(process.pid):
            found |= _listening(process.pid)
    return frozenset(found)


def _listening(pid: int) -> set[int]:
    try:
        connections = psutil.Process(pid).net_connections("tcp")
    except psutil.Error:  # it has ended, or belongs to another user
        return set()
    return {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}
