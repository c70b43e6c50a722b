"""Environment adapters: which transitions they give, whatever resets the rows, and what reaches the environment."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from environment_zoo import Batched, Clock, Fixed, OneArray, make_clock
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv
from tensordict import TensorDict

from meshinfer.collect import Environment, StepResult, as_environment
from meshinfer.collect.envs import ObservationRows

STEPS, SEED = 40, 7
CLOCK_KEYS = {
    "state": torch.float64,
    "pixels": torch.uint8,
    ("nested", "phase"): torch.int64,
    ("nested", "pair", "0"): torch.int8,
    ("nested", "pair", "1"): torch.float32,
}


def action_at(episode: float, step: float) -> int:
    return int(3 * episode + step) % 5


def copied(observation: Any) -> dict[Any, Any]:
    return {key: np.array(observation[key]) for key in CLOCK_KEYS}


def actions_on(state: np.ndarray) -> TensorDict:
    """The action on ``state``, ``[3]`` or ``[B, 3]``, with a key that the environment does not know."""
    picked = np.apply_along_axis(lambda row: action_at(*row[1:]), -1, state)
    return TensorDict({"action": torch.as_tensor(picked), "value": torch.zeros(())}, [])


def transitions_of(env: Environment, steps: int) -> list[list[Any]]:
    """What each row did: (observation, reward, terminated, truncated, next observation)."""
    rows: list[list[Any]] = [[] for _ in range(env.num_envs)]
    before = copied(env.reset(SEED))
    for _ in range(steps):
        result = env.step(actions_on(before["state"]))
        after, outcome = copied(result.next), result[1:4]
        stepped = np.ones(env.num_envs, bool) if result.stepped is None else result.stepped
        for row in np.flatnonzero(stepped):
            pick = (lambda x, row=row: x[row]) if env.is_batched else (lambda x: x)
            seen = [{key: pick(leaf) for key, leaf in where.items()} for where in (before, after)]
            rows[row].append((seen[0], *map(pick, outcome), seen[1]))
        before = copied(result.observation)
    env.close()
    return rows


def expected_transitions(seed: int, steps: int) -> list[Any]:
    """The same from the bare environment."""
    env, made = make_clock(), []
    observation, _ = env.reset(seed=seed)
    for _ in range(steps):
        action = 10 + action_at(*observation["state"][1:])
        after, reward, terminated, truncated, _ = env.step(action)
        made.append((flat(observation), reward, terminated, truncated, flat(after)))
        observation = env.reset()[0] if terminated or truncated else after
    return made


def flat(observation: Any) -> dict[Any, Any]:
    nested = observation["nested"]
    leaves = observation["state"], observation["pixels"], nested["phase"], *nested["pair"]
    return dict(zip(CLOCK_KEYS, leaves, strict=True))


def assert_same(found: list[Any], expected: list[Any]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        for leaf, other in zip(mine[0:5:4], theirs[0:5:4], strict=True):
            for key in CLOCK_KEYS:
                np.testing.assert_array_equal(leaf[key], other[key], err_msg=str(key))
        assert mine[1:4] == theirs[1:4]


def test_a_single_environment() -> None:
    env = as_environment(make_clock())
    assert (env.num_envs, env.is_batched) == (1, False)
    assert {k: v.dtype for k, v in env.observation_spec.items(True, True)} == CLOCK_KEYS
    assert env.observation_spec["state"].shape == (3,)
    (found,) = transitions_of(env, STEPS)
    ends = [
        (terminated, truncated)
        for _, _, terminated, truncated, _ in found
        if terminated or truncated
    ]
    assert ends[:2] == [(True, False), (False, True)]
    assert_same(found, expected_transitions(SEED, STEPS))


@pytest.mark.parametrize("disabled", [False, True])
def test_an_environment_that_gives_the_same_array_again_and_again(disabled: bool) -> None:
    bare: Any = OneArray()
    if disabled:
        bare = SyncVectorEnv([OneArray], copy=False, autoreset_mode=AutoresetMode.DISABLED)
    env, seen = as_environment(bare), []
    action = {"action": np.zeros(env.action_spec["action"].shape, np.int64)}
    env.reset()
    for _ in range(4):
        result = env.step(action)
        pair = result.next["observation"], result.observation["observation"]
        seen.append(tuple(float(array.item()) for array in pair))
    assert seen == [(1, 1), (2, 2), (3, 0), (1, 1)]


def test_a_reward_that_is_no_number() -> None:
    with pytest.raises(TypeError, match="reward: expected a number, found None"):
        as_environment(OneArray(None)).step({"action": np.array(0)})


@pytest.mark.parametrize("mode", AutoresetMode)
@pytest.mark.parametrize("copy", [True, False])
def test_every_autoreset_mode_gives_each_row_its_own_transitions(mode: Any, copy: bool) -> None:
    check_vector(SyncVectorEnv([make_clock] * 3, copy=copy, autoreset_mode=mode), mode)


@pytest.mark.parametrize("mode", AutoresetMode)
def test_vector_environments_in_processes(mode: Any) -> None:
    check_vector(AsyncVectorEnv([make_clock] * 2, autoreset_mode=mode), mode)


def check_vector(vector: Any, mode: Any) -> None:
    env = as_environment(vector)
    assert (env.num_envs, env.is_batched) == (vector.num_envs, True)
    assert env.observation_spec.batch_size == env.action_spec.batch_size == (env.num_envs,)
    rows = transitions_of(env, STEPS)
    for row, found in enumerate(rows):
        # An episode's end costs one step where the next one resets.
        assert len(found) == STEPS - (STEPS // 10 * 2 if mode is AutoresetMode.NEXT_STEP else 0)
        assert_same(found, expected_transitions(SEED + row, len(found)))


def test_a_new_reset_forgets_the_rows_that_were_to_be_reset() -> None:
    env = as_environment(SyncVectorEnv([make_clock] * 2))
    transitions_of(env, 3)
    assert env.step(actions_on(copied(env.reset())["state"])).stepped is None


@pytest.mark.parametrize("key", ["final_obs", "final_observation"])
def test_a_batch_of_last_observations(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
    if key == "final_observation":
        monkeypatch.setattr(gym, "__version__", "0.29.1")
        metadata = {}
    env = as_environment(Batched(key, **metadata))
    env.reset(0)
    results = [env.step({"action": torch.zeros(2, dtype=torch.int64)}) for _ in range(3)]
    assert [r.next["observation"].ravel().tolist() for r in results] == [[1, 1], [2, 2], [1, 3]]
    after = [r.observation["observation"].ravel().tolist() for r in results]
    assert after == [[1, 1], [0, 2], [1, 0]]
    assert [r.observation is r.next for r in results] == [True, False, False]


def test_a_vector_environment_that_hides_how_it_resets() -> None:
    with pytest.raises(
        ValueError, match=r"autoreset_mode.*expected one of NextStep.*found None; set it"
    ):
        as_environment(Batched())
    env = as_environment(Batched(None, autoreset_mode=AutoresetMode.SAME_STEP))
    env.reset(0)
    env.step({"action": np.zeros(2, np.int64)})
    with pytest.raises(
        ValueError, match=r"row 0 ended its episode.*no last observation.*'final_obs'"
    ):
        env.step({"action": np.zeros(2, np.int64)})


def test_only_the_first_reset_is_seeded() -> None:
    env = as_environment(gym.make("CartPole-v1"))
    first = env.reset(3)["observation"].copy()
    second = env.reset()["observation"].copy()
    assert not np.array_equal(first, second)
    assert np.array_equal(first, env.reset(3)["observation"])
    assert np.array_equal(second, env.reset()["observation"])
    rows = as_environment(SyncVectorEnv([partial(gym.make, "CartPole-v1")] * 2)).reset(3)[
        "observation"
    ]
    assert np.array_equal(rows[0], first)
    assert not np.array_equal(rows[1], first)


NESTED = spaces.Dict(
    {
        "move": spaces.Tuple((spaces.Discrete(3, start=-1), spaces.Box(-1, 1, (2,), np.float32))),
        "press": spaces.MultiBinary(3),
    }
)
ACTIONS = {
    "discrete": (spaces.Discrete(4), {(): torch.tensor(3)}, 3),
    "start": (spaces.Discrete(4, start=-2), {(): torch.tensor(3, dtype=torch.int32)}, 1),
    "box": (spaces.Box(-1, 1, (2,), np.float32), {(): torch.tensor([0.5, -1])}, [0.5, -1]),
    "float64": (spaces.Box(-1, 1, (1,), np.float64), {(): torch.tensor([0.5])}, [0.5]),
    "scalar": (spaces.Box(-1, 1, (), np.float32), {(): torch.tensor(0.5, requires_grad=True)}, 0.5),
    "bytes": (spaces.Box(0, 255, (2,), np.uint8), {(): torch.tensor([255, 0])}, [255, 0]),
    "multi": (spaces.MultiDiscrete([2, 3], start=[5, 0]), {(): torch.tensor([1, 2])}, [6, 2]),
    "grid": (spaces.MultiDiscrete([[2], [3]]), {(): torch.tensor([[1], [2]])}, [[1], [2]]),
    "binary": (spaces.MultiBinary(2), {(): torch.tensor([True, False])}, [1, 0]),
    "nested": (
        NESTED,
        {
            ("move", "0"): torch.tensor(0),
            ("move", "1"): torch.tensor([0.5, 1]),
            ("press",): torch.tensor([1, 0, 1]),
        },
        {"move": (-1, [0.5, 1]), "press": [1, 0, 1]},
    ),
}


def reply_of(leaves: dict[Any, torch.Tensor], batch: tuple[int, ...] = ()) -> TensorDict:
    reply = TensorDict({}, batch)
    for key, leaf in leaves.items():
        reply[("action", *key)] = leaf.expand(batch + leaf.shape)
    return reply


def plain(action: Any) -> Any:
    if isinstance(action, dict):
        return {key: plain(value) for key, value in action.items()}
    return tuple(map(plain, action)) if isinstance(action, tuple) else np.asarray(action).tolist()


# A vector environment of Gymnasium itself gives its rows NumPy's scalars.
@pytest.mark.filterwarnings("ignore:.*Casting input x to numpy array:UserWarning")
@pytest.mark.parametrize("name", ACTIONS)
def test_actions_are_what_the_space_contains(name: str) -> None:
    space, leaves, expected = ACTIONS[name]
    bare = Fixed(action_space=space)
    env = as_environment(bare)
    reply = reply_of(leaves)
    env.step(reply)
    assert plain(bare.action) == expected
    arrays = {key: leaf.detach().numpy() for key, leaf in reply.items(True, True)}
    env.step(arrays)
    assert plain(bare.action) == expected
    assert {k: (v.shape, v.dtype) for k, v in env.action_spec.items(True, True)} == {
        k: (v.shape, env.action_spec[k].dtype) for k, v in reply.items(True, True)
    }
    vector = SyncVectorEnv([partial(Fixed, action_space=space)] * 3)
    as_environment(vector).step(reply_of(leaves, (3,)))
    assert [plain(row.action) for row in vector.envs] == [expected] * 3


def test_the_environment_may_change_its_action() -> None:
    bare = Fixed(action_space=spaces.Box(-1, 1, (2,), np.float32))
    action = torch.tensor([0.5, 0.5])
    as_environment(bare).step({"action": action})
    bare.action *= 2
    assert action.tolist() == [0.5, 0.5]


BAD_ACTIONS = {
    "missing": (
        spaces.Discrete(2),
        {"logits": torch.zeros(2)},
        KeyError,
        "int64.*nothing; present: 'logits'",
    ),
    "one-hot": (
        spaces.Discrete(2),
        {"action": torch.tensor([0, 1])},
        ValueError,
        r"int64\[\], found int64\[2\]",
    ),
    "float": (
        spaces.Discrete(2),
        {"action": torch.tensor(1.0)},
        TypeError,
        r"int64\[\], found float32\[\]",
    ),
    "number": (spaces.Discrete(2), {"action": 1}, TypeError, r"int64\[\], found int"),
    "range": (
        spaces.Discrete(2, start=5),
        {"action": torch.tensor(5)},
        ValueError,
        "below 2 .*start, 5.*found 5",
    ),
    "multi": (
        spaces.MultiDiscrete([2, 2]),
        {"action": torch.tensor([0, 2])},
        ValueError,
        "below .2 2., found",
    ),
    "kind": (
        spaces.Box(-1, 1, (1,)),
        {"action": torch.tensor([1])},
        TypeError,
        r"float32\[1\], found int64\[1\]",
    ),
    "wrap": (
        spaces.Box(0, 255, (1,), np.uint8),
        {"action": torch.tensor([256])},
        ValueError,
        "cannot hold",
    ),
}


@pytest.mark.parametrize("name", BAD_ACTIONS)
def test_actions_that_do_not_fit(name: str) -> None:
    space, reply, error, message = BAD_ACTIONS[name]
    with pytest.raises(error, match=message):
        as_environment(Fixed(action_space=space)).step(reply)


REFUSED = {
    "text": spaces.Text(5),
    "sequence": spaces.Sequence(spaces.Discrete(2)),
    "graph": spaces.Graph(spaces.Box(0, 1, (2,)), None),
}


@pytest.mark.parametrize("name", REFUSED)
def test_spaces_without_a_fixed_shape(name: str) -> None:
    label = f"{type(REFUSED[name]).__qualname__}; give it a fixed shape"
    with pytest.raises(TypeError, match=f"observation space 'x': expected Box, .*found {label}"):
        as_environment(Fixed(space=spaces.Dict({"x": REFUSED[name]})))
    with pytest.raises(TypeError, match=f"action space 'action': expected Box, .*found {label}"):
        as_environment(Fixed(action_space=REFUSED[name]))


def test_spaces_that_clash_with_the_transition() -> None:
    with pytest.raises(
        ValueError, match=r"observation space: \['reward'\] are keys of the transition"
    ):
        as_environment(
            Fixed(space=spaces.Dict({"reward": spaces.Discrete(2), "x": spaces.Discrete(2)}))
        )
    with pytest.raises(TypeError, match="expected keys of str, found 1"):
        as_environment(Fixed(space=spaces.Dict({"a": spaces.Dict({1: spaces.Discrete(2)})})))  # type: ignore[dict-item]


BOX = spaces.Box(0, 1, (2,), np.float32)
OBSERVED = {
    "array": (BOX, np.ones(2, np.float32), [1, 1]),
    "tensor": (BOX, torch.ones(2), [1, 1]),
    "int": (spaces.Discrete(3), 2, 2),
    "numpy int": (spaces.Discrete(3), np.int64(2), 2),
    "float": (spaces.Box(0, 1, (), np.float32), 0.5, 0.5),
    "strided": (BOX, np.ones(4, np.float32)[::2], [1, 1]),
}


def rows_for(env: Environment, steps: int = 2) -> tuple[ObservationRows, TensorDict]:
    memory = env.observation_spec.expand(steps, *env.observation_spec.batch_size).clone()
    return ObservationRows(env.observation_spec, memory), memory


@pytest.mark.parametrize("name", OBSERVED)
def test_observations_are_written_as_they_are(name: str) -> None:
    space, observation, expected = OBSERVED[name]
    env = as_environment(Fixed(observation, space))
    rows, memory = rows_for(env)
    rows.write(1, env.reset())
    assert memory["observation"][1].tolist() == expected
    assert memory["observation"][0].count_nonzero() == 0


DRIFTED = {
    "dtype": (
        BOX,
        np.ones(2),
        TypeError,
        r"float32\[2\].*declares, found float64\[2\]; nothing is cast",
    ),
    "shape": (
        BOX,
        np.ones(3, np.float32),
        ValueError,
        r"float32\[2\].*declares, found float32\[3\]",
    ),
    "broadcast": (
        BOX,
        np.ones(1, np.float32),
        ValueError,
        r"float32\[2\].*declares, found float32\[1\]",
    ),
    "list": (BOX, [0.5, 0.5], TypeError, r"found list \[0.5, 0.5\]"),
    "none": (BOX, None, TypeError, "found NoneType None"),
    "fraction": (spaces.Discrete(3), 0.5, TypeError, r"int64\[\].*found float 0.5"),
    "tensor": (BOX, torch.ones(2, dtype=torch.float64), TypeError, r"found float64\[2\]"),
}


@pytest.mark.parametrize("name", DRIFTED)
def test_observations_that_are_not_what_the_space_declares(name: str) -> None:
    space, observation, error, message = DRIFTED[name]
    env = as_environment(Fixed(observation, space))
    rows, _ = rows_for(env)
    with pytest.raises(error, match=f"observation 'observation': expected .*{message}"):
        rows.write(0, env.reset())


def test_a_key_that_the_space_declares_and_nobody_gives() -> None:
    env = as_environment(
        Fixed({"a": 1}, spaces.Dict({"a": spaces.Discrete(2), "b": spaces.Discrete(2)}))
    )
    with pytest.raises(ValueError, match=r"'b': the space declares it, found .*'a'"):
        env.reset()
    rows, _ = rows_for(env)
    with pytest.raises(ValueError, match=r"'b': expected int64\[\].*found nothing; present: .*'a'"):
        rows.write(0, {"a": 1})


def test_rows_of_another_layout() -> None:
    spec = TensorDict({"a": torch.zeros(2)}, [])
    for wrong in ({}, {"a": torch.zeros(5, 3)}, {"a": torch.zeros(5, 2, dtype=torch.float64)}):
        with pytest.raises(ValueError, match=r"rows 'a': expected float32\['T', 2\], found"):
            ObservationRows(spec, wrong)
    arrays = {"a": np.zeros((5, 2), np.float32)}
    ObservationRows(spec, arrays).write(4, {"a": torch.ones(2)})
    assert arrays["a"].sum() == 2


def test_a_last_observation_that_drifted() -> None:
    class Drifting(Clock):
        def _observe(self) -> Any:
            observation = super()._observe()
            if self._step == 3:
                observation["state"] = observation["state"].astype(np.float32)
            return observation

    env = as_environment(SyncVectorEnv([Drifting], autoreset_mode=AutoresetMode.SAME_STEP))
    with pytest.raises(
        TypeError, match=r"last observation.*'state': expected float64\[3\], found float32\[3\]"
    ):
        transitions_of(env, 3)


class Doubling:
    """An environment of the user's own."""

    num_envs, is_batched = 1, False
    observation_spec = TensorDict({"observation": torch.ones(1)}, [])
    action_spec = TensorDict({"action": torch.zeros((), dtype=torch.int64)}, [])

    def reset(self, seed: int | None = None) -> TensorDict:
        return self.observation_spec

    def step(self, action: Any) -> StepResult:
        following = TensorDict({"observation": torch.ones(1) * 2}, [])
        return StepResult(following, 1.0, False, False, following)

    def close(self) -> None:
        pass


def test_an_environment_of_your_own() -> None:
    mine = Doubling()
    assert as_environment(mine) is mine
    rows, memory = rows_for(mine)
    rows.write(1, mine.step({}).next)
    assert memory["observation"].tolist() == [[0 + 1], [2]]


@pytest.mark.parametrize(
    ("thing", "found"),
    [
        (None, "NoneType"),
        (make_clock, "function; call it"),
        (Doubling, "Doubling; call it"),
        (object(), "object"),
    ],
)
def test_what_is_no_environment(thing: Any, found: str) -> None:
    with pytest.raises(TypeError, match=f"expected a gymnasium.Env.*found {found}"):
        as_environment(thing)


def test_the_environment_of_the_documentation() -> None:
    page = (Path(__file__).parent.parent / "docs" / "environments.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {}
    exec(code, names)
    env = as_environment(names["Corridor"]())
    rows, memory = rows_for(env)
    rows.write(0, env.reset(0))
    results = [env.step({"action": np.array(1)}) for _ in range(5)]
    assert [r.terminated for r in results] == [False] * 4 + [True]
    rows.write(0, results[-1].next)
    rows.write(1, results[-1].observation)
    assert memory["position"].ravel().tolist() == [5, 0]
    assert [env.step({"action": np.array(0)}).truncated for _ in range(20)] == [False] * 19 + [True]
