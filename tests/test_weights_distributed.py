"""Weights that reach other processes: who gets what, who is waited for, and who is refused."""

from __future__ import annotations

import logging
import pickle
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from distributed_weights_ranks import VERSIONS
from distributed_weights_roles import (
    SECONDS,
    at,
    receive,
    subscribe,
    value_of,
    weights,
)
from failure_roles import Worker, crew
from mesh_jobs import run, torchrun
from support import unused_port, wait_until

from meshinfer import MeshError, RefusedError, init_mesh
from meshinfer.weights import DirectWeights, WeightUpdate
from meshinfer.weights.distributed import DistributedWeights


@pytest.fixture
def here() -> Iterator[DistributedWeights]:
    """A transport whose publisher is in this process."""
    with DistributedWeights(weights(0), timeout=SECONDS) as transport:
        yield transport


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Worker]]:
    """A process for a server that no test kills."""
    with crew(1) as found:
        yield found


def copy_of(transport: DistributedWeights) -> DistributedWeights:
    copied: DistributedWeights = pickle.loads(pickle.dumps(transport))
    return copied


# --- Versions ------------------------------------------------------------------------------------


def test_a_subscriber_that_is_slow_skips_what_was_published_meanwhile(
    here: DistributedWeights,
) -> None:
    publisher = here.publisher()
    with here.subscriber() as subscriber:
        assert wait_until(lambda: publisher.subscribers == 1, SECONDS)
        with pytest.raises(TimeoutError):
            subscriber.receive(0.01)  # it no longer asks afterwards
        for value in (1, 2, 3):
            publisher.publish(weights(value))
        update = subscriber.receive(SECONDS)
        assert (update.version, value_of(update.weights)) == (3, 3.0)
        publisher.publish({"steps": torch.tensor(4.0)})
        update = subscriber.receive(SECONDS)
        assert {name: tensor.max().item() for name, tensor in update.weights.items()} == {
            "body.bias": 3.0,
            "body.weight": 3.0,
            "steps": 4.0,
        }


def test_memory_is_written_again_only_after_it_was_released(here: DistributedWeights) -> None:
    publisher = here.publisher()
    with here.subscriber() as subscriber:

        def next_update(value: float) -> WeightUpdate:
            publisher.publish(weights(value))
            return subscriber.receive(SECONDS)

        def places(*updates: WeightUpdate) -> list[int]:
            return [update.weights["steps"].data_ptr() for update in updates]

        held = [next_update(value) for value in (1, 2, 3)]
        assert [value_of(update.weights) for update in held] == [1.0, 2.0, 3.0]
        assert len(set(places(*held))) == 3
        for update in held[:2]:
            update.release()
        fresh = [next_update(value) for value in (4, 5)]
        assert sorted(places(*fresh)) == sorted(places(*held[:2]))
        assert value_of(held[2].weights) == 3.0


def test_publishes_that_overlap_end_with_the_greater_and_are_never_mixed(
    here: DistributedWeights,
) -> None:
    publisher = here.publisher()
    seen: list[tuple[int, float]] = []

    def publish_many() -> None:
        for _ in range(100):
            with turn:
                count[0] += 1
                value = count[0]
            try:
                publisher.publish(weights(value), version=value)
            except ValueError:  # the other one was faster with a greater one
                continue

    count, turn = [0], threading.Lock()
    with here.subscriber() as subscriber:
        threads = [threading.Thread(target=publish_many) for _ in range(2)]
        for thread in threads:
            thread.start()
        while not seen or seen[-1][0] < 200:
            update = subscriber.receive(SECONDS)
            seen.append((update.version, value_of(update.weights)))
            update.release()
        for thread in threads:
            thread.join()
    versions = [version for version, _ in seen]
    assert versions == sorted(set(versions))
    assert [value for _, value in seen] == versions


def test_a_subscriber_of_another_process_that_comes_late_gets_the_newest(
    here: DistributedWeights, workers: list[Worker]
) -> None:
    publisher = here.publisher(weights(7))
    for _ in range(3):
        publisher.publish()
    publisher.close()
    workers[0].call(subscribe, here)
    assert workers[0].call(receive) == (3, 7.0)
    second = here.publisher(weights(8))  # its versions begin anew
    second.publish()
    assert workers[0].call(receive) == (1, 8.0)
    second.wait(timeout=SECONDS)


# --- Waiting -------------------------------------------------------------------------------------


def test_waiting_names_who_does_not_serve_the_version_and_waits_for_no_dead(
    here: DistributedWeights,
) -> None:
    publisher = here.publisher()
    with crew(2) as (frozen, doomed):
        frozen.call(subscribe, copy_of(here))
        doomed.call(subscribe, copy_of(here))
        assert wait_until(lambda: publisher.subscribers == 2, SECONDS)
        publisher.publish(weights(1))
        assert frozen.call(receive) == doomed.call(receive) == (1, 1.0)
        publisher.wait(1, timeout=SECONDS)
        frozen.signal(signal.SIGSTOP)
        doomed.begin(receive)
        for value in (2, 3, 4):
            publisher.publish(weights(value))
        assert doomed.outcome().get()[1] >= 2.0
        with pytest.raises(TimeoutError, match="version 4 was not served") as caught:
            publisher.wait(timeout=0.1)
        assert f"(pid {frozen.pid} on " in str(caught.value)
        assert "(version 1)" in str(caught.value)
        doomed.kill()
        frozen.signal(signal.SIGCONT)
        assert frozen.call(receive) == (4, 4.0)
        publisher.wait(4, timeout=SECONDS)
        # The killed one may have served version 4 before, so that nobody has waited for its end to be noticed.
        assert wait_until(lambda: publisher.subscribers == 1, SECONDS)


# --- Admission -----------------------------------------------------------------------------------


def test_other_weights_are_refused_once_and_both_ends_name_what_differs(
    here: DistributedWeights, caplog: pytest.LogCaptureFixture
) -> None:
    assert here.address is not None
    other = {**weights(0), "steps": torch.zeros(2), "head.bias": torch.zeros(1)}
    wrong = at(here.address.port, other, secret=here.address.secret, rank=4)
    with caplog.at_level(logging.WARNING), wrong.subscriber() as subscriber:
        with pytest.raises(RefusedError) as caught:
            subscriber.receive(SECONDS)
        for text in (str(caught.value), caplog.text):
            assert "rank 4" in text
            assert "the weights layouts differ" in text
            assert "key 'head.bias' only there" in text
            assert "key 'steps': float32[] here, float32[2] there" in text
        with pytest.raises(TimeoutError, match=r"there is no publisher: .*head\.bias"):
            subscriber.receive(0.01)
    wrong.close()


def test_weights_that_are_tied_elsewhere_are_refused(here: DistributedWeights) -> None:
    tied = torch.zeros(3)
    both = {"a": tied, "b": tied}
    with DistributedWeights(both) as transport:
        assert transport.address is not None
        address = transport.address
        apart = at(address.port, {"a": torch.zeros(3)}, secret=address.secret)
        with (
            apart,
            apart.subscriber() as subscriber,
            pytest.raises(RefusedError, match="'b' is tied to 'a' here, not tied there"),
        ):
            subscriber.receive(SECONDS)


def test_another_secret_is_refused_and_none_is_asked_for(here: DistributedWeights) -> None:
    assert here.address is not None
    stranger = at(here.address.port, weights(0), secret="another")
    with (
        stranger,
        stranger.subscriber() as subscriber,
        pytest.raises(RefusedError, match="job secret"),
    ):
        subscriber.receive(SECONDS)
    with pytest.raises(ValueError, match="needs the job's secret"):
        at(here.address.port, weights(0), secret=None)
    assert here.address.secret.hex() not in repr(here)
    with pytest.raises(ValueError, match=r"role='subscriber'.*role='publisher' in the process"):
        copy_of(here).publisher()


# --- Meshes --------------------------------------------------------------------------------------


def test_which_rank_of_a_mesh_publishes_and_which_subscribes() -> None:
    groups = {"server": 1, "learner": 2, "env": 1}
    where = {"world_size": 4, "host": "127.0.0.1", "port": unused_port()}
    server, learner, second, env = (init_mesh(groups, rank=rank, **where) for rank in range(4))
    spec = weights(0)
    with (
        learner.weight_transport(spec) as trainer,
        server.weight_transport(spec) as served,
        env.weight_transport(spec, subscribers=["server", "env"]) as copied,
    ):
        trainer.publisher(weights(5)).publish()
        for transport in (served, copied):
            assert value_of(transport.subscriber().receive(SECONDS).weights) == 5.0
    with pytest.raises(MeshError, match="rank 2 is not the first of group 'learner': rank 1 publ"):
        second.weight_transport(spec)
    with pytest.raises(MeshError, match=r"rank 3 is in group 'env'.*subscribers="):
        env.weight_transport(spec)
    alone = server.weight_transport(spec, publishers="server")
    assert isinstance(alone, DirectWeights)
    for mesh in (env, second, learner, server):
        mesh.close()


@pytest.mark.slow
def test_every_action_of_a_job_names_the_version_that_computed_it(tmp_path: Path) -> None:
    script = str(Path(__file__).with_name("distributed_weights_ranks.py"))
    ended = run(tmp_path, torchrun(5, script))
    assert ended.code == 0, str(ended)
    assert "Traceback" not in ended.stderr, str(ended)
    assert ended.results["learner"]["published"] == VERSIONS
    for rank in (3, 4):
        assert ended.results[f"env{rank}"]["rising"]
        assert ended.results[f"env{rank}"]["versions"] > 1
    for rank in (0, 1):
        assert VERSIONS / 10 <= ended.results[f"server{rank}"]["updates"] <= VERSIONS
