"""Servers in processes of their own: starting, serving, updating, dying, and leaving nothing."""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import multiprocessing
import os
import pickle
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import process_roles as roles
import psutil
import pytest
import torch
from failure_roles import crew
from process_roles import HELD, SECONDS, Policy, ask, reply, request, serving, serving_options
from support import is_gone, no_more, wait_until
from tensordict import TensorDict, TensorDictParams

from meshinfer import (
    ClosedError,
    DistributedTransport,
    InferenceServerConfig,
    PeerLostError,
    ProcessInferenceServer,
    RemoteError,
    ServerClosedError,
    TransportConfig,
    TransportError,
    make_inference_transport,
)
from meshinfer.transport import INFERENCE_TRANSPORTS

KINDS = sorted(
    {row.kind for row in INFERENCE_TRANSPORTS if "multiprocessing" in row.policy_backends}
)
SECONDS_TO_LEARN = 20.0
"""Within which a client must learn that its server is dead. Two on a machine that is not busy."""

every_kind = pytest.mark.parametrize("kind", KINDS)


def signal_server(server: ProcessInferenceServer, number: int) -> None:
    assert server.pid is not None
    os.kill(server.pid, number)


def has_ended(server: ProcessInferenceServer) -> bool:
    return wait_until(lambda: not server.is_alive, SECONDS)


# Serving.


@every_kind
def test_clients_made_before_and_after_the_start_are_served(kind: str) -> None:
    server = ProcessInferenceServer(Policy, kind, **serving_options(policy_version=4))
    early = server.client()
    assert (server.pid, server.is_alive, server.policy_version) == (None, False, 4)
    assert "not started" in repr(server)
    with server, crew(1) as (worker,):
        assert server.is_alive
        assert ask(early)["policy_version"].item() == 4
        for client in server.clients(2):
            with client:
                ask(client)
        worker.call(roles.become_client, server.client())
        assert wait_until(lambda: server.stats().requests == 4, SECONDS)
        assert server.stats(reset=True).policy_version == 4
        assert server.stats().requests == 0
        health = server.health(timeout=SECONDS)
        assert (health.process_alive, health.serving, health.error) == (True, True, None)
        assert (health.pid, health.exitcode, health.policy_version) == (server.pid, None, 4)
        assert server.pid not in (None, os.getpid())
        assert f"pid {server.pid}" in repr(server)
        assert server.transport_kind == kind
        assert server.transport_config == TransportConfig(kind)
        early.close()
        worker.call(roles.leave)


def test_a_spawned_process_serves() -> None:
    """Whether it is handed an address (``"distributed"`` is no other) or memory, as ``"process_slot"`` is in
    test_process_server_ends.py.
    """
    kinds = ("queue", "shared_memory")
    with ThreadPoolExecutor(len(kinds)) as pool:
        list(pool.map(serve_spawned, kinds))


def serve_spawned(kind: str) -> None:
    options = serving_options(mp_context="spawn")
    server = ProcessInferenceServer(Policy, kind, **options)
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(server.start)
        assert wait_until(lambda: server.pid, SECONDS)
        signal_server(server, signal.SIGINT)  # as from Ctrl-C, long before Python runs there
        assert started.result(2 * SECONDS) is server
    with server, server.client() as client:
        signal_server(server, signal.SIGINT)
        ask(client)


@every_kind
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_every_kind_is_served_from_a_forked_process(kind: str) -> None:
    with serving(kind, mp_context="fork") as server, server.client() as client:
        assert ask(client)["threads"].item() == 1


def test_auto_depends_on_the_specs() -> None:
    options = serving_options()
    with ProcessInferenceServer(Policy, **options) as server, server.client() as client:
        assert server.transport_kind == "shared_memory"
        assert server.transport_config == TransportConfig("auto")
        ask(client)
    for name in ("request_spec", "response_spec", "num_slots"):
        del options[name]
    with ProcessInferenceServer(Policy, **options) as server, server.client() as client:
        assert server.transport_kind == "queue"
        ask(client)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "distributed"])
def test_a_ready_transport_is_served(kind: str) -> None:
    facts = {key: serving_options()[key] for key in ("num_slots", "request_spec", "response_spec")}
    transport = make_inference_transport(kind, policy_backend="multiprocessing", **facts)
    with serving(transport, num_slots=None, request_spec=None, response_spec=None) as server:
        assert server.transport is transport
        assert (server.transport_kind, server.transport_config) == (kind, None)
        with server.client() as client:
            ask(client)


def test_the_server_is_made_as_it_was_asked_for() -> None:
    config = InferenceServerConfig(static_batch_size=4)
    factory = functools.partial(roles.with_threads, 2)
    options = {"server_config": config, "policy_device": "cpu", "policy_version_key": ("of", "it")}
    with serving("distributed", factory, **options) as server, server.client() as client:
        assert server.config == config
        assert server.prepare() is server
        answer = ask(client)
        assert (answer["rows"].item(), answer["threads"].item()) == (4, 2)
        assert answer["of", "it"].item() == 0
        assert wait_until(lambda: server.stats().requests == 1, SECONDS)  # none of prepare's


def test_keys_make_a_policy_of_a_plain_module() -> None:
    plain = functools.partial(torch.nn.Linear, 1, 1)
    specs = {"response_spec": TensorDict({"y": torch.zeros(1)}, [])}
    with serving("process_slot", plain, in_keys=["x"], out_keys=["y"], **specs) as server:
        weights = {"weight": torch.full((1, 1), 3.0), "bias": torch.ones(1)}
        assert server.update_model_weights(weights) == 1
        with server.client() as client:
            assert client(request(2.0), SECONDS)["y"].item() == 7.0


# Weights.


@every_kind
def test_weights_change_between_batches_and_replies_say_which(kind: str) -> None:
    with serving(kind) as server, crew(1) as (worker,):
        worker.call(roles.become_client, server.client())
        worker.begin(roles.ask_until_told)
        for version in range(3, 60, 2):
            changed = Policy().like(version)
            assert server.update_model_weights(changed.state_dict(), version) == version
            assert server.policy_version == version
        worker.tell()
        replies = worker.outcome().get()
        # y = weight + offset, both of which are the version
        assert {y == 2.0 * (version or 0.5) for y, version in replies} == {True}
        with server.client() as client:
            assert client(request(1.0), SECONDS)["y"].item() == 2 * 59
        worker.call(roles.leave)


def test_weights_come_in_every_form_that_a_trainer_has() -> None:
    source = Policy().like(5.0)
    forms = [
        source,
        source.state_dict(),
        TensorDict.from_module(source),
        TensorDictParams(TensorDict.from_module(source).data.clone()),
        {f"_orig_mod.{name}": value for name, value in source.state_dict().items()},
        {"weight": torch.tensor([5], dtype=torch.int32), "offset": torch.tensor([5.0]).bfloat16()},
    ]
    with serving() as server, server.client() as client:
        for version, form in enumerate(forms, start=1):
            server.update_model_weights(Policy().like(-1.0).state_dict(), 0)
            assert server.update_policy_weights_(form, version=version) == version
            answer = client(request(1.0), SECONDS)
            assert (answer["y"].item(), answer["policy_version"].item()) == (10.0, version)


def test_weights_that_do_not_fit_are_refused_by_name() -> None:
    good = Policy().state_dict()
    with serving() as server, server.client() as client:
        with pytest.raises(ValueError, match="'offset'") as caught:
            server.update_model_weights({"weight": torch.zeros(1)})
        assert "Remote traceback" in str(caught.value.__cause__)
        with pytest.raises(ValueError, match="'extra'"):
            server.update_model_weights({**good, "extra": torch.zeros(1)})
        with pytest.raises(ValueError, match=r"'weight'.*shape"):
            server.update_model_weights(
                {**good, "offset": good["offset"] + 1, "weight": torch.zeros(2)}
            )
        with pytest.raises(TypeError, match=r"'weight'.*str"):
            server.update_model_weights({**good, "weight": "heavy"})
        with pytest.raises(TypeError, match=r"weights.*int"):
            server.update_model_weights(3)
        with pytest.raises(ValueError, match="version=-1"):
            server.update_model_weights(good, -1)
        assert ask(client)["policy_version"].item() == server.policy_version == 0


def test_a_function_has_no_weights() -> None:
    with serving("process_slot", roles.doubling_function) as server, server.client() as client:
        assert client(request(2.0), SECONDS)["y"].item() == 4.0
        with pytest.raises(TypeError, match="function"):
            server.update_model_weights({})


# Starting.


def test_errors_of_the_factory_are_raised_in_the_parent() -> None:
    with (
        pytest.raises(roles.NoPolicyError, match="no policy here") as caught,
        serving(factory=roles.raising),
    ):
        pass
    assert isinstance(caught.value.__cause__, RemoteError)
    assert "in raising" in caught.value.__cause__.traceback_text
    for factory, kind, text in (
        (roles.raising_unpicklable, RemoteError, "Unpicklable: locked in"),
        (roles.exiting, RemoteError, "SystemExit: no policy today"),
        (roles.exiting_at_once, PeerLostError, "exited with code 3 before it was ready"),
        (roles.killed, PeerLostError, "was killed by SIGKILL before it was ready"),
        (roles.not_a_policy, TypeError, "found int"),
    ):
        with pytest.raises(kind, match=text), serving(factory=factory):
            pass


@every_kind
def test_a_start_that_failed_can_be_tried_again(kind: str, tmp_path: Path) -> None:
    factory = functools.partial(roles.failing_once, tmp_path / "marker")
    server = ProcessInferenceServer(factory, kind, **serving_options())
    client = server.client()
    with pytest.raises(roles.NoPolicyError):
        server.start()
    assert not server.is_alive
    assert server.health().exitcode == 1
    with pytest.raises(PeerLostError, match="exited with code 1"):
        server.stats()
    with server.start(), client:
        ask(client)


@every_kind
def test_errors_of_the_construction_are_raised_in_the_parent(kind: str) -> None:
    server = ProcessInferenceServer(Policy, kind, **serving_options(output_device="meta"))
    for _ in range(2):
        with pytest.raises(ValueError, match="output_device"):
            server.start()
    server.shutdown()


def test_a_start_that_takes_too_long_leaves_nothing() -> None:
    server = ProcessInferenceServer(
        roles.never, "distributed", **serving_options(startup_timeout=0.3)
    )
    with pytest.raises(TimeoutError, match=r"0\.3 s.*startup_timeout"):
        server.start()
    assert server.pid is not None
    assert is_gone(server.pid)
    assert server.health().exitcode == -signal.SIGKILL
    server.shutdown()


def test_a_start_can_be_given_up_from_another_thread() -> None:
    server = ProcessInferenceServer(roles.never, "process_slot", **serving_options())
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(server.start)
        assert wait_until(lambda: server.pid, SECONDS)
        server.shutdown()
        with pytest.raises(ClosedError):
            started.result(SECONDS)
    assert server.pid is not None
    assert is_gone(server.pid)


def test_only_one_process_is_started() -> None:
    with serving() as server:
        pid = server.pid
        with pytest.raises(RuntimeError, match="started already"):
            server.start()
        assert server.pid == pid
        assert server.is_alive


def test_calls_before_the_start_say_so() -> None:
    server = ProcessInferenceServer(Policy, "process_slot", **serving_options())
    with pytest.raises(RuntimeError, match="not started"):
        server.stats()
    with pytest.raises(RuntimeError, match="not started"):
        server.update_model_weights(Policy())
    health = server.health()
    assert (health.process_alive, health.serving) == (False, False)
    assert "not started" in str(health.error)
    server.shutdown()


def local_factory() -> Any:
    def make() -> Policy:
        return Policy()

    return make


@pytest.mark.parametrize(
    ("factory", "text"),
    [
        (lambda: Policy(), "module"),
        (local_factory(), "module"),
        (functools.partial(Policy, threading.Lock()), "module"),
        (Policy(), "found Policy"),
        ("policy", "found str"),
    ],
    ids=["lambda", "closure", "unpicklable argument", "module", "text"],
)
def test_a_factory_that_cannot_be_sent_is_refused(factory: Any, text: str) -> None:
    with pytest.raises(TypeError, match=f"policy_factory.*{text}"):
        ProcessInferenceServer(factory, "process_slot", **serving_options())


def test_arguments_that_cannot_work_are_refused_at_construction() -> None:
    def made(transport: Any = "process_slot", **options: Any) -> ProcessInferenceServer:
        return ProcessInferenceServer(Policy, transport, **serving_options(**options))

    with pytest.raises(ValueError, match=r"mp_context='thread'.*'spawn'"):
        made(mp_context="thread")
    with pytest.raises(ValueError, match="startup_timeout"):
        made(startup_timeout=0.0)
    with pytest.raises(ValueError, match="policy_version"):
        made(policy_version=-1)
    with pytest.raises(ValueError, match="max_batch_size"):
        made(max_batch_size=0)
    with pytest.raises(ValueError, match="server_config"):
        made(max_batch_size=2, server_config=InferenceServerConfig())
    with pytest.raises(ValueError, match="num_slots"):
        made(num_slots=None)
    with pytest.raises(ValueError, match="slot"):
        made("slot")
    with pytest.raises(ValueError, match="'role'"):
        made("distributed", transport_options={"role": "server"})
    with pytest.raises(TypeError, match="'colour'"):
        made(TransportConfig("distributed", {"colour": "red"}))
    alone = {"num_slots": None, "request_spec": None, "response_spec": None}
    with pytest.raises(ValueError, match="num_slots"):
        made(make_inference_transport("queue"), num_slots=2)
    with pytest.raises(TypeError, match=r"ThreadingTransport.*serve_elsewhere"):
        made(make_inference_transport("queue"), **alone)
    with (
        DistributedTransport(request(0), reply()) as ready,
        pytest.raises(ValueError, match="transport='distributed'"),
    ):
        made(ready, **alone)


def test_options_of_the_distributed_transport_reach_both_sides() -> None:
    options = {"secret": "of the test", "host": "127.0.0.2", "timeout": 20.0}
    for choice, extra in (
        (TransportConfig("distributed", options), None),
        ("distributed", {**options, "interface": "127.0.0.3"}),
    ):
        with serving(choice, transport_options=extra) as server, server.client() as client:
            ask(client)
            assert server.pid is not None
            there = psutil.Process(server.pid).net_connections("tcp")
            heard = {c.laddr.ip for c in there if c.status == psutil.CONN_LISTEN}
            assert heard == {"127.0.0.3" if extra else "127.0.0.2"}


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_the_start_method_may_be_a_context_or_the_transports() -> None:
    forked = {"mp_context": None, "transport_options": {"ctx": "fork"}}
    for options in (forked, {"mp_context": multiprocessing.get_context("fork")}):
        with serving("process_slot", **options) as server:
            assert server.pid is not None
            assert psutil.Process(server.pid).ppid() == os.getpid()
            assert psutil.Process(server.pid).cmdline() == psutil.Process().cmdline()


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_the_server_stays_where_it_was_made() -> None:
    with serving() as server, server.client() as client:
        with pytest.raises(TypeError, match=r"server\.client\(\)"):
            pickle.dumps(server)
        ours, theirs = multiprocessing.Pipe()
        if (pid := os.fork()) == 0:
            try:
                theirs.send(use_in_a_fork(server))
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        assert ours.poll()
        assert "belongs to process" in ours.recv()
        ours.close()
        theirs.close()
        ask(client)


def use_in_a_fork(server: ProcessInferenceServer) -> str | None:
    server.shutdown()
    return server.health().error


def test_where_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    options = serving_options(mp_context="fork")
    server = ProcessInferenceServer(Policy, "process_slot", **options)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(RuntimeError, match=r"'fork'.*CUDA.*'spawn'"):
        server.start()
    monkeypatch.undo()
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)
    with pytest.raises(RuntimeError, match="daemon"):
        server.start()
    monkeypatch.undo()
    assert server.pid is None
    server.shutdown()


# Calls.


def test_four_threads_may_call_at_once() -> None:
    def call(server: ProcessInferenceServer, versions: list[int]) -> None:
        for _ in range(25):
            versions.append(server.update_model_weights(Policy()))
            assert server.stats().policy_version >= versions[-1]
            assert server.health(timeout=SECONDS).serving
            assert server.policy_version >= versions[-1]

    with serving() as server, ThreadPoolExecutor(4) as pool:
        versions: list[list[int]] = [[] for _ in range(4)]
        for done in [pool.submit(call, server, own) for own in versions]:
            done.result(SECONDS)
        assert sorted(itertools.chain.from_iterable(versions)) == list(range(1, 101))
        assert all(own == sorted(own) for own in versions)


def test_a_process_that_does_not_answer_holds_no_caller_up() -> None:
    with serving() as server, server.client() as client:
        large = Policy().like(3.0).state_dict() | {"scratch": torch.zeros(1)}
        signal_server(server, signal.SIGSTOP)
        try:
            with pytest.raises(TimeoutError, match=r"stats within 0\.1 s"):
                server.stats(timeout=0.1)
            for _ in range(3):
                huge = {**large, "padding": torch.zeros(1_000_000)}
                with pytest.raises(TimeoutError, match="update_weights"):
                    server.update_model_weights(huge, timeout=0.1)
            health = server.health(timeout=0.1)
            assert (health.process_alive, health.serving) == (True, False)
            assert "health within" in str(health.error)
        finally:
            signal_server(server, signal.SIGCONT)
        assert server.health(timeout=SECONDS).serving
        assert server.update_model_weights(large) == 1
        assert client(request(1.0), SECONDS)["y"].item() == 6.0


def test_a_stopped_process_is_shut_down_in_time() -> None:
    with serving() as server:
        signal_server(server, signal.SIGSTOP)
        server.shutdown(timeout=0.0)
        assert server.health().exitcode == -signal.SIGKILL


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    path = tmp_path / "gate"
    os.mkfifo(path)
    return path


def hold(client: Any, gate: Path) -> Any:
    """A request that the policy is computing, until the gate is opened."""
    ask(client)
    future = client.submit(request(HELD))
    assert wait_until(gate.with_name("held").exists, SECONDS)
    return future


def test_a_busy_policy_delays_nothing_but_updates(gate: Path) -> None:
    factory = functools.partial(Policy, gate)
    with serving("distributed", factory) as server, server.client() as client:
        held = hold(client, gate)
        with pytest.raises(TimeoutError, match="update_weights"):
            server.update_model_weights(Policy().like(7.0), timeout=0.1)
        assert server.health(timeout=SECONDS).serving
        assert server.stats().policy_version == 0
        gate.open("wb").close()
        answer = held.result(SECONDS)
        assert (answer["y"].item(), answer["policy_version"].item()) == (HELD, 0)
        assert wait_until(lambda: server.policy_version == 1, SECONDS)
        assert client(request(1.0), SECONDS)["y"].item() == 14.0


# Dying.


@every_kind
def test_a_killed_server_is_noticed_and_started_again(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(kind) as server, crew(3) as workers:
        late = server.client()
        clients = server.clients(3)
        server.update_model_weights(Policy(), 8)
        for worker, client in zip(workers, clients, strict=True):
            worker.call(roles.become_client, client)
        for worker in workers:
            worker.call(roles.submit_held)
            worker.begin(roles.collect)
        killed = time.monotonic()
        signal_server(server, signal.SIGKILL)
        for worker in workers:
            outcome = worker.outcome(2 * SECONDS)
            assert isinstance(outcome.error, PeerLostError), outcome.error
            assert outcome.ended - killed < SECONDS_TO_LEARN
        assert has_ended(server)
        died = server.health()
        assert (died.process_alive, died.serving, died.exitcode) == (False, False, -9)
        assert "was killed by SIGKILL" in str(died.error)
        assert f"(pid {server.pid}) was killed by SIGKILL" in repr(server)
        for call in (server.stats, functools.partial(server.update_model_weights, Policy())):
            with pytest.raises(PeerLostError, match=f"{server.pid}.*SIGKILL"):
                call()
        warnings = [r.getMessage() for r in caplog.records if r.name == "meshinfer.server"]
        assert warnings == [died.error]

        assert server.start() is server
        assert server.pid != died.pid
        assert server.policy_version == 0
        for worker in workers:
            worker.call(roles.ask_again)
            worker.call(roles.leave)
        with late:
            ask(late)


@every_kind
def test_sigterm_ends_it_in_good_order_and_it_starts_again(kind: str) -> None:
    with serving(kind) as server, server.client() as client:
        ask(client)
        signal_server(server, signal.SIGTERM)
        assert has_ended(server)
        assert server.health().exitcode == 128 + signal.SIGTERM
        server.start()
        ask(client)


@every_kind
def test_restarts_leave_no_descriptor_and_no_thread(kind: str) -> None:
    def held() -> tuple[int, int]:
        gc.collect()
        return psutil.Process().num_fds(), threading.active_count()

    with serving(kind) as server:
        counts = []
        for _ in range(5):
            signal_server(server, signal.SIGKILL)
            assert has_ended(server)
            server.start()
            counts.append(held())
        assert wait_until(lambda: no_more(held(), counts[0]), SECONDS), counts


@every_kind
def test_shutdown_tells_the_clients(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "meshinfer.server")
    server = ProcessInferenceServer(Policy, kind, **serving_options()).start()
    with crew(1) as (worker,), server.client() as here:
        worker.call(roles.become_client, server.client())
        ask(here)
        server.shutdown(SECONDS)
        assert server.pid is not None
        assert is_gone(server.pid)
        assert server.health().exitcode == 0
        assert not server.is_alive
        with pytest.raises(ServerClosedError):
            worker.call(roles.ask_again)
        with pytest.raises(TransportError):
            ask(here)
    server.shutdown()
    for call in (server.start, server.client, server.prepare):
        with pytest.raises(ClosedError):
            call()
    with pytest.raises(ClosedError):
        server.update_model_weights(Policy())
    assert "closed" in repr(server)
    assert caplog.records == []


def test_a_policy_that_does_not_end_is_killed(gate: Path) -> None:
    factory = functools.partial(Policy, gate)
    with serving("process_slot", factory) as server, server.client() as client:
        held = hold(client, gate)
        server.shutdown(timeout=0.1)
        assert server.health().exitcode in (1, -signal.SIGKILL)
        with pytest.raises(TransportError):
            held.result(SECONDS)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_dead_server_is_noticed_though_its_own_children_live(tmp_path: Path) -> None:
    report = tmp_path / "pid"
    factory = functools.partial(roles.with_a_forked_process, report)
    with (
        serving("process_slot", factory, mp_context="fork") as server,
        server.client() as client,
    ):
        try:
            ask(client)
            signal_server(server, signal.SIGKILL)
            assert has_ended(server)
            with pytest.raises(PeerLostError, match="SIGKILL"):
                server.stats()
        finally:
            os.kill(int(report.read_text()), signal.SIGKILL)


def test_a_server_that_nobody_has_any_more_ends() -> None:
    server = ProcessInferenceServer(Policy, "process_slot", **serving_options()).start()
    pid = server.pid
    assert pid is not None
    del server
    gc.collect()
    assert wait_until(lambda: is_gone(pid), SECONDS)
