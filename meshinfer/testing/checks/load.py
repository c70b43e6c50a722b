"""Much at once, and nothing for a long time."""

from __future__ import annotations

import threading

from tensordict import TensorDict, TensorDictBase

from meshinfer.errors import TransportError
from meshinfer.inference.protocol import InferenceClient
from meshinfer.testing.check import conformance_check
from meshinfer.testing.checks.replies import count
from meshinfer.testing.harness import TransportHarness, report
from meshinfer.testing.serving import AddOne, check_reply, request, serving

__all__ = ["CHECKS"]

AT_ONCE = 500
TIMEOUT = 0.5
"""Seconds: of the transport that is kept idle."""
SLOW = 10_000


@conformance_check("many_in_flight")
def a_flood_is_answered_in_full(harness: TransportHarness) -> None:
    """Hundreds of requests that one client submits at once are all answered, while another client is served."""
    policy = AddOne()
    with serving(harness, policy, max_batch_size=16) as server:
        flood = harness.run_client(_flood, server.client())
        harness.run_client(count, server.client(), 10_000, 20, None).result(harness.patience)
        flood.result(harness.patience)
    arrived = sorted(value for batch in policy.batches for value in batch if value < 10_000)
    assert arrived == list(range(AT_ONCE)), "requests were lost or computed twice"
    assert max(map(len, policy.batches)) <= 16, "a batch was larger than max_batch_size"


def _flood(client: InferenceClient) -> None:
    futures = [client.submit(request(value)) for value in range(AT_ONCE)]
    for value, future in enumerate(futures):
        check_reply(future.result(), value)


class _Slow(AddOne):
    """Needs longer than the transport's timeout for a request of :data:`SLOW`."""

    def __call__(self, batch: TensorDictBase) -> TensorDict:
        result = super().__call__(batch)
        if SLOW in self.batches[-1]:
            threading.Event().wait(1.5 * TIMEOUT)
        return result


@conformance_check()
def idling_and_slow_policies_are_no_timeout(harness: TransportHarness) -> None:
    """Neither a policy that is slower than the transport's timeout nor a longer pause between requests is an error."""
    with serving(harness, _Slow(), options={"timeout": TIMEOUT}) as server:
        pausing = harness.run_client(_pause, server.client())
        pausing.next_report(harness.patience)
        harness.run_client(_ask_slowly, server.client()).result(harness.patience)
        pausing.result(harness.patience)


def _join(client: InferenceClient) -> None:
    """Joining may take no longer than the transport's timeout, which on a busy machine takes several tries."""
    while True:
        try:
            return check_reply(client(request(1)), 1)
        except (TimeoutError, TransportError):
            continue


def _ask_slowly(client: InferenceClient) -> None:
    _join(client)
    check_reply(client(request(SLOW)), SLOW)


def _pause(client: InferenceClient) -> None:
    _join(client)
    report()
    threading.Event().wait(2 * TIMEOUT)
    future = client.submit(request(2))
    threading.Event().wait(0.5 * TIMEOUT)
    check_reply(future.result(), 2)


CHECKS = (a_flood_is_answered_in_full, idling_and_slow_policies_are_no_timeout)
