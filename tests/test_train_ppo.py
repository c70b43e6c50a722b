"""The example that trains: what it computes, and the whole job as a user runs it."""

from __future__ import annotations

import importlib.util
import re
import signal
import sys
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from mesh_jobs import ROOT, Job, run, running, torchrun
from support import unused_port, wait_until
from tensordict import TensorDict

import meshinfer

pytest.importorskip("gymnasium")

EXAMPLE = ROOT / "examples" / "train_ppo.py"
PROGRESS = re.compile(
    r"^(\d+) steps, return (\S+), lag (\d+\.\d\d) \(at most (\d+)\), \d+ steps/s$", re.MULTILINE
)
SECONDS = 60.0
SMALL = ("--envs=4", "--steps=16")


@pytest.fixture(scope="module")
def ppo() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_ppo", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# --- What it computes -----------------------------------------------------------------------------


def test_advantages_are_those_of_the_lambda_returns(ppo: ModuleType) -> None:
    """Computed here step by step from their definition, episode by episode."""
    generator = torch.Generator().manual_seed(0)
    size, gamma, lambda_ = (5, 40), 0.9, 0.8
    reward, value, after = (torch.rand(size, generator=generator) for _ in range(3))
    done = torch.rand(size, generator=generator) < 0.2
    terminated = done & (torch.rand(size, generator=generator) < 0.5)
    assert (done & ~terminated).any()
    assert terminated.any()
    after[:, :-1] = torch.where(done[:, :-1], after[:, :-1], value[:, 1:])

    def lambda_return(n: int, t: int) -> float:
        ahead = 0.0 if terminated[n, t] else float(after[n, t])
        if not done[n, t] and t + 1 < size[1]:
            ahead = (1 - lambda_) * ahead + lambda_ * lambda_return(n, t + 1)
        return float(reward[n, t]) + gamma * ahead

    expected = [[lambda_return(n, t) for t in range(size[1])] for n in range(size[0])]
    steps = TensorDict({"reward": reward, "terminated": terminated, "done": done}, [])
    found = ppo.gae(steps, value, after, gamma, lambda_)
    torch.testing.assert_close(found, torch.tensor(expected) - value)


class Recorder:
    """In the learner's place: keeps so many rollouts, then says stop."""

    def __init__(self, rollouts: int) -> None:
        self.rollouts: list[TensorDict] = []
        self._wanted = rollouts

    def submit(self, rollout: TensorDict) -> Recorder:
        self.rollouts.append(rollout.clone())
        return self

    def result(self) -> dict[str, torch.Tensor]:
        return {"stop": torch.tensor(len(self.rollouts) >= self._wanted)}


def collected(ppo: ModuleType, args: Any, rollouts: int) -> tuple[Any, list[TensorDict]]:
    """An agent, and what an env rank sends while that is served."""
    torch.manual_seed(3)
    agent = ppo.Agent(2 if args.mask_velocity else 4, 2, args.rnn)
    request, reply, *_ = ppo.specs(args, agent, 2 if args.mask_velocity else 4)
    transport = meshinfer.DistributedTransport(request, reply)
    recorder = Recorder(rollouts)
    with meshinfer.InferenceServer(agent, transport, **ppo.KEYS), transport.client() as client:
        ppo.act(args, 1, agent, client, recorder)
    return agent, recorder.rollouts


@pytest.mark.parametrize("mask", [False, True])
def test_served_states_equal_those_of_a_replay_of_each_episode(ppo: ModuleType, mask: bool) -> None:
    options = ["--rnn", "--steps=1", "--envs=3", *(["--mask-velocity"] if mask else [])]
    agent, rollouts = collected(ppo, ppo.parse(options), 60)
    ended = 0
    for env in range(3):
        state = torch.zeros(64)
        for number, rollout in enumerate(rollouts):
            torch.testing.assert_close(rollout["state"][env], state)
            assert number == 0 or state.abs().sum() > 0 or rollouts[number - 1]["done"][env, 0]
            with torch.no_grad():
                state = agent.memory(agent.encoder(rollout["observation"][env]), state[None])[0]
            if rollout["done"][env, 0]:
                ended, state = ended + 1, torch.zeros(64)
    assert ended >= 3, "no episode ended, so nothing was reset"


@pytest.mark.parametrize("option", ["--rnn", "--seed=1"])
def test_the_learner_computes_what_the_server_did(ppo: ModuleType, option: str) -> None:
    """Over whole sequences, in the middle of which episodes end: else the first ratio of PPO is not 1."""
    agent, rollouts = collected(ppo, ppo.parse([option, "--steps=40", "--envs=3"]), 2)
    for rollout in rollouts:
        assert rollout["done"][:, :-1].any()
        seen = agent.unroll(rollout["observation"], rollout["state"], rollout["done"])
        log_prob = agent.actor(seen).log_softmax(-1).gather(-1, rollout["action"][..., None])
        torch.testing.assert_close(log_prob.squeeze(-1), rollout["log_prob"])
        assert (rollout["policy_version"] == 0).all()


def test_the_last_observation_of_an_episode_is_the_real_one(ppo: ModuleType) -> None:
    _, (rollout,) = collected(ppo, ppo.parse(["--steps=60", "--envs=3"]), 1)
    before, after = rollout["observation"][:, 1:], rollout["next_observation"][:, :-1]
    done = rollout["done"][:, :-1]
    assert done.any()
    assert torch.equal(before[~done], after[~done])
    assert (before[done].abs() <= 0.05).all(), "an episode does not begin as CartPole's do"
    fallen = (after[..., 2].abs() > 0.2095) | (after[..., 0].abs() > 2.4)
    assert torch.equal(fallen, rollout["terminated"][:, :-1])
    assert (rollout["score"][rollout["done"]] > 1).all()


def test_an_update_learns(ppo: ModuleType) -> None:
    """Actions that were rewarded become likelier, others less likely."""
    args = ppo.parse(["--rnn", "--steps=8", "--envs=16", "--lr=0.01", "--gamma=0"])
    torch.manual_seed(1)
    agent = ppo.Agent(4, 2, rnn=True)
    *_, rollout, _ = ppo.specs(args, agent, 4)
    rollout = rollout.clone()
    rollout["observation"].normal_()
    rollout["action"].random_(2)
    rollout["reward"] = rollout["action"].float()
    rollout["log_prob"].fill_(0.5).log_()
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.lr)
    scalars = ppo.update(agent, optimizer, rollout, args)
    assert 0 < scalars["entropy"] < 0.6931
    seen = agent.unroll(rollout["observation"], rollout["state"], rollout["done"])
    assert agent.actor(seen).softmax(-1)[..., 1].mean() > 0.6


def test_without_the_packages_for_pictures(
    ppo: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for missing in ("torch.utils.tensorboard", "matplotlib", "matplotlib.figure"):
        monkeypatch.setitem(sys.modules, missing, None)
    scalars = {"return": 10.0, "lag_mean": 0.5, "lag_max": 2.0}
    with ppo.Curves(tmp_path) as curves:
        curves.add(100, scalars, torch.ones(3), last=True)
    said = capsys.readouterr().out
    assert "pip install tensorboard" in said
    assert "pip install matplotlib" in said
    assert PROGRESS.search(said), said


# --- The job --------------------------------------------------------------------------------------


def assert_shown(folder: Path) -> None:
    assert (folder / "training.png").read_bytes().startswith(b"\x89PNG")
    (events,) = folder.glob("events.out.tfevents*")
    for name in (b"return", b"lag_mean", b"lag_max", b"policy_loss", b"latency_ms"):
        assert name in events.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "options", "result"),
    [
        (3, ["--total-steps=1280"], "not solved after 1280 steps and 10 updates"),
        (4, ["--rnn", "--mask-velocity", "--separate-learner", "--target=5"], "solved after "),
    ],
    ids=["serves and learns", "recurrent, with a learner"],
)
def test_a_short_run(tmp_path: Path, ranks: int, options: list[str], result: str) -> None:
    command = torchrun(ranks, str(EXAMPLE), *SMALL, *options, f"--output={tmp_path / 'runs'}")
    ended = run(tmp_path / "job", command)
    assert ended.code == 0, str(ended)
    assert "Traceback" not in ended.stderr, str(ended)
    assert f"\n{result}" in ended.stdout, str(ended)
    *_, last = PROGRESS.finditer(ended.stdout)
    updates, rest = divmod(int(last[1]), 128)
    assert rest == 0, str(ended)
    # Weights travel by themselves: how old those of an action are is chance, but in many updates some arrive.
    assert 0 <= float(last[3]) <= int(last[4]) < updates, str(ended)
    assert updates < 10 or float(last[3]) < updates - 1, str(ended)
    assert_shown(tmp_path / "runs")


@pytest.mark.slow
def test_ctrl_c_ends_every_rank_and_leaves_the_pictures(tmp_path: Path) -> None:
    command = torchrun(3, str(EXAMPLE), *SMALL, f"--output={tmp_path / 'runs'}")
    with running(tmp_path / "job", command) as (job,):
        assert wait_until(lambda: trains(job), SECONDS), str(job.end(0.1))
        job.process.send_signal(signal.SIGINT)
        ended = job.end()
    assert ended.code != 0
    assert "train_ppo.py" not in ended.stderr, f"a rank shows a traceback: {ended}"
    assert_shown(tmp_path / "runs")


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 2], ids=["the learner", "an env rank"])
def test_a_rank_dies_and_no_launcher_ends_the_others(tmp_path: Path, victim: int) -> None:
    command = [sys.executable, str(EXAMPLE), *SMALL, f"--output={tmp_path / 'runs'}"]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(unused_port()), "WORLD_SIZE": "3"}
    with ExitStack() as stack:
        jobs = []
        for rank in range(3):
            jobs.append(Job(command, tmp_path / str(rank), {**place, "RANK": str(rank)}, False))
            stack.callback(jobs[-1].kill)
        assert wait_until(lambda: trains(jobs[0]), SECONDS), str(jobs[0].end(0.1))
        jobs[victim].process.send_signal(signal.SIGKILL)
        learner, first, second = (job.end() for job in jobs)
    if victim == 0:
        for env in (first, second):
            assert env.code == 1, str(env)
            assert "PeerLostError" in env.stderr, str(env)
    else:
        assert learner.code == 1, str(learner)
        assert "no rollout of the env ranks [2]: one has died or left" in learner.stderr
        assert first.code == 0, str(first)
        assert "an env rank ends: the server has shut down" in first.stdout
        assert_shown(tmp_path / "runs")


def trains(job: Job) -> bool:
    return PROGRESS.search((job.folder / "stdout").read_text()) is not None


def test_it_is_short_enough_to_copy() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 350
