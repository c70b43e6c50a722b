"""What a server does, wherever it lives. Those of ``SHARED`` use one server in turn, and the last of them ends it."""

from __future__ import annotations

import contextlib
import functools
import os
import pickle
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import process_roles as roles
import pytest
import torch
from process_roles import HELD, SECONDS, Policy, ask, request
from service_roles import (
    REFUSED,
    SECONDS_TO_LEARN,
    Place,
    Refusal,
    Touchy,
    ends,
    failing_once,
)
from support import wait_until

from meshinfer import (
    ClosedError,
    InferenceServer,
    PeerLostError,
    RemoteError,
    ServerClosedError,
    TransportConfig,
    TransportError,
)


def start_shared(place: Place, folder: Path) -> Any:
    """A server whose policy stops at a gate when it is asked to; started."""
    os.mkfifo(folder / "gate")
    factory = functools.partial(Touchy, folder / "gate")
    weights = TransportConfig("distributed", {"spec": Policy(), "interface": "127.0.0.1"})
    server = place.server(
        factory, "distributed", policy_version=4, static_batch_size=4, weight_transport=weights
    )
    assert (server.is_alive, server.policy_version) == (False, 4)
    assert "not started" in repr(server)
    assert "not started" in str(server.health().error)
    assert server.start() is server
    with server.weight_transport.publisher(version=3) as publisher:
        assert wait_until(lambda: publisher.subscribers == 1, SECONDS)
        publisher.publish(Policy())  # version 4, as it is
        publisher.wait(
            timeout=SECONDS
        )  # no thread for weights is still to come, in the tests that follow
    return server


def it_serves_and_tells_how_it_is(server: Any, place: Place, folder: Path) -> None:
    with server.client() as client:
        server.stats(reset=True)
        answer = ask(client)
        assert (answer["policy_version"].item(), answer["rows"].item()) == (4, 4)
    with contextlib.ExitStack() as stack:
        for client in server.clients(2):
            ask(stack.enter_context(client))
    assert wait_until(lambda: server.stats().requests == 3, SECONDS)
    assert server.stats(reset=True).policy_version == 4
    assert server.stats().requests == 0
    health = server.health()
    assert (health.process_alive, health.serving, health.error) == (True, True, None)
    assert health.policy_version == server.policy_version == 4
    assert server.is_alive


def it_is_what_was_asked_for(server: Any, place: Place, folder: Path) -> None:
    assert isinstance(server, InferenceServer)
    assert server.service_backend == place.backend
    assert server.transport_kind == "distributed"
    assert server.transport_config == TransportConfig("distributed")
    assert server.config.static_batch_size == 4
    assert (server.health().pid == os.getpid()) == (place.backend == "thread")
    with pytest.raises(TypeError, match=r"server\.client\(\)"):
        pickle.dumps(server)
    with pytest.raises(RuntimeError, match="started already"):
        server.start()


def weights_change_with_their_version(server: Any, place: Place, folder: Path) -> None:
    with server.client() as client:
        assert server.update_model_weights(Policy().like(3.0)) == 5
        answer = client(request(1.0), SECONDS)
        assert (answer["y"].item(), answer["policy_version"].item()) == (6.0, 5)
        with pytest.raises(ValueError, match="'offset'"):
            server.update_policy_weights_({"weight": torch.zeros(1)})
        with pytest.raises(TypeError, match=r"weights.*int"):
            server.update_model_weights(3)
        assert server.update_policy_weights_(Policy().state_dict(), version=4) == 4
        assert ask(client)["policy_version"].item() == server.policy_version == 4


def weights_come_by_themselves(server: Any, place: Place, folder: Path) -> None:
    """From one trainer, and from the next one, whose versions begin anew."""
    server.stats(reset=True)
    for before, weights, expected in ((8, Policy().like(5.0), 10.0), (3, Policy(), 1.0)):
        with server.weight_transport.publisher(version=before) as publisher:
            version = publisher.publish(weights)
            publisher.wait(timeout=SECONDS_TO_LEARN)
        with server.client() as client:
            answer = client(request(1.0), SECONDS)
        assert (answer["y"].item(), answer["policy_version"].item()) == (expected, version)
        assert server.stats().policy_version == server.policy_version == version == before + 1
    assert server.stats().weight_updates == 2


def it_prepares_for_nobody_to_see(server: Any, place: Place, folder: Path) -> None:
    server.prepare()  # takes its turn, so whatever was served before is counted by now
    server.stats(reset=True)
    assert server.prepare() is server
    assert server.stats().requests == 0


def exceptions_of_the_policy_reach_the_client(server: Any, place: Place, folder: Path) -> None:
    with server.client() as client:
        with pytest.raises(Refusal, match="not this one") as caught:
            client(request(REFUSED), SECONDS)
        assert isinstance(caught.value.__cause__, RemoteError)
        assert "in forward" in caught.value.__cause__.traceback_text
        ask(client)


def a_busy_policy_delays_nothing_but_updates(server: Any, place: Place, folder: Path) -> None:
    if place.backend == "thread":
        return  # who updates there waits for as long as it takes
    with server.client() as client:
        ask(client)
        held = client.submit(request(HELD))
        assert wait_until((folder / "held").exists, SECONDS)
        with pytest.raises(TimeoutError, match=f"{place.named}.*update_weights within 0.1 s"):
            server.update_model_weights(Policy().like(7.0), timeout=0.1)
        assert server.health().serving
        assert server.stats().policy_version == 4
        (folder / "gate").open("wb").close()
        assert held.result(SECONDS)["policy_version"].item() == 4
        assert wait_until(lambda: server.stats().policy_version == 5, SECONDS)
        assert client(request(1.0), SECONDS)["y"].item() == 14.0


def its_clients_live_longer(server: Any, place: Place, folder: Path) -> None:
    """Killed, started again, shut down."""
    with server.client() as client:
        client(request(1.0), SECONDS)
        if place.backend != "thread":
            die_and_return(server, place, client, 4)
        shut_down(server, place, client)


SHARED: tuple[Callable[[Any, Place, Path], None], ...] = (
    it_serves_and_tells_how_it_is,
    it_is_what_was_asked_for,
    weights_change_with_their_version,
    weights_come_by_themselves,
    it_prepares_for_nobody_to_see,
    exceptions_of_the_policy_reach_the_client,
    a_busy_policy_delays_nothing_but_updates,
    its_clients_live_longer,
)


def live(place: Place, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A whole life, over the transport that is chosen there: a start that fails, one that does not, death, return."""
    server = place.server(failing_once(place, folder / "marker"), "auto")
    assert server.transport_kind == place.auto
    with server.client() as client:
        with pytest.raises(roles.NoPolicyError, match="only the first time") as caught:
            server.start()
        assert isinstance(caught.value.__cause__, RemoteError)
        assert "in failing_once" in caught.value.__cause__.traceback_text
        assert not server.is_alive
        with pytest.raises(PeerLostError, match=place.named):
            server.stats()
        with server.start():
            ask(client)
            die_and_return(server, place, client, 0)
            warnings = [r.getMessage() for r in caplog.records if r.name == "meshinfer.server"]
            assert len(warnings) == 1, warnings
            assert "killed" in warnings[0] or "died" in warnings[0]
            caplog.clear()
            ask(client)
            if place.backend == "ray":
                shut_down_stopped(server, place)
            else:  # monarch's own end of a process that did not answer takes ten seconds more
                shut_down(server, place, client)


def die_and_return(server: Any, place: Place, client: Any, version: int) -> None:
    pid = server.pid
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(PeerLostError):
        client(request(2.0), SECONDS_TO_LEARN)
    assert wait_until(lambda: not server.is_alive, SECONDS_TO_LEARN)
    health = server.health()
    assert (health.process_alive, health.serving, health.pid) == (False, False, pid)
    pattern = rf"the {place.named}.*pid {pid}\b.*(killed|died)"
    with pytest.raises(PeerLostError, match=pattern) as caught:
        server.stats()
    with pytest.raises(PeerLostError, match=pattern):
        server.update_model_weights(Policy())
    assert health.error == str(caught.value)
    assert str(caught.value) in repr(server)
    assert server.start() is server
    assert server.pid != pid
    assert server.policy_version == version
    ask(client)


def shut_down(server: Any, place: Place, client: Any) -> None:
    """In good order."""
    pid = server.health().pid
    server.shutdown()
    assert place.backend == "thread" or ends(pid)
    assert not server.is_alive
    with pytest.raises(ServerClosedError if place.backend == "thread" else TransportError):
        client(request(1.0), SECONDS)
    server.shutdown()
    for call in (server.start, server.client, functools.partial(server.clients, 2)):
        with pytest.raises(ClosedError):
            call()
    assert "closed" in repr(server)


def shut_down_stopped(server: Any, place: Place) -> None:
    """A process that does not hear anything is killed."""
    pid = server.pid
    os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(TimeoutError, match=f"{place.named}.*stats within 0.1 s"):
            server.stats(timeout=0.1)
        server.shutdown(timeout=0.0)
        assert ends(pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def it_may_take_too_long_to_start(place: Place, **options: Any) -> None:
    """And leaves nothing then."""
    options = {"service_backend_options": {"startup_timeout": 0.3, **options}}
    with place.server(roles.never, "distributed", **options) as server:
        raise AssertionError(server)


def it_can_be_given_up(place: Place) -> None:
    server = place.server(roles.never, "distributed")
    with ThreadPoolExecutor(1) as pool:
        started = pool.submit(server.start)
        assert wait_until(lambda: server.pid, SECONDS)
        server.shutdown()
        with pytest.raises(ClosedError):
            started.result(SECONDS)
    assert ends(server.pid)
