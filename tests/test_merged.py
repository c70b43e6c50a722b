"""Several transports in one server: their requests meet in one batch, and none of them hinders another."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from failure_roles import (
    SECONDS,
    SECRET,
    WHO,
    Doubler,
    ask,
    check,
    connect,
    crew,
    keep_in_flight,
    leave,
    query,
    query_again_and_again,
    reply,
    request,
    submit_and_collect,
)
from shared_roles import own
from support import wait_until
from tensordict import TensorDict, TensorDictBase

from meshinfer import (
    ClosedError,
    DistributedTransport,
    InferenceServer,
    InferenceServerConfig,
    MergedTransport,
    ServerClosedError,
    SlotTransport,
    ThreadingTransport,
    TransportConfig,
    inference_transport_kind,
    make_inference_transport,
)
from meshinfer.inference.shared import ProcessSlotTransport, SharedMemoryTransport
from meshinfer.layout import PayloadLayout
from meshinfer.testing.announced import GlooRows

SPECS = {"request_spec": request(0), "response_spec": reply()}
NAMES = ("distributed", "shared_memory")


class Recorder(Doubler):
    """Tells which clients were in each batch, and in which thread it was computed."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[list[int]] = []
        self.threads: list[str] = []

    def __call__(self, batch: TensorDictBase) -> TensorDict:
        self.batches.append([value // WHO for value in batch["x"][:, 0].tolist()])
        self.threads.append(threading.current_thread().name)
        return super().__call__(batch)


def distributed(**options: Any) -> DistributedTransport:
    return DistributedTransport(request(0), reply(), secret=SECRET, **options)


def shared_memory(num_slots: int = 8) -> SharedMemoryTransport:
    return SharedMemoryTransport(request(0), reply(), num_slots=num_slots)


def process_slot() -> ProcessSlotTransport:
    return ProcessSlotTransport(request(0), reply(), num_slots=4)


def slot() -> SlotTransport:
    return SlotTransport(4, request_spec=request(0), response_spec=reply())


EVERY = {
    "distributed": distributed,
    "shared_memory": shared_memory,
    "process_slot": process_slot,
    "slot": slot,
}


@contextmanager
def serving(
    policy: Callable[..., Any], transports: Sequence[Any], **config: Any
) -> Iterator[InferenceServer]:
    with InferenceServer(
        policy, transports, server_config=InferenceServerConfig(**config)
    ) as server:
        yield server


@contextmanager
def merging(*names: str) -> Iterator[tuple[MergedTransport, dict[str, Any]]]:
    """A transport to drive by hand, and a client over each of its own."""
    transports = [EVERY[name]() for name in names]
    clients = {name: each.client() for name, each in zip(names, transports, strict=True)}
    with MergedTransport(transports) as merged:
        yield merged, clients
        for client in clients.values():
            client.close()


def submitted(merged: MergedTransport, client: Any, value: int) -> Any:
    """A request that has arrived."""
    before = merged.num_waiting
    future = client.submit(request(value))
    assert wait_until(lambda: merged.num_waiting == before + 1, SECONDS)
    return future


def drained(merged: MergedTransport, count: int) -> list[int]:
    """Drain so many at most, and answer them: what was asked, in order."""
    payloads, handles = merged.drain(count)
    for payload, handle in zip(payloads, handles, strict=True):
        merged.resolve(handle, TensorDict({"y": 2 * payload["x"]}, []))
    return [payload["x"].item() for payload in payloads]


# --- In processes --------------------------------------------------------------------------------


@contextmanager
def processes_of_both_kinds(
    policy: Callable[..., Any], each: int, backend: Any = "gloo", **config: Any
) -> Iterator[tuple[InferenceServer, list[Any]]]:
    """So many distributed clients, then so many of shared memory, in a process each; ``who`` is their index."""
    near, far = shared_memory(), distributed(backend=backend)
    with crew(2 * each) as workers, serving(policy, [near, far], **config) as server:
        assert far.address is not None
        for who, worker in enumerate(workers[:each]):
            worker.begin(connect, far.address.port, who=who, first=None, backend=backend)
        for who, worker in enumerate(workers[each:], each):
            worker.begin(own, near.client(), who)
        for worker in workers:
            worker.outcome().get()
        yield server, workers


@pytest.mark.parametrize("backend", ["gloo", GlooRows()], ids=["gloo", "announced"])
def test_requests_of_both_kinds_of_processes_meet_in_one_batch(backend: Any) -> None:
    policy = Recorder()
    together = {"min_batch_size": 4, "max_batch_size": 4, "timeout": SECONDS}
    with processes_of_both_kinds(policy, 2, backend, **together) as (_, workers):
        for value in range(5):
            for who, worker in enumerate(workers):
                worker.begin(query, who * WHO + value)
            for worker in workers:
                worker.outcome().get()
        assert [sorted(batch) for batch in policy.batches] == [[0, 1, 2, 3]] * 5
        for worker in workers:
            worker.call(leave)


def test_a_killed_client_of_either_kind_hinders_nobody() -> None:
    policy = Recorder()
    with processes_of_both_kinds(policy, 2) as (server, workers):
        victims, survivors = (0, 2), (1, 3)
        for who in victims:
            workers[who].begin(keep_in_flight, 2)
        for who in survivors:
            workers[who].begin(query_again_and_again)
        assert all(policy.has_served(who, timeout=SECONDS) for who in range(4))
        for who in victims:
            workers[who].kill()
        assert all(policy.has_served(who, 20, SECONDS) for who in survivors)
        far = server.transport.transports[1]  # type: ignore[attr-defined]
        assert wait_until(lambda: far.num_clients == 1, SECONDS)
        for who in survivors:
            workers[who].tell()
            count, longest = workers[who].outcome().get()
            assert count >= 20
            assert longest < SECONDS


def test_a_shutdown_under_load_tells_everybody_and_leaves_nothing() -> None:
    policy = Recorder()
    with processes_of_both_kinds(policy, 2, max_batch_size=4) as (server, workers):
        for who, worker in enumerate(workers):
            worker.begin(ask_until_closed, who)
        assert all(policy.has_served(who, timeout=SECONDS) for who in range(4))
        server.shutdown()
        assert [worker.outcome().get() for worker in workers] == ["ServerClosedError"] * 4
        assert wait_until(lambda: not our_threads(), SECONDS)


def our_threads() -> list[str]:
    """But for calls into torch's store that were given up, which end by themselves."""
    names = [thread.name for thread in threading.enumerate()]
    return [each for each in names if each.startswith("meshinfer-") and each != "meshinfer-store"]


def ask_until_closed(station: SimpleNamespace, who: int) -> str:
    """Requests, three in flight, for as long as they are answered; what ended that."""
    try:
        while True:
            found = set(submit_and_collect(station, [who * WHO + value for value in range(3)]))
            if found != {"reply"}:
                return "".join(found - {"reply"})
    except ServerClosedError:  # already when it was sent
        return "ServerClosedError"


# --- In order ------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [NAMES, NAMES[::-1], ("slot", "shared_memory", "process_slot")])
def test_the_oldest_are_drained_first_whatever_brought_them(names: tuple[str, ...]) -> None:
    with merging(*names) as (merged, clients):
        order = [*clients.values(), *reversed(clients.values())]
        if "process_slot" in names:
            order = list(clients.values())  # one request of each
        futures = [submitted(merged, client, value) for value, client in enumerate(order)]
        found: list[int] = []
        for count in (1, 2, len(order)):
            found += drained(merged, count)
        assert found == list(range(len(order)))
        for value, future in enumerate(futures):
            check(future.result(SECONDS), value)


@pytest.mark.parametrize("flood", NAMES)
def test_a_flood_over_one_transport_does_not_hold_up_another(flood: str) -> None:
    with merging(*NAMES) as (merged, clients):
        patient = clients[next(name for name in NAMES if name != flood)]
        depth = 2 if flood == "distributed" else 8
        flooding = [submitted(merged, clients[flood], value) for value in range(depth)]
        waiting = submitted(merged, patient, 100)
        found: list[int] = []
        while (value := drained(merged, 1)[0]) != 100:
            found.append(value)
            check(flooding.pop(0).result(SECONDS), value)
            flooding.append(submitted(merged, clients[flood], depth + value))
        assert found == list(range(depth))
        assert len(drained(merged, 16)) == depth
        check(waiting.result(SECONDS), 100)


def test_a_batch_is_filled_from_all_and_takes_no_more_than_it_may() -> None:
    with merging(*NAMES) as (merged, clients):
        order = [clients["shared_memory"]] * 6 + [clients["distributed"]]
        futures = [submitted(merged, client, value) for value, client in enumerate(order)]
        assert merged.num_waiting == 7
        assert drained(merged, 4) == [0, 1, 2, 3]
        assert merged.num_waiting == 3
        assert merged.wait_for_work(0.0)
        assert drained(merged, 4) == [4, 5, 6]
        assert merged.num_waiting == 0
        assert not merged.wait_for_work(0.0)
        for value, future in enumerate(futures):
            check(future.result(SECONDS), value)


def test_a_waiting_thread_is_woken_by_either_and_by_nobody_without_a_reason() -> None:
    with merging("process_slot", "shared_memory", "distributed") as (merged, clients):
        for client in clients.values():
            woken: list[bool] = []
            waiter = threading.Thread(target=lambda w=woken: w.append(merged.wait_for_work()))
            waiter.start()
            future = client.submit(request(1))
            waiter.join(SECONDS)
            assert woken == [True]
            drained(merged, 4)
            check(future.result(SECONDS), 1)
        waiter = threading.Thread(target=lambda: woken.append(merged.wait_for_work()))
        waiter.start()
        waiter.join(0.05)
        assert waiter.is_alive()
        merged.wake()
        waiter.join(SECONDS)
        assert woken == [True, False]


# --- In one server -------------------------------------------------------------------------------


def test_every_kind_answers_with_the_version_and_with_the_policys_own_error() -> None:
    policy = Recorder()
    transports = [make() for make in EVERY.values()]
    with serving(policy, transports, min_batch_size=4, timeout=SECONDS) as server:
        server.update_model(lambda model: None, version=7)
        clients = [each.client() for each in transports]
        futures = [client.submit(request(value)) for value, client in enumerate(clients)]
        for value, future in enumerate(futures):
            answer = future.result(SECONDS)
            check(answer, value)
            assert answer["policy_version"].item() == 7
        assert policy.batches == [[0, 0, 0, 0]]
        futures = [client.submit(request(-2)) for client in clients]
        for future in futures:
            with pytest.raises(ValueError, match="spoiled"):
                future.result(SECONDS)
        assert server.stats().errors == 4
        for client in clients:
            client.close()


def test_a_thread_that_calls_with_rows_is_served_too() -> None:
    near = slot()
    request_layout = PayloadLayout.from_spec(request(0))
    response_layout = PayloadLayout.from_spec(reply(), name="response")
    with serving(Doubler(), [near, shared_memory()]), near.client() as client:
        call = client.row_call(request_layout, response_layout)
        for value in range(3):
            request_layout.pack(request(value), call.request)
            call.send()
            assert call.receive() == 0
            check(response_layout.unpack(call.reply), value)
        request_layout.pack(request(-2), call.request)
        call.send()
        with pytest.raises(ValueError, match="spoiled"):
            call.receive()


def test_the_thread_that_receives_serves_where_there_is_one() -> None:
    policy, transports = Recorder(), [shared_memory(), distributed()]
    with serving(policy, transports, inline=True) as server:
        for who, transport in enumerate(transports):
            with transport.client() as client:
                for value in range(20):
                    # Who finds somebody serving, be it the last request, leaves it to that thread.
                    assert wait_until(lambda: not server._policy.turn.locked(), SECONDS)
                    ask(client, who * WHO + value, SECONDS)
    names = {0: set(), 1: set()}  # type: dict[int, set[str]]
    for (who,), thread in zip(policy.batches, policy.threads, strict=True):
        names[who].add(thread)
    assert names[0] == {"meshinfer-server"}
    assert any(name.startswith("meshinfer-session") for name in names[1])


def test_the_version_key_is_set_for_all() -> None:
    transports = [distributed(), shared_memory(), slot()]
    with InferenceServer(Doubler(), transports, policy_version_key="made_by") as server:
        assert server.transport.policy_version_key == ("made_by",)  # type: ignore[attr-defined]
        for transport in transports:
            with transport.client() as client:
                assert client(request(1), SECONDS)["made_by"].item() == 0


def test_clients_are_counted_over_all() -> None:
    far, near = distributed(), process_slot()
    with serving(Doubler(), [far, near]) as server, far.client() as one, near.client() as other:
        ask(one, 1, SECONDS)
        ask(other, 1, SECONDS)
        assert server.stats().clients == 2


# --- The end of one, and of all ------------------------------------------------------------------


@pytest.mark.parametrize("closed", NAMES)
@pytest.mark.parametrize("names", [NAMES, ("shared_memory", "process_slot", "distributed")])
def test_a_transport_that_is_closed_ends_for_its_own_clients(
    closed: str, names: tuple[str, ...]
) -> None:
    policy = Doubler()
    transports = {name: EVERY[name]() for name in names}
    # not inline: the thread of the session that is closed would be computing
    with serving(policy, list(transports.values()), inline=False) as server:
        clients = {name: each.client() for name, each in transports.items()}
        for client in clients.values():
            ask(client, 1, SECONDS)
        held = clients[closed].submit(request(-1))
        assert policy.computing.wait(SECONDS)
        waiting = clients[closed].submit(request(2))
        assert wait_until(lambda: transports[closed].num_waiting == 1, SECONDS)
        transports[closed].close()
        policy.go_on.set()
        for future in (held, waiting):
            try:
                future.result(SECONDS)
            except ServerClosedError:
                continue
            assert future is held  # which may have been answered just before
        for name, client in clients.items():
            if name != closed:
                for value in range(3):
                    ask(client, value, SECONDS)
        assert server.is_alive
        if closed == names[0]:
            with server.client() as client:  # of another one
                ask(client, 1, SECONDS)
        for client in clients.values():
            client.close()
        for transport in transports.values():
            transport.close()
        assert wait_until(lambda: not server.is_alive, SECONDS)


@pytest.mark.parametrize("failing", NAMES)
@pytest.mark.parametrize("method", ["drain_slots", "wait_for_work"])
def test_a_transport_that_fails_is_closed_and_the_others_go_on(
    failing: str, method: str, caplog: pytest.LogCaptureFixture
) -> None:
    transports = {name: EVERY[name]() for name in NAMES}
    with serving(Doubler(), list(transports.values())) as server:
        clients = {name: each.client() for name, each in transports.items()}
        for client in clients.values():
            ask(client, 1, SECONDS)
        setattr(transports[failing], method, broken)
        with caplog.at_level(logging.ERROR, "meshinfer.inference"):
            transports[failing].wake()
            with pytest.raises(ServerClosedError):
                ask_again_and_again(clients[failing])
        assert "failed and is closed" in caplog.text
        assert "the memory is gone" in caplog.text
        caplog.clear()
        (other,) = (name for name in NAMES if name != failing)
        for value in range(3):
            ask(clients[other], value, SECONDS)
        setattr(transports[other], method, broken)
        with caplog.at_level(logging.ERROR, "meshinfer.inference"):
            transports[other].wake()
            with pytest.raises(ServerClosedError):
                ask_again_and_again(clients[other])
        assert wait_until(lambda: not server.is_alive, SECONDS)
        assert "the memory is gone" in caplog.text
        caplog.clear()
        for client in clients.values():
            client.close()


def ask_again_and_again(client: Any) -> None:
    while True:
        ask(client, 1, SECONDS)


def broken(*_: object) -> Any:
    raise OSError("the memory is gone")


def test_closing_closes_all_and_twice_is_once() -> None:
    with merging(*NAMES, "slot") as (merged, clients):
        futures = [submitted(merged, client, 1) for client in clients.values()]
        assert len(merged.drain_slots(2)) == 2  # and another one has been taken, perhaps
        for _ in range(2):
            merged.close()
            assert merged.closed
            assert all(each.closed for each in merged.transports)
        for future in futures:
            with pytest.raises(ServerClosedError):
                future.result(SECONDS)
        assert merged.drain_slots(4) == []
        assert not merged.wait_for_work(None)
        assert merged.num_waiting == merged.num_clients == 0
        merged.wake()
        for use in (merged.client, lambda: merged.submit(request(1)), merged.__enter__):
            with pytest.raises(ClosedError):
                use()


def test_one_that_is_dropped_leaves_its_transports_to_others() -> None:
    near, far = shared_memory(), distributed()
    merged = MergedTransport([far, near])
    assert not merged.wait_for_work(0.0)
    assert [t for t in threading.enumerate() if t.name == "meshinfer-lookout"]
    del merged
    gc.collect()
    assert wait_until(
        lambda: not [t for t in threading.enumerate() if t.name == "meshinfer-lookout"], SECONDS
    )
    with InferenceServer(Doubler(), far), far.client() as client:
        ask(client, 1, SECONDS)
    near.close()


# --- Serving until all have left -----------------------------------------------------------------


def test_serve_returns_when_the_clients_of_each_have_left() -> None:
    far, near = distributed(), process_slot()
    with serving(Doubler(), [far, near]) as server:
        served = threading.Thread(target=server.serve)
        served.start()
        one, other = far.client(), near.client()
        ask(one, 1, SECONDS)
        one.close()
        ask(other, 1, SECONDS)
        again = far.client()
        ask(again, 1, SECONDS)
        other.close()
        with pytest.raises(TimeoutError, match="still connected"):
            server.serve(timeout=0.05)
        again.close()
        served.join(SECONDS)
        assert not served.is_alive()
        with pytest.raises(ValueError, match=r"num_clients=2: each of several .* leave it out"):
            server.serve(2)


def test_serve_names_the_transport_that_does_not_know_its_clients() -> None:
    message = r"SharedMemoryTransport does not know .* use start"
    transports = [distributed(), shared_memory()]
    with serving(Doubler(), transports) as server, pytest.raises(TypeError, match=message):
        server.serve()


# --- Arguments -----------------------------------------------------------------------------------


def test_a_sequence_of_one_is_that_one() -> None:
    with shared_memory() as near:
        assert make_inference_transport([near]) is near
        with pytest.raises(ValueError, match="expected two or more to merge, found 1"):
            MergedTransport([near])


def test_kinds_and_configs_are_made_with_the_specs() -> None:
    config = TransportConfig("shared_memory", {"num_slots": 3})
    with InferenceServer(Doubler(), ["distributed", config], **SPECS) as server:
        assert isinstance(server.transport, MergedTransport)
        assert [inference_transport_kind(each) for each in server.transport.transports] == [*NAMES]
        assert server.transport.transports[1].num_slots == 3
        assert (server.transport_kind, server.transport_config) == ("custom", None)
        with server.client() as client:
            assert type(client).__name__ == "DistributedClient"
            ask(client, 1, SECONDS)


def test_facts_beside_ready_transports_are_for_those_that_are_made() -> None:
    near = shared_memory()
    with make_inference_transport((near, "distributed"), **SPECS) as merged:  # type: ignore[attr-defined]
        assert merged.transports[0] is near
    refused = pytest.raises(ValueError, match=r"'request_spec'.* beside a ready SharedMemory")
    with shared_memory() as one, shared_memory() as two, refused:
        make_inference_transport([one, two], **SPECS)


def test_what_was_made_is_closed_when_another_cannot_be() -> None:
    before = set(threading.enumerate())
    with pytest.raises(ValueError, match="needs num_slots") as raised:
        make_inference_transport(["distributed", "shared_memory"], **SPECS)
    assert raised.value.__traceback__ is not None
    assert wait_until(lambda: not set(threading.enumerate()) - before, SECONDS)


@pytest.mark.parametrize(
    ("transports", "message"),
    [
        ([], "expected transports, kinds or configs"),
        (["distributed", None], "expected transports, kinds or configs"),
    ],
)
def test_an_empty_place_is_refused(transports: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        InferenceServer(Doubler(), transports, **SPECS)


def test_options_beside_a_sequence_are_refused() -> None:
    with pytest.raises(ValueError, match=r"beside a sequence .* TransportConfig\(kind, options\)"):
        InferenceServer(Doubler(), ["distributed"], transport_options={"window": 1}, **SPECS)


def test_one_that_is_there_twice_is_refused() -> None:
    refused = pytest.raises(ValueError, match=r"transports\[1\].* is there twice")
    with shared_memory() as near, refused:
        MergedTransport([near, near])


@pytest.mark.parametrize("width", [(2, 1), (1, 2)])
def test_layouts_that_differ_are_named_by_key(width: tuple[int, int]) -> None:
    other = SharedMemoryTransport(request(0, width[0]), reply(width[1]), num_slots=1)
    key, what = ("'x'", "request") if width[0] == 2 else ("'y'", "response")
    message = rf"\[1\].* {what} layouts differ .*{key}: int64\[1\] here"
    with shared_memory() as near, other, pytest.raises(ValueError, match=message):
        MergedTransport([near, other])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (ThreadingTransport, r"\(ThreadingTransport\) cannot be merged: .* rows of one layout"),
        (lambda: SlotTransport(2), r"no fixed layout; make it with request_spec="),
        (object, r"\(object\) cannot be merged"),
    ],
)
def test_what_has_no_rows_is_refused(make: Callable[[], Any], message: str) -> None:
    other = make()
    with shared_memory() as near:
        with pytest.raises(TypeError, match=message):
            MergedTransport([near, other])
        with shared_memory() as far, pytest.raises(TypeError, match="cannot be merged"):
            MergedTransport([near, MergedTransport([near, far])])


def test_one_that_cannot_serve_here_is_refused() -> None:
    client = DistributedTransport(request(0), reply(), role="client", port=1, secret=SECRET)
    closed = shared_memory()
    closed.close()
    with shared_memory() as near:
        with pytest.raises(ValueError, match=r"\[1\] \(DistributedTransport\): .*role='client'"):
            MergedTransport([near, client])
        with pytest.raises(ClosedError, match=r"\[1\] \(SharedMemoryTransport\) was closed"):
            MergedTransport([near, closed])


def test_a_server_elsewhere_takes_one_transport() -> None:
    refused = pytest.raises(TypeError, match="service_backend='thread'")
    with shared_memory() as near, process_slot() as other, refused:
        InferenceServer(Doubler, [near, other], service_backend="process")


def test_it_says_what_it_consists_of_and_stays_here() -> None:
    with merging("shared_memory", "slot") as (merged, _):
        assert repr(merged) == (
            "MergedTransport([SharedMemoryTransport(num_slots=8), SlotTransport(1 clients)])"
        )
        with pytest.raises(TypeError, match="stays in the process"):
            merged.__reduce__()
        assert merged.row_device is None


def test_rows_on_a_device_are_known_whichever_brings_them() -> None:
    near, far = shared_memory(), distributed()
    far.row_device = torch.device("meta")
    with MergedTransport([near, far]) as merged:
        assert merged.row_device == torch.device("meta")
