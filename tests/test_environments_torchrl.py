"""The adapter for TorchRL's environments: on a stand-in of their interface, and on its own where it is installed."""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, TensorDict
from tensordict.nn import TensorDictModule

from meshinfer.collect import as_environment
from meshinfer.collect.envs.torchrl import TorchRLEnvironment

needs_torchrl = pytest.mark.skipif(
    importlib.util.find_spec("torchrl") is None, reason="TorchRL is not installed"
)


class Spec:
    """What the adapter asks of a TorchRL ``Composite``."""

    def __init__(self, zeros: TensorDict) -> None:
        self._zeros = zeros

    def zero(self) -> TensorDict:
        return self._zeros.clone()

    def __getitem__(self, key: Any) -> Any:
        return self._zeros[key]


class Counters:
    """Row ``i`` counts to ``i + 2``, then ends: even rows by themselves, odd ones because they are cut."""

    is_closed = False

    def __init__(self, batch: tuple[int, ...], **changes: Any) -> None:
        self.batch_size = torch.Size(batch)
        zeros = TensorDict(
            {"count": torch.zeros(*batch, 1), "agent": {"seed": torch.zeros(batch)}}, batch
        )
        action = TensorDict({"agent": {"move": torch.zeros(*batch, 2, dtype=torch.int64)}}, batch)
        self.observation_spec, self.full_action_spec = Spec(zeros), Spec(action)
        self.reward_spec = torch.zeros(*batch, 1)
        self._last = torch.arange(self.batch_size.numel()).reshape(batch) + 2
        self._seed = -1
        self.reward_keys, self.done_keys = ["reward"], ["done", "terminated", "truncated"]
        vars(self).update(changes)

    def set_seed(self, seed: int) -> None:
        self._seed = seed

    def reset(self) -> TensorDict:
        root = self.observation_spec.zero()
        root["agent", "seed"].fill_(self._seed)
        return root

    def step_and_maybe_reset(self, root: TensorDict) -> tuple[TensorDict, TensorDict]:
        count = root["count"] + 1
        done = count[..., 0] == self._last
        cut = done & (self._last % 2 == 1)
        agent = {"seed": root["agent", "seed"].clone()}
        reward = root["agent", "move"].sum(-1, keepdim=True).float()
        ends = {"done": done[..., None], "truncated": cut[..., None]}
        following = TensorDict(
            {"count": count, "agent": agent, "reward": reward, **ends}, self.batch_size
        )
        after = TensorDict(
            {"count": count * ~done[..., None], "agent": dict(agent)}, self.batch_size
        )
        return root.clone().set("next", following), after

    def close(self) -> None:
        self.is_closed = True


class TransformedEnv(Counters):
    """Known by its name."""


def test_rows_that_are_reset_by_the_environment() -> None:
    bare = Counters((2,))
    env = TorchRLEnvironment(bare)
    assert (env.num_envs, env.is_batched) == (2, True)
    assert env.reset(9)["agent", "seed"].tolist() == [9, 9]
    action = TensorDict({"agent": {"move": torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)}}, [2])
    results = [env.step(action) for _ in range(3)]
    assert [r.next["count"].ravel().tolist() for r in results] == [[1, 1], [2, 2], [1, 3]]
    assert [r.observation["count"].ravel().tolist() for r in results] == [[1, 1], [0, 2], [1, 0]]
    assert [r.terminated.tolist() for r in results] == [
        [False, False],
        [True, False],
        [False, False],
    ]
    assert [r.truncated.tolist() for r in results] == [
        [False, False],
        [False, False],
        [False, True],
    ]
    assert results[0].reward.tolist() == [3, 7]
    assert results[0].stepped is None
    env.close()
    env.close()
    assert bare.is_closed


def test_a_single_environment_gives_plain_numbers() -> None:
    env = TorchRLEnvironment(Counters(()))
    assert (env.num_envs, env.is_batched) == (1, False)
    assert env.observation_spec["count"].shape == (1,)
    env.reset()
    results = [env.step({("agent", "move"): np.array([1, 2])}) for _ in range(2)]
    assert [r[1:4] for r in results] == [(3.0, False, False), (3.0, True, False)]
    assert results[0].observation is results[0].next
    assert results[1].observation["count"] == [0]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"batch_size": torch.Size((1, 2))}, ValueError, r"expected \[\] or \[B\], found \[1, 2\]"),
        ({"reward_keys": ["a", "b"]}, ValueError, r"expected one 'reward'.*found \['a', 'b'\]"),
        (
            {"done_keys": [("agent", "done")]},
            ValueError,
            r"found \['reward'\] and \[\('agent', 'done'\)\]",
        ),
        ({"reward_spec": torch.zeros(3)}, ValueError, r"reward spec: expected \[1\], found \[3\]"),
        (
            {"observation_spec": Spec(TensorDict({"a": torch.zeros(1, dtype=torch.bfloat16)}, []))},
            *(TypeError, "observation spec 'a': NumPy has no dtype for torch.bfloat16"),
        ),
        (
            {"observation_spec": Spec(TensorDict({"a": NonTensorData("x")}, []))},
            *(TypeError, "observation 'a': expected an example tensor, found NonTensorData"),
        ),
    ],
)
def test_what_cannot_be_collected_from(changes: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TorchRLEnvironment(Counters((), **changes))


def test_a_transform_whose_keys_come_from_the_policy() -> None:
    primer = type("TensorDictPrimer", (), {})()
    with pytest.raises(ValueError, match="TensorDictPrimer: its keys come from the policy"):
        TorchRLEnvironment(TransformedEnv((), transform=primer))


def test_actions_that_do_not_fit() -> None:
    env = TorchRLEnvironment(Counters(()))
    env.reset()
    with pytest.raises(ValueError, match=r"'move'\): expected int64\[2\], found int64\[3\]"):
        env.step({("agent", "move"): torch.zeros(3, dtype=torch.int64)})


@needs_torchrl
@pytest.mark.parametrize("count", [None, 2])
def test_transitions_are_those_of_a_rollout(count: int | None) -> None:
    from torchrl.envs import GymEnv, SerialEnv, StepCounter, TransformedEnv

    def make() -> Any:
        single = lambda: GymEnv("CartPole-v1", categorical_action_encoding=True)  # noqa: E731
        step = lambda: TransformedEnv(single(), StepCounter(7))  # noqa: E731
        return step() if count is None else SerialEnv(count, step)

    env, reference, seed, steps = as_environment(make()), make(), 3, 40
    reference.set_seed(seed)
    policy = TensorDictModule(push, ["observation"], ["action"])
    rollout = reference.rollout(steps, policy, break_when_any_done=False)
    seen = env.reset(seed)
    assert set(seen) == {"observation", "step_count"}
    for expected in rollout.unbind(-1):
        torch.testing.assert_close(torch.as_tensor(seen["observation"]), expected["observation"])
        result = env.step({"action": push(torch.as_tensor(seen["observation"]))})
        for key in ("observation", "step_count"):
            torch.testing.assert_close(torch.as_tensor(result.next[key]), expected["next", key])
        for key in ("reward", "terminated", "truncated"):
            found = np.asarray(getattr(result, key)).tolist()
            assert found == expected["next", key].squeeze(-1).tolist(), key
        seen = result.observation
    assert rollout["next", "truncated"].any()
    env.close()
    reference.close()


def push(observation: torch.Tensor) -> torch.Tensor:
    """To the side to which the pole leans."""
    return (observation[..., 2] > 0).long()
