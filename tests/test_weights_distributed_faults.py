"""What is left of a trainer that dies, or of a server that does."""

from __future__ import annotations

import signal
import threading
import time
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
from failure_roles import crew
from mesh_jobs import unused_port
from support import wait_until

from meshinfer import InferenceServer, PeerLostError
from meshinfer.weights.distributed import DistributedWeights


def test_a_trainer_that_dies_while_it_sends_leaves_the_old_version_and_the_next_one_is_found() -> (
    None
):
    with crew(2) as (trainer, successor):
        port = trainer.call(train, size=LARGE)
        with at(port, weights(0, LARGE)) as transport, transport.subscriber() as subscriber:
            assert trainer.call(subscribers, 1)
            trainer.begin(publish, 1, LARGE, version=7)
            old = subscriber.receive(SECONDS)
            subscriber.applied(old)
            trainer.outcome()
            inbox = subscriber._inbox
            trainer.begin(publish, 2, LARGE)
            lost: list[Any] = []

            def wait_for_more() -> None:
                try:
                    lost.append(subscriber.receive(SECONDS))
                except PeerLostError as error:
                    lost.append(error)

            waiting = threading.Thread(target=wait_for_more)
            waiting.start()
            while inbox._coming is None or not inbox._coming.views["body.bias"][0]:
                assert waiting.is_alive()
            trainer.signal(signal.SIGSTOP)
            killed = time.monotonic()
            trainer.kill()
            waiting.join(SECONDS)
            assert time.monotonic() - killed < 5.0
            assert isinstance(lost[0], PeerLostError), lost
            assert inbox._coming.views["body.weight"][-1] == 0.0  # it was on its way
            assert (old.version, value_of(old.weights)) == (7, 1.0)
            assert successor.call(train, size=LARGE, port=port) == port
            successor.begin(publish, 3, LARGE)
            new = subscriber.receive(SECONDS)
            assert (new.version, value_of(new.weights)) == (1, 3.0)


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
                assert wait_until(lambda: publisher.subscribers == 1, 5.0)
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
        assert wait_until(lambda: "was lost" in caplog.text or "gone" in caplog.text, 5.0)
        assert shown() == (1, [10.0, 10.0])
        assert server.health().serving
        successor.begin(train_in_mesh, port, 20.0)
        assert wait_until(lambda: shown() == (1, [20.0, 20.0]), SECONDS)
        assert server.stats().weight_updates == 2
    mesh.close()
