"""What collectors hand out: the same transitions whatever the backends and the transport."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import collector_roles as roles
import pytest
import torch
from collector_roles import (
    PROCESSES,
    SECONDS,
    THREADS,
    Counter,
    Counters,
    Recurrent,
    Sum,
    as_long_as_threads,
    by_env,
    check,
    collector,
    enough,
)
from support import wait_until
from tensordict import TensorDict
from tensordict.nn import InteractionType, TensorDictModule
from tensordict.nn.probabilistic import interaction_type

from meshinfer import ClosedError, InferenceDeviceConfig, InferenceServerConfig, SlotTransport
from meshinfer.weights import make_weight_transport

WAYS = [
    (THREADS, THREADS, "auto", "slot"),
    (THREADS, THREADS, "queue", "queue"),
    (THREADS, PROCESSES, "process_slot", "process_slot"),
    (PROCESSES, THREADS, "auto", "shared_memory"),
    (PROCESSES, THREADS, "queue", "queue"),
    (PROCESSES, PROCESSES, "process_slot", "process_slot"),
    (PROCESSES, PROCESSES, "distributed", "distributed"),
]


@pytest.mark.parametrize(("envs", "policy", "transport", "kind"), WAYS)
def test_transitions_are_the_same_whatever_the_way(
    envs: str, policy: str, transport: str, kind: str
) -> None:
    with collector(env_backend=envs, policy_backend=policy, transport=transport) as made:
        assert made.transport_kind == kind
        assert made.transport_config is not None
        assert made.transport_config.kind == transport
        rows = enough(made, 30, envs=2)
    for env, found in rows.items():
        check(found, length=5, seed=100 + env)
        assert found["policy_version"].equal(torch.zeros(len(found), dtype=torch.int64))


def test_frames_of_one_environment_in_batches_of_any_size() -> None:
    with collector(create_env_fn=Counter, frames_per_batch=7, total_frames=30) as made:
        batches = list(made)
        assert list(made) == []  # all have been handed out
        assert made.stats().frames == 30
    assert [len(batch) for batch in batches] == [7, 7, 7, 7, 2]
    check(torch.cat(batches), length=5, seed=100)


def test_episodes_of_one_step() -> None:
    envs = [lambda: Counter(length=1)] * 3
    with collector(create_env_fn=envs, frames_per_batch=10, total_frames=40) as made:
        for env, rows in by_env(list(made)).items():
            check(rows, length=1, seed=100 + env)


@pytest.mark.parametrize("requests", [1, 2, 4])
@pytest.mark.parametrize("transport", ["auto", "queue"])
def test_rows_of_vectors(requests: int, transport: str) -> None:
    with collector(
        create_env_fn=Counters,
        num_envs=2,
        max_inflight_per_env=requests,
        transport=transport,
        frames_per_batch=13,
    ) as made:
        rows = enough(_sized(made, 13), 12, envs=8)
        assert made.stats().server.requests >= 2 * requests
    for env, found in rows.items():
        check(found, length=2 + env % 4, seed=100 + env)


def _sized(batches: Iterable[TensorDict], size: int) -> Iterator[TensorDict]:
    """``batches``, each of which is environment by environment, and of this size."""
    for batch in batches:
        assert len(batch) == size
        assert (batch["env_index"].diff() >= 0).all()
        yield batch


def test_the_last_batch_of_vectors_is_as_short_as_it_must_be() -> None:
    with collector(create_env_fn=Counters, frames_per_batch=13, total_frames=30) as made:
        assert [len(batch) for batch in made] == [13, 13, 4]


def test_vectors_in_processes() -> None:
    with collector(
        create_env_fn=[Counters], env_backend=PROCESSES, max_inflight_per_env=2, total_frames=40
    ) as made:
        for env, found in by_env(list(made)).items():
            check(found, length=2 + env, seed=100 + env)


def test_an_environment_s_process_computes_with_one_thread_unless_it_asks_for_more() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        envs = [as_long_as_threads, partial(as_long_as_threads, 3)]
        with collector(create_env_fn=envs, env_backend=PROCESSES, start_method="fork") as made:
            rows = enough(made, 12, envs=2)
    finally:
        torch.set_num_threads(threads)
    check(rows[0], length=1, seed=100)
    check(rows[1], length=3, seed=101)


@pytest.mark.parametrize("where", [("reset", 0), ("step", 3)])
def test_nobody_waits_for_a_slow_environment(where: tuple[str, int]) -> None:
    held, reached = threading.Event(), threading.Event()

    def hold(what: str, step: int) -> None:
        if (what, step) == where and not held.is_set():
            reached.set()
            assert held.wait(SECONDS)

    envs = [Counter, lambda: Counter(trouble=hold)]
    with collector(create_env_fn=envs) as made:
        batches = iter(made)
        next(batches)
        assert reached.wait(SECONDS)
        rows = by_env([next(batches) for _ in range(5)])
        assert len(rows[0]) >= 5 * 20 - 2
        held.set()
        assert len(enough(batches, 3, envs=2)[1]) >= 3


def test_who_does_not_read_holds_the_environments_up() -> None:
    with collector(frames_per_batch=40) as made:
        batches = iter(made)
        next(batches)
        room = sum(ring.capacity for ring in made._crew.rings)
        assert room <= 60
        assert wait_until(lambda: made.stats().buffered == room, SECONDS)
        assert wait_until(lambda: not asks_within(made, 0.2), SECONDS)
        assert made.stats().buffered == room
        for _ in range(5):
            next(batches)


def asks_within(made: Any, seconds: float) -> bool:
    """Whether the policy is asked for anything meanwhile."""
    asked = made.stats().server.requests
    threading.Event().wait(seconds)
    return bool(made.stats().server.requests > asked)


def test_iterating_again_goes_on() -> None:
    with collector() as made:
        batches = []
        for batch in made:
            batches.append(batch)
            if len(batches) % 3 == 0:
                break
        for batch in made:
            batches.append(batch)
            if len(batches) == 6:
                break
        for env, rows in by_env(batches).items():
            check(rows, length=5, seed=100 + env)


def test_one_loop_at_a_time() -> None:
    with collector() as made:
        first = iter(made)
        next(first)
        with pytest.raises(RuntimeError, match="another loop"):
            next(iter(made))
        del first
        next(iter(made))


def test_shutdown_ends_a_loop_in_another_thread() -> None:
    held = threading.Event()

    def hold(what: str, step: int) -> None:
        if what == "step":
            held.wait(SECONDS)

    made = collector(create_env_fn=[lambda: Counter(trouble=hold)])
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.extend(made))
    thread.start()
    assert wait_until(lambda: made.stats().server.requests > 0, SECONDS)
    ending = threading.Thread(target=made.shutdown, args=(SECONDS,))
    ending.start()
    assert wait_until(lambda: made._closing.closed, SECONDS)
    held.set()
    ending.join(SECONDS)
    thread.join(SECONDS)
    assert not thread.is_alive()
    assert found == []
    with pytest.raises(ClosedError):
        iter(made)
    with pytest.raises(ClosedError):
        made.update_policy_weights_(Sum())
    made.shutdown()
    assert "closed" in repr(made)


@pytest.mark.parametrize("backend", [THREADS, PROCESSES])
def test_each_transition_has_the_version_that_made_it(backend: str) -> None:
    with collector(policy_backend=backend, policy_version=3) as made:
        with pytest.raises(ValueError, match="tag"):
            made.update_policy_weights_({"other": torch.zeros(())})
        assert made.update_policy_weights_(Sum().like(10.0), version=10) == 10
        batches = iter(made)
        rows = by_env([next(batches)])
        assert all(found["policy_version"].unique().tolist() == [10] for found in rows.values())
        stop = threading.Event()

        def learn() -> None:
            version = 10
            while not stop.wait(0.005):
                version += 1
                made.update_policy_weights_(Sum().like(version), version=version)

        learner = threading.Thread(target=learn)
        learner.start()
        try:
            found = []
            until = time.monotonic() + SECONDS
            while len(found) < 20 or (last_version(found) < 12 and time.monotonic() < until):
                found.append(next(batches))
        finally:
            stop.set()
            learner.join()
        for rows in by_env(found).values():
            assert rows["tag"].long().equal(rows["policy_version"])
            assert (rows["policy_version"].diff() >= 0).all()
        assert last_version(found) > 11


def last_version(batches: list[TensorDict]) -> int:
    return int(batches[-1]["policy_version"].max())


def test_weights_through_a_transport() -> None:
    policy = Sum()
    weights = make_weight_transport("direct", spec=policy)
    with (
        weights.publisher(policy) as publisher,
        collector(policy=policy, weight_transport=weights) as made,
    ):
        batches = iter(made)
        next(batches)
        with torch.no_grad():
            policy.tag.fill_(5.0)
        version = publisher.publish()
        publisher.wait(version, SECONDS)
        for batch in batches:
            assert batch["tag"].equal(5.0 * (batch["policy_version"] == version))
            if (batch["policy_version"] == version).all():
                break
    weights.close()


@pytest.mark.parametrize("key", ["hidden", ("next", "hidden")])
@pytest.mark.parametrize("env", [Counter, Counters])
def test_policy_state_is_handed_on_within_an_episode(key: Any, env: Any) -> None:
    state = TensorDict({"hidden": torch.full((1,), 7.0)}, [])
    with collector(
        create_env_fn=[env], policy=Recurrent(key), initial_state=state, total_frames=60
    ) as made:
        for rows in by_env(list(made)).values():
            expected = 7.0 + rows["step_index"].unsqueeze(-1)
            assert rows["hidden"].equal(expected)
            assert rows["next", "hidden"].equal(expected + 1)


def test_what_is_declared_and_where_batches_go() -> None:
    spec = {"observation": torch.zeros(3)}
    with collector(
        policy=lambda batch: Sum()(batch).set("mode", _mode(batch)),
        request_spec=spec,
        response_spec={"action": torch.zeros((), dtype=torch.int64), "mode": torch.zeros(())},
        policy_version_key=None,
        interaction_type=InteractionType.MEAN,
        server_config=InferenceServerConfig(max_batch_size=1),
        device_config=InferenceDeviceConfig(storing_device="cpu"),
        postproc=lambda batch: (batch["mode"], sorted(batch.keys())),
    ) as made:
        mode, keys = next(iter(made))
        assert made.stats().server.batch_sizes.keys() == {1}
    assert mode.unique().tolist() == [1.0]
    assert keys == [
        "action",
        "env_index",
        "episode_id",
        "mode",
        "next",
        "observation",
        "step_index",
    ]


def _mode(batch: Any) -> torch.Tensor:
    return torch.full((len(batch),), float(interaction_type() is InteractionType.MEAN))


@pytest.mark.parametrize("backend", [THREADS, PROCESSES])
def test_statistics_are_there_after_the_end(backend: str) -> None:
    with collector(policy_backend=backend, total_frames=40) as made:
        assert [len(batch) for batch in made] == [20, 20]
    found = made.stats()
    assert (found.batches, found.frames) == (2, 40)
    assert found.server.requests >= 40
    assert found.server.clients == 0
    assert made.stats() == found or backend == THREADS  # where time goes on


def test_a_transport_that_was_made_before() -> None:
    transport = SlotTransport(4)
    with collector(transport=transport, total_frames=40) as made:
        assert made.server.transport is transport
        assert (made.transport_kind, made.transport_config) == ("slot", None)
        for env, rows in by_env(list(made)).items():
            check(rows, length=5, seed=100 + env)


def test_plain_modules_and_factories() -> None:
    net = torch.nn.Linear(3, 1, bias=False)
    torch.nn.init.ones_(net.weight)
    policy = torch.nn.Sequential(net, torch.nn.Flatten(0), _Long())
    keys: dict[str, Any] = {"in_keys": ["observation"], "out_keys": ["action"]}
    for given in (
        {"policy": policy, **keys},
        {"policy": TensorDictModule(policy, **keys)},
        {"policy": None, "policy_factory": lambda: policy, **keys},
    ):
        with collector(total_frames=20, **given) as made:
            (batch,) = made
            assert set(batch.keys()) >= {"observation", "action"}
            assert made.server.config.max_batch_size == 64


class _Long(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.round().long()


ACTION = torch.zeros((), dtype=torch.int64)
REFUSED = [
    (ValueError, "create_env_fn is empty", {"create_env_fn": []}),
    (TypeError, r"create_env_fn\[1\]", {"create_env_fn": [Counter, Counter()]}),
    (ValueError, "num_envs=3", {"num_envs": 3}),
    (ValueError, "frames_per_batch", {"frames_per_batch": 0}),
    (ValueError, "total_frames", {"total_frames": -2}),
    (ValueError, "step_timeout", {"step_timeout": 0.0}),
    (ValueError, "env_backend='ray'", {"env_backend": "ray"}),
    (TypeError, "policy= or policy_factory=", {"policy_factory": Sum}),
    (TypeError, "policy: expected a callable", {"policy": 3}),
    (
        ValueError,
        "two names",
        {"interaction_type": InteractionType.MODE, "exploration_type": InteractionType.MODE},
    ),
    (ValueError, "environment 1 differs .* vector of 4", {"create_env_fn": [Counter, Counters]}),
    (ValueError, "max_inflight_per_env=3", {"create_env_fn": Counters, "max_inflight_per_env": 3}),
    (ValueError, "max_inflight_per_env=2", {"max_inflight_per_env": 2}),
    (
        ValueError,
        "takes 'action' from",
        {"policy": lambda batch: batch.select().set("act", batch["observation"])},
    ),
    (
        ValueError,
        "initial_state 'hidden': the policy must",
        {"initial_state": TensorDict({"hidden": torch.zeros(1)})},
    ),
    (
        ValueError,
        "initial_state: 'observation'",
        {"initial_state": TensorDict({"observation": torch.zeros(1)})},
    ),
    (
        ValueError,
        "request_spec 'x'",
        {"request_spec": {"x": torch.zeros(1)}, "response_spec": {"action": ACTION}},
    ),
    (ValueError, "does not work with", {"transport": "slot", "env_backend": PROCESSES}),
    (ValueError, "beside a ready", {"transport": SlotTransport(2), "transport_options": {"a": 1}}),
    (ValueError, "env_device", {"device_config": InferenceDeviceConfig(env_device="meta")}),
]


@pytest.mark.parametrize(("error", "text", "arguments"), REFUSED)
def test_what_cannot_work_is_refused(error: Any, text: str, arguments: dict[str, Any]) -> None:
    with pytest.raises(error, match=text):
        collector(**arguments)


def test_collectors_are_not_sent_anywhere() -> None:
    import pickle

    with collector() as made, pytest.raises(TypeError, match="stays in the process"):
        pickle.dumps(made)
    assert roles.SECONDS == SECONDS
