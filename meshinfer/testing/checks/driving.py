"""The server's side of the protocol, driven by hand instead of by a server."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from meshinfer.inference.protocol import BatchedTransport, InferenceClient
from meshinfer.testing.check import conformance_check
from meshinfer.testing.expect import raises
from meshinfer.testing.harness import AT_ONCE, TransportHarness, within
from meshinfer.testing.serving import check_reply, make_transport, request

__all__ = ["CHECKS", "answer", "ask_for", "collect_handles"]

NUMBER = 6


def answer(payload: TensorDictBase) -> TensorDict:
    """What a client expects for ``payload``."""
    return TensorDict({"y": payload["x"] + 1}, batch_size=payload.batch_size)


def ask_for(clients: list[InferenceClient]) -> None:
    """Submit one request each; the last must fail with ValueError, the others get their replies."""
    futures = [client.submit(request(value)) for value, client in enumerate(clients)]
    for value, future in enumerate(futures[:-1]):
        check_reply(future.result(), value)
    with raises(ValueError, "the last one"):
        futures[-1].result()


def collect_handles(
    transport: Any, number: int, patience: float
) -> list[tuple[TensorDictBase, Any, float]]:
    """Drain until ``number`` requests have come, each time at most two."""
    found: list[tuple[TensorDictBase, Any, float]] = []
    deadline = time.monotonic() + patience
    while len(found) < number:
        assert time.monotonic() < deadline, f"{len(found)} of {number} requests came"
        transport.wait_for_work(patience)
        entries = list(zip(*transport.drain_with_timing(2), strict=True))
        assert len(entries) <= 2, f"drain_with_timing(2) gave {len(entries)}"
        found += entries
    return found


def _clients(transport: Any, number: int) -> list[Any]:
    return [transport.client() for _ in range(number)]


@conformance_check()
def the_server_side_can_be_driven_by_hand(harness: TransportHarness) -> None:
    """Drained requests are independent, timed, in order, and may be answered late and in any order."""
    transport = make_transport(harness)
    try:
        before = time.perf_counter()
        run = harness.run_client(ask_for, _clients(transport, NUMBER))
        found = collect_handles(transport, NUMBER, harness.patience)
        times = [before, *(arrived for _, _, arrived in found), time.perf_counter()]
        assert times == sorted(times), f"not the oldest first: {times}"
        found.sort(key=lambda entry: int(entry[0]["x"][0]))
        values = [int(payload["x"][0]) for payload, _, _ in found]
        assert values == list(range(NUMBER)), f"drained {values}"
        transport.resolve_exception(found[-1][1], ValueError("the last one"))
        for payload, handle, _ in reversed(found[:-1]):
            transport.resolve(handle, answer(payload))
        run.result(harness.patience)
    finally:
        transport.close()


@conformance_check()
def looking_for_work_never_waits_longer_than_told(harness: TransportHarness) -> None:
    """``drain`` never waits, and ``wait_for_work`` ends with its timeout, with a request, or with ``close``."""
    transport = make_transport(harness)
    try:
        with within(AT_ONCE, "drain() without requests"):
            assert transport.drain(4) == ([], [])
            assert transport.drain_with_timing(4) == ([], [], [])
        _wait_in_vain(transport)
        client = transport if harness.own_client else transport.client()
        future = client.submit(request(3))
        assert transport.wait_for_work(harness.patience), "no request came"
        payloads, handles = transport.drain(4)
        transport.resolve(handles[0], answer(payloads[0]))
        check_reply(future.result(harness.patience), 3)
        future = client.submit(request(4))
        payload, handle = _catch(transport, harness.patience)
        transport.resolve(handle, answer(payload))
        check_reply(future.result(harness.patience), 4)
        _wait_in_vain(transport)
        waiter = _start_waiting(transport)
    finally:
        transport.close()
    waiter.join(harness.patience)
    assert not waiter.is_alive(), "close() did not end wait_for_work()"


def _catch(transport: Any, patience: float) -> tuple[TensorDictBase, Any]:
    """A request, perhaps before whoever received it has rung for it: that ring must not end a later wait."""
    pause, deadline = threading.Event(), time.monotonic() + patience
    while not (found := transport.drain(1))[0]:
        assert time.monotonic() < deadline, "no request came"
        pause.wait(0.0005)
    return found[0][0], found[1][0]


def _wait_in_vain(transport: Any) -> None:
    began = time.monotonic()
    with within(AT_ONCE, "wait_for_work(0.05)"):
        assert not transport.wait_for_work(0.05)
    assert time.monotonic() > began + 0.04, "wait_for_work(0.05) ended early, with nothing"


def _start_waiting(transport: Any) -> threading.Thread:
    waiter = threading.Thread(
        target=transport.wait_for_work, name="conformance-waiter", daemon=True
    )
    waiter.start()
    return waiter


@conformance_check()
def answering_a_client_that_left_is_no_error(harness: TransportHarness) -> None:
    """``resolve`` and ``resolve_exception`` never raise or wait because their client has gone."""
    transport = make_transport(harness)
    try:
        run = harness.run_client(_submit_and_leave, _clients(transport, 5))
        found = collect_handles(transport, 5, harness.patience)
        found.sort(key=lambda entry: int(entry[0]["x"][0]))
        transport.resolve(found[0][1], answer(found[0][0]))
        run.result(harness.patience)
        with within(AT_ONCE, "answering a client that left"):
            for payload, handle, _ in found[1:3]:
                transport.resolve(handle, answer(payload))
            for _, handle, _ in found[3:]:
                transport.resolve_exception(handle, ValueError("too late"))
        run = harness.run_client(ask_for, _clients(transport, 1))
        ((_, handle, _),) = collect_handles(transport, 1, harness.patience)
        transport.resolve_exception(handle, ValueError("the last one"))
        run.result(harness.patience)
    finally:
        transport.close()


def _submit_and_leave(clients: list[InferenceClient]) -> None:
    futures = [client.submit(request(value)) for value, client in enumerate(clients)]
    check_reply(futures[0].result(), 0)


@conformance_check("fixed_layout")
def batches_move_as_rows(harness: TransportHarness) -> None:
    """A whole batch is gathered and scattered at once; a wrong result raises, and nothing of it is sent."""
    transport = make_transport(harness)
    assert isinstance(transport, BatchedTransport), "a fixed layout promises BatchedTransport"
    try:
        run = harness.run_client(_ask_for_rows, _clients(transport, 3))
        for number in (1, 3):
            _serve_rows(transport, number, harness.patience)
        run.result(harness.patience)
    finally:
        transport.close()


def _ask_for_rows(clients: list[InferenceClient]) -> None:
    check_reply(clients[0](request(9)), 9)
    futures = [client.submit(request(value)) for value, client in enumerate(clients)]
    for value, future in enumerate(futures):
        check_reply(future.result(), value)


def _wait_for_waiting(transport: Any, number: int, patience: float) -> None:
    pause, deadline = threading.Event(), time.monotonic() + patience
    while transport.num_waiting < number:
        assert time.monotonic() < deadline, f"{transport.num_waiting} of {number} requests came"
        pause.wait(0.002)


def _serve_rows(transport: Any, number: int, patience: float) -> None:
    staging, out = transport.request_batch(4), transport.response_batch(4)
    _wait_for_waiting(transport, number, patience)
    slots = list(transport.drain_slots(2))
    assert len(slots) == min(number, 2), f"drain_slots(2) gave {len(slots)}"
    slots += transport.drain_slots(4)
    batch = transport.gather_requests(slots, staging)
    assert batch.batch_size == torch.Size([number]), batch.batch_size
    good = answer(batch).set("undeclared", torch.zeros(number))
    with raises(KeyError, "y"):
        transport.resolve_batch(slots, good.exclude("y"), out)
    with raises((TypeError, ValueError), "y"):
        transport.resolve_batch(slots, good.clone().set("y", torch.zeros(number)), out)
    transport.resolve_batch(slots, good, out)


CHECKS = (
    the_server_side_can_be_driven_by_hand,
    looking_for_work_never_waits_longer_than_told,
    answering_a_client_that_left_is_no_error,
    batches_move_as_rows,
)
