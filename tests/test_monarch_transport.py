"""The transport over monarch's messages: servers and clients in actors, and the end of either."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import mesh_jobs
import pytest
import torch
from mesh_jobs import Ended
from monarch_noise import complaints
from monarch_policy import AddOne, request, value_of
from support import wait_until
from tensordict import TensorDict, TensorDictBase

from meshinfer import ClosedError, InferenceServer, PeerLostError, RefusedError, ServerClosedError
from meshinfer.inference.monarch import MonarchAddress, MonarchClient, MonarchTransport, hub, ports
from meshinfer.inference.monarch import connection as connections
from meshinfer.inference.monarch import session as sessions
from meshinfer.inference.monarch.frames import NOBODY, Signal
from meshinfer.inference.monarch.locate import FixedServer
from meshinfer.inference.monarch.mortality import ProcessName
from meshinfer.inference.monarch.ports import Outlet
from meshinfer.inference.queues.wire import Kind, header_of
from meshinfer.testing import raises
from meshinfer.testing.monarch_actors import MonarchWorkers

pytestmark = pytest.mark.usefixtures("monarch")

SECONDS = 60.0
LONG = 600.0
"""Seconds that no test has."""
ROOT = Path(__file__).parent


@pytest.fixture
def workers(monarch_workers: MonarchWorkers) -> MonarchWorkers:
    """All of them alive."""
    monarch_workers.replenish()
    return monarch_workers


@pytest.fixture(autouse=True)
def nothing_left_behind(workers: MonarchWorkers, nothing_left_behind: None) -> None:
    """Workers outlive each test: those that the last one killed are replaced before it is looked around."""


class Actors:
    """Actors of one test, by the index of the process in which they are."""

    def __init__(self, workers: MonarchWorkers) -> None:
        self._workers = workers
        self._living: list[tuple[int, Any]] = []

    def spawn(self, index: int, kind: type, *args: Any) -> Any:
        actor = self._workers.spawn(index, kind, *args)
        self._living.append((index, actor))
        return actor

    def stop(self, actor: Any) -> None:
        self._living = [(index, other) for index, other in self._living if other is not actor]
        actor.stop().get(timeout=SECONDS)

    def kill(self, index: int) -> None:
        """SIGKILL the process."""
        self._living = [(other, actor) for other, actor in self._living if other != index]
        self._workers.kill(index)

    def stop_all(self) -> None:
        for _, actor in list(self._living):
            self.stop(actor)


@pytest.fixture
def actors(workers: MonarchWorkers) -> Iterator[Actors]:
    actors = Actors(workers)
    yield actors
    actors.stop_all()


class Held:
    """A policy that waits for its gate."""

    def __init__(self) -> None:
        self.entered, self.gate = threading.Event(), threading.Event()

    def __call__(self, batch: TensorDictBase) -> TensorDict:
        self.entered.set()
        self.gate.wait(SECONDS)
        return AddOne()(batch)


@contextlib.contextmanager
def serving(policy: Any, **options: Any) -> Iterator[tuple[MonarchTransport, InferenceServer]]:
    transport = MonarchTransport(**options)
    with InferenceServer(policy, transport) as server:
        yield transport, server
        if isinstance(policy, Held):
            policy.gate.set()


def got(future: Any) -> Any:
    return future.get(timeout=2 * SECONDS)


def test_clients_work_wherever_actors_compute(actors: Actors) -> None:
    """In plain endpoints, threads, coroutines, the controller, and the serving process; sent both ways."""
    from monarch_roles import Asking, AskingAsync, Serving

    server = actors.spawn(0, Serving)
    first, second, third = got(server.clients.call_one(3))
    asking = actors.spawn(1, Asking, first)
    assert got(asking.ask.call_one(1.0)) == 2.0
    assert got(asking.ask_in_threads.call_one([2.0, 3.0, 4.0])) == [3.0, 4.0, 5.0]
    asynchronous = actors.spawn(2, AskingAsync)
    assert got(asynchronous.ask_many.call_one(second, [1.0, 2.0])) == [2.0, 3.0, 10.0]
    assert got(server.ask_here.call_one(5.0)) == 6.0
    assert value_of(third(request(6.0), SECONDS)) == 7.0
    with got(asking.client_again.call_one()) as returned:
        assert value_of(returned(request(7.0), SECONDS)) == 8.0


def test_twenty_megabytes_travel_each_way(actors: Actors) -> None:
    from monarch_roles import Asking

    with serving(AddOne()) as (_, server):
        asking = actors.spawn(0, Asking, server.client())
        assert got(asking.echo_bytes.call_one(20 << 20))


def test_the_server_is_done_with_a_killed_client(
    actors: Actors,
) -> None:
    from monarch_roles import Asking, Serving

    server = actors.spawn(0, Serving)
    victim, other = got(server.clients.call_one(2))
    doomed = actors.spawn(1, Asking, victim)
    got(doomed.submit.call_one(2000.0))
    assert value_of(other(request(1.0), SECONDS)) == 2.0
    actors.kill(1)
    assert wait_until(lambda: got(server.counts.call_one()) == (1, 1), SECONDS)
    assert value_of(other(request(2.0), SECONDS)) == 3.0
    other.close()
    assert got(server.wait_until_left.call_one(2))


def test_a_killed_server_is_noticed_at_once_wherever_one_waits(
    actors: Actors,
) -> None:
    from monarch_roles import Asking, Serving

    server = actors.spawn(0, Serving)
    near, far = got(server.clients.call_one(2))
    asking = actors.spawn(1, Asking, far)
    got(asking.submit.call_one(60_000.0))
    waiting = near.submit(request(60_000.0))
    actors.kill(0)
    with raises(PeerLostError, "process"):  # who is silent for long is lost too, but later
        waiting.result(SECONDS)
    kind, text = got(asking.outcome.call_one())
    assert (kind, "has gone" in text) == ("PeerLostError", True), text
    with raises(PeerLostError):
        near(request(1.0), SECONDS)


def test_the_stop_of_the_servers_actor_ends_what_waits(actors: Actors) -> None:
    from monarch_roles import Serving

    server = actors.spawn(0, Serving)
    (client,) = got(server.clients.call_one(1))
    assert value_of(client(request(1.0), SECONDS)) == 2.0
    waiting = client.submit(request(60_000.0))
    actors.stop(server)
    with raises(ServerClosedError):
        waiting.result(SECONDS)


def test_a_goodbye_that_has_come_wins_over_the_end_of_its_process(actors: Actors) -> None:
    """The client's thread is held up until both are there."""
    from monarch_roles import Serving

    server = actors.spawn(0, Serving)
    held_up, prompt = got(server.clients.call_one(2))
    assert [value_of(client(request(1.0), SECONDS)) for client in (held_up, prompt)] == [2.0, 2.0]
    held, gate = threading.Event(), threading.Event()

    def hold(_: Any) -> None:
        held.set()
        gate.wait(SECONDS)

    held_up.submit(request(1000.0)).add_done_callback(hold)
    assert held.wait(SECONDS)
    got(server.close.call_one())
    with raises(ServerClosedError):  # it was told after the other, so that this has come, too
        prompt(request(2.0), SECONDS)
    actors.kill(0)
    assert wait_until(lambda: held_up._connection._dead, SECONDS)
    gate.set()
    with raises(ServerClosedError):
        held_up(request(2.0), SECONDS)


def test_a_server_has_ended_when_its_clients_know(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one whose thread is held up for a moment."""
    monkeypatch.setattr(hub, "_GOODBYE_SECONDS", SECONDS)
    with serving(AddOne()) as (_, server), server.client() as client:
        held, gate = threading.Event(), threading.Event()

        def hold(_: Any) -> None:
            held.set()
            gate.wait(SECONDS)

        client.submit(request(1000.0)).add_done_callback(hold)
        assert held.wait(SECONDS)
        threading.Timer(0.3, gate.set).start()
        server.shutdown()
        assert client._connection.ended


def test_a_goodbye_on_its_way_wins_over_the_end_of_its_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ports, "_MOMENT_SECONDS", SECONDS)
    with serving(AddOne()) as (_, server), server.client() as client:
        assert value_of(client(request(1.0), SECONDS)) == 2.0
        client._connection._bury()
        server.shutdown()
        with raises(ServerClosedError):
            client(request(2.0), SECONDS)


def test_a_client_whose_actor_is_stopped_leaves(actors: Actors) -> None:
    from monarch_roles import Asking

    with serving(AddOne()) as (transport, server):
        asking = actors.spawn(0, Asking, server.client())
        assert got(asking.ask.call_one(1.0)) == 2.0
        assert transport.num_clients == 1
        actors.stop(asking)
        assert transport.wait_until_left(1, SECONDS)
        assert transport.num_lost == 0


def test_another_process_may_serve_and_yet_another_after_its_death(
    actors: Actors,
) -> None:
    """Clients made before and after find whoever serves; while nobody does they wait."""
    from monarch_roles import Serving

    with MonarchTransport() as transport:
        before = transport.client()
        opener = transport.serve_elsewhere()
        early: list[float] = []
        asking = threading.Thread(
            target=lambda: early.append(value_of(before(request(1.0), SECONDS)))
        )
        asking.start()
        actors.spawn(0, Serving, opener)
        asking.join(SECONDS)
        assert early == [2.0]
        after = transport.client()
        assert value_of(after(request(2.0), SECONDS)) == 3.0
        waiting = after.submit(request(60_000.0))
        actors.kill(0)
        with raises(PeerLostError):
            waiting.result(SECONDS)
        actors.spawn(1, Serving, transport.serve_elsewhere())
        assert value_of(after(request(3.0), SECONDS)) == 4.0
        assert value_of(before(request(4.0), SECONDS)) == 5.0
        with raises(ValueError, "only makes clients"):
            transport.drain(1)
        before.close()
        after.close()


def test_an_opener_is_prepared_in_an_endpoint_and_called_in_a_thread(actors: Actors) -> None:
    from monarch_roles import Preparing

    with MonarchTransport() as transport:
        prepared = actors.spawn(0, Preparing, transport.serve_elsewhere())
        assert got(prepared.serve_in_thread.call_one())
        with transport.client() as client:
            assert value_of(client(request(1.0), SECONDS)) == 2.0
        got(prepared.close.call_one())


def test_who_does_not_hold_the_secret_is_refused() -> None:
    with serving(AddOne(), secret="right") as (transport, _):
        true = transport.address
        forged = MonarchAddress(true.port, true.process, true.host, b"wrong")
        with MonarchClient(FixedServer(forged), SECONDS) as client, raises(RefusedError, "secret"):
            client(request(1.0), SECONDS)
        assert transport.num_clients == 0
        shown = f"{transport!r} {transport.client()!r} {true!r}"
        assert "right" not in shown


class Bomb:
    """Tells when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("kind", [*Kind, *Signal])
def test_nothing_of_a_stranger_is_unpickled(kind: int, tmp_path: Path) -> None:
    """Whatever it sends, the server goes on."""
    from monarch.actor import context

    bomb = pickle.dumps(Bomb(tmp_path / "went-off"))
    with serving(AddOne()) as (transport, server):
        outlet = Outlet(context().actor_instance, transport.address.port)
        for token in (NOBODY, bytes(range(16))):
            outlet.send(token, header_of(kind, length=len(bomb)), bomb)
        outlet.send(b"short")
        outlet.send(NOBODY, header_of(kind, length=1 << 40), bomb)
        with server.client() as client:
            assert value_of(client(request(1.0), SECONDS)) == 2.0
    assert not (tmp_path / "went-off").exists()


def test_a_client_keeps_at_most_64_mib_at_the_server() -> None:
    policy = Held()
    payload = TensorDict({"x": torch.zeros(2 << 20)})  # 8 MiB
    with serving(policy) as (_, server), server.client() as client:
        futures = [client.submit(payload) for _ in range(7)]
        with raises(TimeoutError, "did not take"):
            client.submit(payload, timeout=0.2)
        for future in futures:
            future.cancel()
        with raises(TimeoutError, "did not take"):  # they still lie there
            client.submit(payload, timeout=0.2)
        policy.gate.set()
        assert value_of(client(payload, SECONDS)) == 1.0


def test_one_request_may_be_larger_than_that() -> None:
    payload = TensorDict({"x": torch.zeros(20 << 20)})  # 80 MiB
    with serving(AddOne()) as (_, server), server.client() as client:
        assert value_of(client(payload, SECONDS)) == 1.0


def test_layouts_are_known_before_they_are_used() -> None:
    """Threads share a client, and send requests of ever new structures."""
    with serving(AddOne()) as (_, server), server.client() as client:

        def ask(first: int) -> None:
            for width in range(first, first + 100):
                reply = client(TensorDict({"x": torch.full((width,), float(width))}), SECONDS)
                assert reply["y"].tolist() == [width + 1.0] * width

        failures: list[BaseException] = []

        def guarded(first: int) -> None:
            try:
                ask(first)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=guarded, args=(first,)) for first in (1, 30, 80, 300)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> None:
    """For this process, others seem to be on other hosts."""
    monkeypatch.setattr(ProcessName, "is_near", False)
    monkeypatch.setattr(connections, "_FAR", (0.2, LONG))
    monkeypatch.setattr(sessions, "_LOSE_AFTER", LONG)


@contextlib.contextmanager
def suspended(pid: int) -> Iterator[None]:
    """Its silence is noticed soon; that of others, whom a busy machine may hold up, never is."""
    os.kill(pid, signal.SIGSTOP)
    try:
        with (
            mock.patch.object(connections, "_FAR", (0.2, 2.0)),
            mock.patch.object(sessions, "_LOSE_AFTER", 2.0),
        ):
            yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_server_that_does_not_answer_from_afar_is_lost(far: None, actors: Actors) -> None:
    """And found again, should it come back."""
    from monarch_roles import Serving

    server = actors.spawn(0, Serving)
    (client,) = got(server.clients.call_one(1))
    assert value_of(client(request(1.0), SECONDS)) == 2.0
    with suspended(got(server.process.call_one())):
        waiting = client.submit(request(2.0))
        with raises(PeerLostError, "has not answered"):
            waiting.result(SECONDS)
    assert value_of(client(request(3.0), SECONDS)) == 4.0
    client.close()


def test_a_client_that_says_nothing_from_afar_is_lost(far: None, actors: Actors) -> None:
    """It is told so, should it still be there, and joins again."""
    from monarch_roles import Asking

    with serving(AddOne()) as (transport, server):
        asking = actors.spawn(0, Asking, server.client())
        assert got(asking.ask.call_one(1.0)) == 2.0
        with suspended(got(asking.process.call_one())):
            assert transport.wait_until_left(1, SECONDS)
            assert transport.num_lost == 1
        assert wait_until(lambda: got(asking.outcome_of.call_one(2.0)) == ("reply", "3.0"), SECONDS)


def test_a_server_that_computes_for_long_is_not_lost(far: None) -> None:
    """In Python, too, as long as it lets other threads run: it tells who asks that it is there."""
    heard: list[float] = []

    def compute(batch: TensorDictBase) -> TensorDict:
        heard.append(client._connection._heard)
        until = time.monotonic() + SECONDS / 2
        while len(heard) < 3 and time.monotonic() < until:
            if (now := client._connection._heard) != heard[-1]:
                heard.append(now)
        return AddOne()(batch)

    with serving(compute) as (transport, server), server.client() as client:
        assert value_of(client(request(1.0), SECONDS)) == 2.0
        assert len(heard) == 3
        assert transport.num_clients == 1


def test_a_client_that_was_given_up_joins_again() -> None:
    """The server may be wrong: then it says so, and the next call looks for it."""
    policy = Held()
    with serving(policy) as (transport, server), server.client() as client:
        waiting = client.submit(request(1.0))
        assert policy.entered.wait(SECONDS)
        hub: Any = transport._hub
        hub._lose(next(iter(hub._sessions.values())), "for this test")
        with raises(PeerLostError, "gave this client up"):
            waiting.result(SECONDS)
        policy.gate.set()
        assert value_of(client(request(2.0), SECONDS)) == 3.0


def test_a_forked_child_cannot_use_it(capfd: pytest.CaptureFixture[str]) -> None:
    """It says so, and leaves what is its parent's alone."""
    with serving(AddOne()) as (transport, server), server.client() as client:
        assert value_of(client(request(1.0), SECONDS)) == 2.0
        child = multiprocessing.get_context("fork").Process(target=_use_forked, args=(client,))
        child.start()
        child.join(SECONDS)
        assert child.exitcode == 0, capfd.readouterr().err
        assert value_of(client(request(2.0), SECONDS)) == 3.0
        assert transport.num_clients == 1


def _use_forked(client: Any) -> None:
    with raises(ValueError, "forked"):
        client(request(1.0), SECONDS)
    client.close()


def test_a_call_to_a_server_that_closed_raises_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody looks for it."""
    with serving(AddOne()) as (_, server):
        client = server.client()
        assert value_of(client(request(1.0), SECONDS)) == 2.0
    monkeypatch.setattr(MonarchClient, "_reach", None)
    with raises(ServerClosedError):
        client(request(2.0), SECONDS)
    client.close()


def test_closing_ends_a_client_that_joins() -> None:
    with MonarchTransport() as transport:
        transport.serve_elsewhere()
        client = transport.client()
        failures: list[BaseException] = []

        def ask() -> None:
            try:
                client(request(1.0), SECONDS)
            except BaseException as error:
                failures.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        assert not client.in_flight
        client.close()
        asking.join(SECONDS)
        assert [type(error) for error in failures] == [ClosedError]


def test_the_place_may_be_told_by_others() -> None:
    """With ``whereabouts``, a transport only makes clients."""
    with serving(AddOne(), secret="s") as (there, _):
        here = MonarchTransport(whereabouts=FixedServer(there.address))
        assert value_of(here.submit(request(1.0)).result(SECONDS)) == 2.0
        with raises(ValueError, "only makes clients"):
            here.wait_for_work(0.0)
        with raises(ValueError, "cannot send it elsewhere"):
            here.serve_elsewhere()
        here.close()


def run(folder: Path, script: str, *, cold: bool) -> Ended:
    """A program of its own, in which every warning is an error, and its processes."""
    command = [sys.executable, "-W", "error", str(ROOT / "monarch_scripts.py"), script]
    with mesh_jobs.running(folder, command, cold=cold) as (job,):
        return job.end(2 * SECONDS)


def test_two_hosts_over_tcp(tmp_path: Path) -> None:
    done = run(tmp_path, "two_hosts", cold=False)
    assert done.code == 0, done
    assert done.stdout.split() == ["2.0", "3.0", "4.0", "PeerLostError"]
    assert complaints(done.stderr.splitlines()) == []


def test_a_program_ends_cleanly_with_everything_open(tmp_path: Path) -> None:
    """In new interpreters, as a user has."""
    done = run(tmp_path, "leave_open", cold=True)
    assert (done.stdout.split(), done.code) == (["2.0"], 3), done
    assert complaints(done.stderr.splitlines()) == []
