"""Servers in a thread, a process and a monarch actor do the same; see test_service_backend_ray.py for Ray."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import process_roles as roles
import pytest
import service_table as table
import torch
from hidden import hide
from process_roles import Policy, ask
from service_roles import PLACES, SECONDS_TO_LEARN, Place, ends, modules_found

import meshinfer.server.setup
from meshinfer import (
    InferenceDeviceConfig,
    InferenceServer,
    InferenceServerConfig,
    MonarchInferenceServer,
    PeerLostError,
    ProcessInferenceServer,
    ThreadInferenceServer,
    TransportConfig,
)
from meshinfer.server.actor_life import ActorLife
from meshinfer.server.remote import RemoteInferenceServer
from meshinfer.server.signature import ServerArguments, ThreadArguments
from meshinfer.weights import WeightLayout

logger = logging.getLogger(__name__)

HERE = ("thread", "process", "monarch")
"""What needs no cluster."""


@pytest.fixture(scope="module", autouse=True)
def _modules() -> Iterator[None]:
    with modules_found():
        yield


@pytest.fixture(scope="module", autouse=True)
def _faults(monarch: None) -> None:
    """Of the processes that tests kill: monarch may tell of them when the test is long over, and ends pytest then."""
    import monarch.actor

    monarch.actor.unhandled_fault_hook = lambda failure: logger.debug("%s", failure.report())


@pytest.fixture(scope="module", params=HERE)
def place(request: pytest.FixtureRequest) -> Place:
    return PLACES[request.param]


@pytest.fixture(scope="module")
def folder(place: Place, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(place.backend)


@pytest.fixture(scope="module")
def server(place: Place, folder: Path) -> Iterator[Any]:
    server = table.start_shared(place, folder)
    yield server
    server.shutdown()


@pytest.mark.parametrize("behaviour", table.SHARED, ids=lambda behaviour: behaviour.__name__)
def test_a_server(behaviour: Any, server: Any, place: Place, folder: Path) -> None:
    behaviour(server, place, folder)


@pytest.mark.parametrize("backend", ["process", "monarch"])
def test_a_whole_life(backend: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    table.live(PLACES[backend], tmp_path, caplog)


@pytest.mark.parametrize("backend", ["process", "monarch"])
def test_a_start_that_takes_too_long_leaves_nothing(backend: str) -> None:
    with pytest.raises(TimeoutError, match=r"0\.3 s.*startup_timeout"):
        table.it_may_take_too_long_to_start(PLACES[backend])


def test_a_start_in_an_actor_can_be_given_up() -> None:
    table.it_can_be_given_up(PLACES["monarch"])


# The choice.


def test_the_class_follows_the_backend() -> None:
    assert type(InferenceServer(Policy())) is ThreadInferenceServer
    assert type(InferenceServer(model=Policy(), service_backend="thread")) is ThreadInferenceServer
    process = InferenceServer(policy_factory=Policy, service_backend="process")
    assert type(process) is ProcessInferenceServer
    monarch = InferenceServer(Policy, "distributed", service_backend="monarch", **SPECS)
    assert type(monarch) is MonarchInferenceServer
    for server in (process, monarch):
        assert isinstance(server, InferenceServer)
        server.shutdown()
    assert not issubclass(ProcessInferenceServer, ThreadInferenceServer)


SPECS: dict[str, Any] = {"request_spec": roles.request(0), "response_spec": roles.reply()}


def double(batches: list[Any]) -> Any:
    return torch.stack(batches)


def given() -> dict[str, Any]:
    """Each argument that all backends have, with a value that is not its default."""
    return {
        **SPECS,
        "num_slots": 3,
        "transport_options": {"timeout": 20.0},
        "max_batch_size": 5,
        "min_batch_size": 2,
        "timeout": 0.5,
        "static_batch_size": 6,
        "in_keys": ["a"],
        "out_keys": ["b"],
        "collate_fn": double,
        "policy_device": "cpu",
        "output_device": "meta",
        "policy_version": 7,
        "policy_version_key": ("of", "it"),
        "server_config": None,
        "device_config": None,
        "weight_transport": TransportConfig("distributed", {"spec": Policy()}),
    }


class Life:
    """Of a server that is made here, by whoever asks for it elsewhere."""

    policy_version, pid, exitcode, ended, is_ready = 0, None, None, False, True

    def __init__(self, setup: Any) -> None:
        self.setup = setup

    def wait_until_ready(self, timeout: float) -> None:
        self.setup.build()

    def stop(self, timeout: float) -> None:
        self.ended = True


@pytest.mark.parametrize("backend", ["process", "monarch"])
def test_every_argument_reaches_the_server(backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []

    def record(policy: Any, transport: Any, **arguments: Any) -> Any:
        made.append({"policy": policy, "transport": transport, **arguments})
        transport.close()
        return SimpleNamespace(own_model=lambda: None)

    monkeypatch.setattr(meshinfer.server.setup, "ThreadInferenceServer", record)
    owner = {"process": ProcessInferenceServer, "monarch": MonarchInferenceServer}[backend]
    monkeypatch.setattr(owner, "_begin", lambda self, setup: Life(setup))
    arguments = given()
    assert arguments.keys() == {*ServerArguments.__annotations__}
    with InferenceServer(Policy, "distributed", service_backend=backend, **arguments) as server:
        assert server.config == InferenceServerConfig(5, 2, 0.5, static_batch_size=6)
        assert server.transport.timeout == 20.0  # type: ignore[attr-defined]
    (found,) = made
    assert type(found.pop("policy")) is Policy
    assert found.pop("transport").timeout == 20.0
    assert found.pop("collate_fn").__name__ == "double"
    assert found.pop("weight_transport").layout == WeightLayout.from_spec(Policy())
    assert found == {
        "in_keys": ["a"],
        "out_keys": ["b"],
        "policy_version": 7,
        "policy_version_key": ("of", "it"),
        "share_weights": True,
        "server_config": server.config,
        "device_config": InferenceDeviceConfig("cpu", "meta"),
    }


def test_all_backends_have_the_same_arguments() -> None:
    common = {*ServerArguments.__annotations__}
    assert arguments_of(RemoteInferenceServer) == common | {"startup_timeout"}
    assert arguments_of(ThreadInferenceServer) == common | {*ThreadArguments.__annotations__}


def arguments_of(server: type) -> set[str]:
    return {*server.__init__.__kwdefaults__}


def collate(batches: list[Any]) -> Any:
    whole = torch.stack(batches)
    return whole.set("x", whole["x"] + 100)


def test_a_collate_fn_is_sent_as_the_factory_is() -> None:
    with (
        PLACES["process"].server(Policy, "queue", collate_fn=collate, **NOTHING) as server,
        server.client() as client,
    ):
        assert client(roles.request(1.0), roles.SECONDS)["y"].item() == 101.0


NOTHING: dict[str, Any] = {"request_spec": None, "response_spec": None, "num_slots": None}

# Arguments that cannot work.


@pytest.mark.parametrize(
    ("backend", "options", "error", "text"),
    [
        ("fork", None, ValueError, "service_backend='fork'.*'thread', 'process', 'ray', 'monarch'"),
        (None, None, ValueError, "service_backend=None.*'thread'"),
        ("thread", {"mp_context": "fork"}, TypeError, "'thread' has no option 'mp_context'.*none"),
        ("process", {"num_gpus": 1}, TypeError, "'process' has no.*'num_gpus'.*'mp_context'"),
        ("ray", {"num_gpus": 1}, TypeError, "'ray' has no option 'num_gpus'.*'remote_options'"),
        ("monarch", {"procs": 1}, TypeError, "no option 'procs'.*'host_mesh', 'proc_mesh'"),
        ("process", ["mp_context"], TypeError, "service_backend_options.*found list"),
        ("process", {"mp_context": "thread"}, ValueError, "mp_context='thread'"),
        ("process", {"startup_timeout": 0}, ValueError, "startup_timeout=0"),
        ("monarch", {"startup_timeout": "1"}, TypeError, "startup_timeout='1'"),
        ("monarch", {"proc_mesh": 3}, TypeError, "proc_mesh: expected a monarch ProcMesh.*int"),
        ("monarch", {"host_mesh": 3}, TypeError, "host_mesh: expected a monarch HostMesh.*int"),
    ],
)
def test_backends_and_options_that_there_are_not(
    backend: Any, options: Any, error: type[Exception], text: str
) -> None:
    policy = Policy() if backend == "thread" else Policy
    with pytest.raises(error, match=text):
        InferenceServer(policy, service_backend=backend, service_backend_options=options)


@pytest.mark.parametrize("backend", ["process", "monarch"])
@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"policy_factory": Policy()}, TypeError, "policy_factory.*returns the policy, found Pol"),
        (
            {"policy_factory": functools.partial(Policy, threading.Lock())},
            TypeError,
            "policy_factory=.*cannot be sent to the server's",
        ),
        ({"policy_factory": Policy, "collate_fn": 3}, TypeError, "collate_fn.*found int"),
        ({"policy_factory": Policy, "share_weights": True}, TypeError, "'share_weights'"),
        ({"policy_factory": Policy, "startup_timeout": 3}, TypeError, "service_backend_options"),
        ({"policy_factory": Policy, "policy_version": -1}, ValueError, "policy_version"),
        ({"policy_factory": Policy, "transport": "slot"}, ValueError, "'slot' does not work with"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_arguments_that_cannot_work(
    backend: Any, arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        InferenceServer(service_backend=backend, **arguments)


def test_each_backend_names_the_transports_that_it_allows() -> None:
    with pytest.raises(
        ValueError, match=r"'ray' does not work with policy_backend='monarch'.*'mon"
    ):
        InferenceServer(Policy, "ray", service_backend="monarch")
    with pytest.raises(ValueError, match=r"'monarch' does not work with policy_backend='multipro"):
        InferenceServer(Policy, "monarch", service_backend="process")


@pytest.mark.parametrize(
    ("backend", "package", "command"),
    [
        ("ray", "ray", r"pip install 'meshinfer\[ray\]'"),
        ("monarch", "monarch", "pip install torchmonarch"),
    ],
)
def test_a_missing_package_is_told_with_the_command(
    backend: Any, package: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(package, monkeypatch)
    with pytest.raises(
        ImportError, match=f"service_backend='{backend}' needs {package}: {command}"
    ):
        InferenceServer(Policy, service_backend=backend)


# Processes that were given.


def test_a_given_process_outlives_its_servers() -> None:
    import monarch.actor

    procs = monarch.actor.this_host().spawn_procs(per_host={"procs": 1}, name="given")
    options = {"proc_mesh": procs}
    try:
        for _ in range(2):
            server = PLACES["monarch"].server(
                Policy, "distributed", service_backend_options=options
            )
            with server, server.client() as client:
                ask(client)
                pid = server.pid
        server = PLACES["monarch"].server(Policy, "distributed", service_backend_options=options)
        with server:
            assert server.pid == pid
            table.os.kill(pid, table.signal.SIGKILL)
            assert ends(pid)
            with pytest.raises(PeerLostError):
                server.stats()
            with pytest.raises(RuntimeError, match=r"process of proc_mesh.*host_mesh"):
                server.start()
    finally:
        procs.stop().get(timeout=SECONDS_TO_LEARN)


def test_who_has_started_a_server_knows_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though another thread is told."""
    met = ActorLife._met

    def late(life: ActorLife, where: Any) -> None:
        time.sleep(0.5)
        met(life, where)

    monkeypatch.setattr(ActorLife, "_met", late)
    with PLACES["monarch"].server(Policy, "distributed") as server:
        assert server.pid is not None


def test_a_server_needs_one_process() -> None:
    import monarch.actor

    host = monarch.actor.this_host()
    procs = host.spawn_procs(per_host={"procs": 2}, name="pair")
    try:
        with pytest.raises(ValueError, match=r"2 processes.*lives in one"):
            MonarchInferenceServer(Policy, proc_mesh=procs)
        with pytest.raises(ValueError, match="proc_mesh and host_mesh"):
            MonarchInferenceServer(Policy, proc_mesh=procs.slice(procs=0), host_mesh=host)
    finally:
        procs.stop().get(timeout=SECONDS_TO_LEARN)
