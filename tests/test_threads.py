"""The transports between threads: what both promise beyond the conformance suite."""

from __future__ import annotations

import gc
import os
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from support import wait_until
from tensordict import TensorDict, TensorDictBase
from thread_transports import HELD, SECONDS, TRANSPORTS, Double, request, serving

from meshinfer import (
    ClosedError,
    PeerLostError,
    RemoteError,
    ServerClosedError,
    SlotTransport,
    ThreadingTransport,
)
from meshinfer.inference.protocol import BatchedTransport, ServedTransport


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> Iterator[Any]:
    with TRANSPORTS[request.param]() as made:
        yield made


# --- What all promise ----------------------------------------------------------------------------


def test_the_protocols() -> None:
    with ThreadingTransport() as queue, SlotTransport(1) as slot:
        assert isinstance(queue, ServedTransport)
        assert not isinstance(queue, BatchedTransport)
        assert isinstance(slot, BatchedTransport)


# --- Replies -------------------------------------------------------------------------------------


def test_a_policy_may_reuse_its_output(transport: Any) -> None:
    out = torch.zeros(8, 3)

    def policy(batch: TensorDictBase) -> TensorDict:
        rows = batch.batch_size[0]
        torch.mul(batch["x"], 2, out=out[:rows])
        return TensorDict({"y": out[:rows]}, [rows])

    with serving(transport, policy) as server, server.client() as client:
        kept = [client(request(value)) for value in range(20)]
        assert [reply["y"][0].item() for reply in kept] == [2.0 * value for value in range(20)]


def test_a_policy_may_return_and_change_its_input(transport: Any) -> None:
    def policy(batch: TensorDictBase) -> TensorDictBase:
        batch["x"].mul_(2)
        return batch.set("y", batch["x"])

    with serving(transport, policy) as server, server.client() as client:
        sent = [request(value) for value in range(10)]
        replies = [client(each) for each in sent]
        assert [reply["y"][0].item() for reply in replies] == [2.0 * value for value in range(10)]
        assert [each["x"][0].item() for each in sent] == list(range(10))


def test_gradients_given_to_one_reply_do_not_reach_the_others(transport: Any) -> None:
    with serving(transport, Double(), min_batch_size=2, timeout=SECONDS) as server:
        with server.client() as one, server.client() as other:
            futures = [one.submit(request(1)), other.submit(request(2))]
            first, second = (future.result(SECONDS) for future in futures)
        first["y"].mul_(torch.full((3,), 5.0, requires_grad=True))
        first["policy_version"].add_(100)
        assert first["y"].requires_grad
        assert not second["y"].requires_grad
        assert second["y"].tolist() == [4.0] * 3
        assert second["policy_version"] == 0
        assert second["y"].untyped_storage().nbytes() == 12


def test_what_is_set_in_a_client_stays_there(transport: Any) -> None:
    """The policy does not run under a client's modes, nor does a client notice the server's."""
    seen: list[tuple[bool, bool, bool]] = []

    def policy(batch: TensorDictBase) -> TensorDict:
        autocast = torch.is_autocast_enabled("cpu")
        seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled(), autocast))
        return TensorDict({"y": batch["x"] * 2}, batch.batch_size)

    with serving(transport, policy) as server, server.client() as client:
        with torch.inference_mode(), torch.autocast("cpu"):
            reply = client(request(1))
        assert torch.is_grad_enabled()
        assert seen == [(False, False, False)]
        assert not reply["y"].is_inference()
        reply["y"].requires_grad_()
        assert client(request(2))["y"].tolist() == [4.0] * 3


def test_each_client_gets_an_exception_of_its_own(transport: Any) -> None:
    class Local(Exception):
        """Cannot be pickled: nobody else finds this class."""

    raised = Local("what the policy says")

    def policy(batch: TensorDictBase) -> TensorDict:
        raise raised

    with (
        serving(transport, policy, min_batch_size=2, timeout=SECONDS) as server,
        server.client() as one,
        server.client() as other,
    ):
        futures = [one.submit(request(1)), other.submit(request(2))]
        errors = [future.exception(SECONDS) for future in futures]
    assert [type(error) for error in errors] == [Local, Local]
    assert len({id(error) for error in (*errors, raised)}) == 3
    for error in errors:
        assert error is not None
        assert error.__traceback__ is None
        assert isinstance(error.__cause__, RemoteError)
        assert "in policy" in str(error.__cause__)


# --- Giving up -----------------------------------------------------------------------------------


def test_cancelled_requests_are_neither_computed_nor_fatal(transport: Any) -> None:
    policy = Double()
    with serving(transport, policy) as server, server.client() as client:
        held = client.submit(request(HELD))
        assert policy.entered.wait(SECONDS)
        futures = [client.submit(request(value)) for value in range(200)]
        assert transport.num_waiting == 200
        assert all(future.cancel() for future in futures[:-1])
        assert transport.num_waiting == 1
        assert client.in_flight == 2
        policy.gate.set()
        assert held.result(SECONDS)["y"].tolist() == [2 * HELD] * 3
        assert futures[-1].result(SECONDS)["y"].tolist() == [2.0 * 199] * 3
    assert [batch["x"][0, 0].item() for batch in policy.batches] == [HELD, 199]


def test_a_request_that_is_cancelled_while_it_is_computed_hinders_nobody(transport: Any) -> None:
    policy = Double()
    with serving(transport, policy) as server, server.client() as client:
        held = client.submit(request(HELD))
        assert policy.entered.wait(SECONDS)
        assert held.cancel()
        policy.gate.set()
        assert client(request(1), SECONDS)["y"].tolist() == [2.0] * 3
        assert server.is_alive


def test_nobody_waits_for_a_server_that_is_gone(transport: Any) -> None:
    with serving(transport, Double()) as server:
        used, unused = server.client(), server.client()
        used(request(1), SECONDS)
        server.shutdown()
        for client in (used, unused):
            for timeout in (None, SECONDS):
                with pytest.raises(ServerClosedError):
                    client(request(1), timeout)


def test_a_serving_thread_that_dies_tells_its_clients(
    transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = Double()
    with serving(transport, policy) as server:
        clients = server.clients(3)
        futures = [clients[0].submit(request(HELD))]
        assert policy.entered.wait(SECONDS)
        futures += [client.submit(request(1)) for client in clients]
        name = "drain_slots" if isinstance(transport, SlotTransport) else "drain_with_timing"

        def broken(self: Any, max_items: int) -> Any:
            raise RuntimeError("the transport broke")

        source: Any = server._batcher._source  # type: ignore[union-attr]
        monkeypatch.setattr(type(transport), name, broken)
        monkeypatch.setattr(source, "drain", lambda _: broken(None, 0))
        policy.gate.set()
        assert futures[0].result(SECONDS)["y"].tolist() == [2 * HELD] * 3
        for future in futures[1:]:
            with pytest.raises(ServerClosedError):
                future.result(SECONDS)
        with pytest.raises(RuntimeError, match="the serving thread failed") as caught:
            server.serve()
        assert "the transport broke" in str(caught.value.__cause__)


def test_a_serving_thread_ends_when_somebody_closes_its_transport(transport: Any) -> None:
    with serving(transport, Double()) as server:
        server.client()(request(1), SECONDS)
        transport.close()
        assert wait_until(lambda: not server.is_alive, SECONDS)


def test_a_transport_that_is_dropped_tells_its_clients(transport: Any) -> None:
    made = type(transport)(*(8,) * isinstance(transport, SlotTransport))
    client = made.client()
    future = client.submit(request(1))
    del made
    gc.collect()
    with pytest.raises(ServerClosedError):
        future.result(SECONDS)


def test_closing_while_others_submit_leaves_nobody_waiting(transport: Any) -> None:
    """Whatever the order of submit and close, each future ends."""

    def hurry(client: Any, started: threading.Barrier) -> int:
        started.wait()
        ended = 0
        try:
            while True:
                future = client.submit(request(ended))
                ended += 1
                future.result(SECONDS)
        except (ServerClosedError, ClosedError):
            return ended

    with serving(transport, Double()) as server:
        clients = server.clients(4)
        started = threading.Barrier(5)
        with ThreadPoolExecutor(4) as pool:
            runs = [pool.submit(hurry, client, started) for client in clients]
            started.wait()
            clients[0].close()
            server.shutdown()
            assert all(run.result(SECONDS) >= 0 for run in runs)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # it is what we test
def test_a_client_can_neither_be_pickled_nor_forked(transport: Any) -> None:
    with serving(transport, Double()) as server, server.client() as client:
        with pytest.raises(TypeError, match="multiprocessing"):
            pickle.dumps(client)
        client(request(1), SECONDS)
        pid = os.fork()
        if pid == 0:
            try:
                client(request(1))
            except PeerLostError:
                os._exit(3)
            finally:
                os._exit(4)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
        assert client(request(2), SECONDS)["y"].tolist() == [4.0] * 3


# --- Coming and leaving --------------------------------------------------------------------------


def test_a_server_waits_until_its_clients_have_left(transport: Any) -> None:
    with serving(transport, Double()) as server:
        with pytest.raises(TimeoutError):
            server.serve(timeout=0.01)
        closed, dropped = server.clients(2)
        assert transport.num_clients == server.stats().clients == 2
        served = threading.Thread(target=server.serve, kwargs={"timeout": SECONDS}, daemon=True)
        served.start()
        closed(request(1), SECONDS)
        closed.close()
        with pytest.raises(TimeoutError):
            server.serve(timeout=0.01)
        del dropped
        gc.collect()
        served.join(SECONDS)
        assert not served.is_alive()
        assert transport.num_clients == 0
        with pytest.raises(TimeoutError):
            server.serve(num_clients=3, timeout=0.01)


def test_the_transports_own_client_is_not_waited_for(transport: Any) -> None:
    with serving(transport, Double()) as server:
        assert transport.submit(request(4)).result(SECONDS)["y"].tolist() == [8.0] * 3
        assert transport.num_clients == 0
        server.client().close()
        server.serve(timeout=SECONDS)


# --- Under load ----------------------------------------------------------------------------------


def test_no_wake_up_is_lost(transport: Any) -> None:
    """Eight threads, each asking only once it was answered, with the server asleep in between."""

    def ask(client: Any, first: int) -> int:
        for value in range(first, first + 300):
            reply = client(request(value), SECONDS)
            assert reply["y"].tolist() == [2.0 * value] * 3
        return 300

    def double(batch: TensorDictBase) -> TensorDict:
        return TensorDict({"y": 2 * batch["x"]}, batch.batch_size)

    with serving(transport, double, max_batch_size=4) as server, ThreadPoolExecutor(8) as pool:
        runs = [pool.submit(ask, client, 10_000 * i) for i, client in enumerate(server.clients(8))]
        assert [run.result() for run in runs] == [300] * 8


def test_many_requests_of_one_client(transport: Any) -> None:
    with serving(transport, Double(), max_batch_size=5) as server, server.client() as client:
        for _ in range(2):
            futures = [client.submit(request(value)) for value in range(150)]
            replies = [future.result(SECONDS)["y"][0].item() for future in futures]
            assert replies == [2.0 * value for value in range(150)]


def test_a_collate_fn_that_returns_nothing_is_an_error(transport: Any) -> None:
    def collate(payloads: list[TensorDictBase]) -> Any:
        return None

    with (
        serving(transport, Double(), collate_fn=collate) as server,
        server.client() as client,
        pytest.raises(TypeError, match="collate_fn returned NoneType"),
    ):
        client(request(1), SECONDS)
