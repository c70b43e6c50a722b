"""What is left of a trainer that dies, or of a server that does."""

from __future__ import annotations

import functools
import signal
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from distributed_weights_roles import (
    LARGE,
    REPLY,
    REQUEST,
    SECONDS,
    Versioned,
    at,
    publish,
    receive,
    subscribe,
    subscribers,
    train,
    train_in_mesh,
    two_ranks,
    value_of,
    weights,
)
from failure_roles import Worker, crew
from support import unused_port, wait_until

from meshinfer import InferenceServer, PeerLostError, WeightUpdate
from meshinfer.weights.distributed import DistributedWeights


def test_a_trainer_that_dies_while_it_sends_leaves_the_old_version_and_the_next_one_is_found() -> (
    None
):
    with crew(2) as (trainer, successor):
        port = trainer.call(train, size=LARGE, port=unused_port())
        with at(port, weights(0, LARGE)) as transport, transport.subscriber() as subscriber:
            assert trainer.call(subscribers, 1)
            old, lost = stopped_in_the_midst(trainer, subscriber)
            trainer.kill()
            assert isinstance(lost.exception(SECONDS), PeerLostError), lost
            assert subscriber._inbox._coming is not None  # it was on its way
            assert value_of(old.weights) == old.version
            assert successor.call(train, size=LARGE, port=port) == port
            successor.begin(publish, 3, LARGE)
            new = subscriber.receive(SECONDS)
            assert (new.version, value_of(new.weights)) == (1, 3.0)


def stopped_in_the_midst(trainer: Worker, subscriber: Any) -> tuple[WeightUpdate, Future[Any]]:
    """Stop the trainer while it sends a version: the one before, and the call that waits for it.

    On a busy machine a version may have been sent before it is noticed that it comes; then the next one is stopped.
    """
    trainer.call(publish, 1, LARGE)
    pool, old = ThreadPoolExecutor(1), subscriber.receive(SECONDS)
    for version in range(2, 100):
        subscriber.applied(old)
        trainer.begin(publish, version, LARGE)
        waiting = pool.submit(subscriber.receive, 2 * SECONDS)
        begun = functools.partial(arrived, subscriber, "body.bias", 0, version)
        assert wait_until(lambda: waiting.done() or begun(), SECONDS, interval=0.0)  # noqa: B023
        trainer.signal(signal.SIGSTOP)
        # More is missing than the buffers of a socket hold.
        if begun() and not arrived(subscriber, "body.weight", LARGE // 8, version):
            pool.shutdown(wait=False)
            return old, waiting
        trainer.signal(signal.SIGCONT)
        trainer.outcome()
        old.release()
        old = waiting.result(SECONDS)
    raise AssertionError("it was never stopped in time")


def arrived(subscriber: Any, name: str, place: int, value: float) -> bool:
    """Whether this element of the version that is on its way has come."""
    coming = subscriber._inbox._coming
    return coming is not None and bool(coming.views[name][place] == value)


def test_a_server_that_dies_while_it_is_sent_weights_holds_nothing_up() -> None:
    with DistributedWeights(weights(0, LARGE)) as transport, crew(2) as (victim, other):
        publisher = transport.publisher(weights(1, LARGE))
        for worker in (victim, other):
            worker.call(subscribe, transport)
        assert wait_until(lambda: publisher.subscribers == 2, SECONDS)
        victim.begin(receive)
        assert wait_until(lambda: len(transport._desk._waiting) == 1, SECONDS)
        victim.signal(signal.SIGSTOP)  # what it is sent stays on its way
        places = set()
        for version in (1, 2, 3, 4):
            assert publisher.publish() == version
            assert other.call(receive) == (version, 1.0)
            if version == 2:
                victim.kill()
                assert wait_until(lambda: publisher.subscribers == 1, SECONDS)
            places.add(publisher._last.row.tensor.data_ptr())
        publisher.wait(timeout=SECONDS)
        assert len(places) <= 3  # and two for those who live


def test_a_server_keeps_serving_when_its_trainer_dies_and_follows_the_next_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    port = unused_port()
    mesh = two_ranks(0, port)
    server = InferenceServer(
        Versioned(-1.0),
        "slot",
        transport_options={"num_slots": 1, "request_spec": REQUEST, "response_spec": REPLY},
        weight_transport=mesh.weight_transport(Versioned()),
    )

    def shown() -> tuple[int, list[float]]:
        reply = client(REQUEST)
        return int(reply["policy_version"]), reply["y"].tolist()

    with crew(2) as (trainer, successor), server, server.client() as client:
        assert shown() == (0, [-1.0, -1.0])
        trainer.begin(train_in_mesh, port, 10.0)
        assert wait_until(lambda: shown() == (1, [10.0, 10.0]), SECONDS)
        trainer.outcome()
        trainer.kill()
        assert wait_until(lambda: "was lost" in caplog.text or "gone" in caplog.text, SECONDS)
        assert shown() == (1, [10.0, 10.0])
        assert server.health().serving
        successor.begin(train_in_mesh, port, 20.0)
        assert wait_until(lambda: shown() == (1, [20.0, 20.0]), SECONDS)
        assert server.stats().weight_updates == 2
    mesh.close()
