"""PPO on the ranks of a job: one serves the policy and learns, the others step environments.

    torchrun --nproc-per-node 4 examples/train_ppo.py [--rnn] [--mask-velocity] [--separate-learner]

An env rank asks the server for each action, and sends whole rollouts to the learner, in which each action has the
version of the weights that chose it. While the learner computes, the env ranks go on.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections import deque
from contextlib import ExitStack
from pathlib import Path

import gymnasium as gym
import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributions import Categorical

import meshinfer

KEYS = {"in_keys": ["observation", "state"], "out_keys": ["action", "log_prob", "state"]}
PATIENCE = 120.0  # seconds that the learner waits for rollouts, the start of all ranks included


class Agent(nn.Module):
    """Actor and critic. With ``rnn`` they see the state of a GRU; without, the observation, and states are empty."""

    def __init__(self, observation_size: int, num_actions: int, rnn: bool, hidden: int = 64):
        super().__init__()
        self.rnn = rnn
        self.state_size = hidden if rnn else 0
        if rnn:
            self.encoder = nn.Sequential(linear(observation_size, hidden, gain=7.0), nn.Tanh())
            self.memory = nn.GRUCell(hidden, hidden)
            for name, weights in self.memory.named_parameters():
                nn.init.orthogonal_(weights) if "weight" in name else nn.init.zeros_(weights)
        features = hidden if rnn else observation_size
        self.actor = mlp(features, hidden, num_actions, gain=0.01)
        self.critic = mlp(features, hidden, 1, gain=1.0)

    def forward(self, observation: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What is served: actions for N observations, their log-probabilities, and the next states."""
        features = self.see(observation, state)
        policy = Categorical(logits=self.actor(features), validate_args=False)
        action = policy.sample()
        return action, policy.log_prob(action), features if self.rnn else state

    def see(self, observation: Tensor, state: Tensor) -> Tensor:
        """What actor and critic see: the observation, or the state that follows from it."""
        return self.memory(self.encoder(observation), state) if self.rnn else observation

    def unroll(self, observation: Tensor, state: Tensor, done: Tensor) -> Tensor:
        """The same for N x T steps, from the N states before the first; the end of an episode clears its state."""
        if not self.rnn:
            return observation
        states, encoded = [], self.encoder(observation)
        for t in range(observation.shape[1]):
            states.append(self.memory(encoded[:, t], state))
            state = states[-1] * ~done[:, t, None]
        return torch.stack(states, 1)


def linear(inputs: int, outputs: int, gain: float = 2**0.5) -> nn.Linear:
    layer = nn.Linear(inputs, outputs)
    nn.init.orthogonal_(layer.weight, gain)
    nn.init.zeros_(layer.bias)
    return layer


def mlp(inputs: int, hidden: int, outputs: int, gain: float) -> nn.Sequential:
    first, second = linear(inputs, hidden), linear(hidden, hidden)
    return nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), linear(hidden, outputs, gain))


def gae(
    steps: TensorDict, value: Tensor, next_value: Tensor, gamma: float, lambda_: float
) -> Tensor:
    """Advantages of N x T ``steps``. ``next_value`` is of the observation that each step led to, also where an episode
    ended: one that was truncated is worth what would have followed, one that terminated is not."""
    delta = steps["reward"] + gamma * next_value * ~steps["terminated"] - value
    advantage, following = torch.empty_like(delta), torch.zeros_like(delta[:, 0])
    for t in reversed(range(delta.shape[1])):
        following = delta[:, t] + gamma * lambda_ * following * ~steps["done"][:, t]
        advantage[:, t] = following
    return advantage


def update(agent: Agent, optimizer: torch.optim.Optimizer, rollout: TensorDict, args) -> dict:
    """Learn from T steps in each of N environments: whole sequences, each from the state in which it began."""
    with torch.no_grad():
        features = agent.unroll(rollout["observation"], rollout["state"], rollout["done"])
        value = agent.critic(features).squeeze(-1)
        after = agent.see(rollout["next_observation"].flatten(0, 1), features.flatten(0, 1))
        next_value = agent.critic(after).reshape(value.shape)
        advantage = gae(rollout, value, next_value, args.gamma, args.gae_lambda)
    for _ in range(args.epochs):
        for chosen in torch.randperm(len(rollout)).chunk(args.minibatches):
            part, gain = rollout[chosen], advantage[chosen]
            features = agent.unroll(part["observation"], part["state"], part["done"])
            policy = Categorical(logits=agent.actor(features), validate_args=False)
            ratio = (policy.log_prob(part["action"]) - part["log_prob"]).exp()
            target = gain + value[chosen]
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
            clipped = ratio.clamp(1 - args.clip, 1 + args.clip)
            policy_loss = -torch.min(ratio * gain, clipped * gain).mean()
            value_loss = (agent.critic(features).squeeze(-1) - target).square().mean()
            entropy = policy.entropy().mean()
            optimizer.zero_grad()
            (policy_loss + 0.5 * value_loss - args.entropy * entropy).backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
    losses = {"policy_loss": policy_loss, "value_loss": value_loss, "entropy": entropy}
    return {name: loss.item() for name, loss in losses.items()}  # of the last minibatch


def learn(args, ranks: tuple[int, ...], agent: Agent, experience, publisher) -> None:
    """Take a rollout of each env rank, learn from them, publish the weights; again until the return is reached."""
    optimizer = torch.optim.Adam(agent.parameters(), lr=args.lr, eps=1e-5)
    scores: deque[float] = deque(maxlen=20)
    total, solved, stop = 0, False, False
    with Curves(args.output) as curves:
        while not stop:
            rollouts, callers = gather(experience, ranks, joined=total > 0)
            rollout = torch.cat(rollouts)
            lag = (publisher.version - rollout["policy_version"]).float()
            scalars = update(agent, optimizer, rollout, args)
            publisher.publish()
            total += rollout["reward"].numel()
            scores.extend(rollout["score"][rollout["done"]].tolist())
            scalars["return"] = sum(scores) / max(len(scores), 1)
            solved = len(scores) == scores.maxlen and scalars["return"] >= args.target
            stop = solved or total >= args.total_steps
            verdict = TensorDict({"stop": torch.full([args.envs], stop)}, [args.envs])
            for caller in callers:
                experience.resolve(caller, verdict)
            scalars |= {"lag_mean": lag.mean().item(), "lag_max": lag.max().item()}
            curves.add(total, scalars, rollout["latency"], last=stop)
        result = "solved" if solved else "not solved"
        print(f"{result} after {total} steps and {publisher.version} updates")


def gather(experience, ranks: tuple[int, ...], joined: bool) -> tuple[list[TensorDict], list]:
    """A rollout of each of ``ranks``, and whom to answer once it has been learnt from."""
    rollouts: list[TensorDict] = []
    callers: list = []
    deadline = time.monotonic() + PATIENCE
    while len(rollouts) < len(ranks):
        lost = joined and experience.num_clients < len(ranks)
        experience.wait_for_work(timeout=1.0)
        arrived, waiting = experience.drain(len(ranks))
        rollouts, callers = rollouts + arrived, callers + waiting
        if not arrived and (lost or time.monotonic() > deadline):
            missing = sorted(set(ranks) - {int(rollout["rank"][0]) for rollout in rollouts})
            why = "one has died or left" if lost else f"nothing came for {PATIENCE:.0f} s"
            raise meshinfer.PeerLostError(f"no rollout of the env ranks {missing}: {why}")
    return rollouts, callers


def act(args, rank: int, agent: Agent, policy, experience) -> None:
    """Step environments as the policy says, and send what happened, until the learner says stop."""
    mode = gym.vector.AutoresetMode.DISABLED  # so that the last observation of an episode is seen
    envs = gym.vector.SyncVectorEnv([lambda: make_env(args)] * args.envs, autoreset_mode=mode)
    observation = tensor(envs.reset(seed=args.seed + 1000 * rank)[0])
    state, score = torch.zeros(args.envs, agent.state_size), torch.zeros(args.envs)
    pending = None
    while True:
        steps, first = [], state
        for _ in range(args.steps):
            began = time.perf_counter()
            reply = policy(TensorDict({"observation": observation, "state": state}, [args.envs]))
            latency = torch.full([args.envs], time.perf_counter() - began)
            after, reward, terminated, truncated, _ = envs.step(reply["action"].numpy())
            done, score = torch.from_numpy(terminated | truncated), score + tensor(reward)
            step = {"observation": observation, "next_observation": tensor(after), "done": done}
            step |= {"reward": tensor(reward), "terminated": torch.from_numpy(terminated)}
            step |= {"score": score, "latency": latency}
            steps.append(reply.exclude("state").update(step))
            if done.any():
                after, _ = envs.reset(options={"reset_mask": done.numpy()})
            observation, state = tensor(after), reply["state"] * ~done[:, None]
            score = score * ~done
        rollout = torch.stack(steps, 1)
        rollout.batch_size = [args.envs]
        rollout.update({"state": first, "rank": torch.full([args.envs], rank)})
        if pending is not None and pending.result()["stop"].any():
            return envs.close()
        pending = experience.submit(rollout)


def make_env(args) -> gym.Env:
    env = gym.make(args.env)
    if args.mask_velocity:  # CartPole's observation: position, velocity, angle, angular velocity
        shown = gym.spaces.Box(env.observation_space.low[::2], env.observation_space.high[::2])
        env = gym.wrappers.TransformObservation(env, lambda seen: seen[::2], shown)
    return env


def tensor(array) -> Tensor:
    return torch.as_tensor(array, dtype=torch.float32)


def specs(args, agent: Agent, observation_size: int) -> list[TensorDict]:
    """Examples of what travels: a request and its reply, a rollout and its reply."""

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.zeros(args.envs, *shape, dtype=dtype)

    state = {"state": zeros(agent.state_size)}
    request = {"observation": zeros(observation_size)}
    reply = {"action": zeros(dtype=torch.int64), "log_prob": zeros()}
    steps = {key: zeros(args.steps) for key in ("log_prob", "reward", "score", "latency")}
    for key in ("observation", "next_observation"):
        steps[key] = zeros(args.steps, observation_size)
    for key in ("action", "policy_version"):
        steps[key] = zeros(args.steps, dtype=torch.int64)
    for key in ("terminated", "done"):
        steps[key] = zeros(args.steps, dtype=torch.bool)
    steps["rank"] = zeros(dtype=torch.int64)
    travels = request | state, reply | state, steps | state, {"stop": zeros(dtype=torch.bool)}
    return [TensorDict(each, [args.envs]) for each in travels]


class Curves:
    """What is shown: a line now and then, TensorBoard's curves, and two pictures at the end."""

    def __init__(self, folder: Path):
        self.folder, self.began, self.printed = folder, time.monotonic(), 0.0
        self.history: list[tuple[int, float]] = []
        self.latency: list[Tensor] = []
        try:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(folder)
        except ImportError:
            print("no TensorBoard curves: pip install tensorboard")
            self.writer = None

    def __enter__(self) -> Curves:
        return self

    def add(self, total: int, scalars: dict[str, float], latency: Tensor, last: bool) -> None:
        seconds = time.monotonic() - self.began
        rate = total / seconds
        self.history.append((total, scalars["return"]))
        self.latency.append(1000 * latency.flatten())
        for name, value in (scalars | {"steps_per_s": rate}).items() if self.writer else ():
            self.writer.add_scalar(name, value, total)
        if last or seconds >= self.printed + 2:
            self.printed = seconds
            lag = f"lag {scalars['lag_mean']:.2f} (at most {scalars['lag_max']:.0f})"
            print(
                f"{total} steps, return {scalars['return']:.1f}, {lag}, {rate:.0f} steps/s",
                flush=True,
            )

    def __exit__(self, *_: object) -> None:
        latency = torch.cat(self.latency) if self.latency else torch.ones(1)
        if self.writer:
            self.writer.add_histogram("latency_ms", latency)
            self.writer.close()
        try:
            from matplotlib.figure import Figure
        except ImportError:
            return print("no pictures: pip install matplotlib")
        figure = Figure(figsize=(10, 4), layout="constrained")
        left, right = figure.subplots(1, 2)
        left.plot([total for total, _ in self.history], [score for _, score in self.history])
        left.set(xlabel="environment steps", ylabel="mean return of 20 episodes")
        right.hist(latency.numpy(), bins=torch.logspace(*latency.log10().aminmax(), 60).tolist())
        right.set(xscale="log", xlabel="ms from request to action", ylabel="actions")
        self.folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(self.folder / "training.png")
        print(f"curves and pictures: {self.folder}")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    option = parser.add_argument
    option("--env", default="CartPole-v1", help="observations are vectors, actions are discrete")
    option("--rnn", action="store_true", help="put a GRU before actor and critic")
    option("--mask-velocity", action="store_true", help="hide CartPole's velocities")
    option("--separate-learner", action="store_true", help="learn in a rank of its own")
    option("--output", type=Path, default=Path("runs/ppo"), help="folder for curves and pictures")
    option("--target", type=float, default=475.0, help="mean return of 20 episodes to stop at")
    option("--total-steps", type=int, default=1_000_000, help="stop after so many at the latest")
    option("--seed", type=int, default=1)
    option("--envs", type=int, default=16, help="environments in each env rank")
    option("--steps", type=int, default=32, help="of each environment in a rollout")
    option("--lr", type=float, default=1e-3)
    option("--gamma", type=float, default=0.99)
    option("--gae-lambda", type=float, default=0.95)
    option("--clip", type=float, default=0.2)
    option("--entropy", type=float, default=0.01)
    option("--epochs", type=int, default=4, help="passes over each set of rollouts")
    option("--minibatches", type=int, default=4, help="in each pass, of whole sequences")
    return parser.parse_args(arguments)


def run(args: argparse.Namespace) -> None:
    learner = "learner" if args.separate_learner else "server"
    mesh = meshinfer.init_mesh(dict.fromkeys(["server", learner], 1) | {"env": ...})
    env = make_env(args)
    size = env.observation_space.shape[0]
    agent = Agent(size, int(env.action_space.n), args.rnn)  # the same weights on every rank
    request, reply, rollout, verdict = specs(args, agent, size)
    to_learner = {"name": "experience", "servers": learner}
    if mesh.role == "env":
        with (
            mesh.transport(request, reply).client() as policy,
            mesh.transport(rollout, verdict, **to_learner).client() as experience,
        ):
            return act(args, mesh.rank, agent, policy, experience)
    with ExitStack() as stack:
        weights = stack.enter_context(mesh.weight_transport(agent, publishers=learner))
        if mesh.role == "server":
            transport = mesh.transport(request, reply)
            server = meshinfer.InferenceServer(agent, transport, weight_transport=weights, **KEYS)
            stack.enter_context(server)
        if mesh.role == learner:
            publisher = stack.enter_context(weights.publisher(agent))
            experience = stack.enter_context(mesh.transport(rollout, verdict, **to_learner))
            learn(args, mesh.group("env").ranks, agent, experience, publisher)
        if mesh.role == "server":
            server.serve()  # until every env rank has left


def main() -> None:
    args = parse()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as launchers interrupt
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    try:
        run(args)
    except KeyboardInterrupt:
        sys.exit(130)
    except meshinfer.ServerClosedError as error:  # who closed it says why
        print(f"an env rank ends: {error}")


if __name__ == "__main__":
    main()
