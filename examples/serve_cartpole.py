"""One rank serves a policy, the others step CartPole:
torchrun --nproc-per-node 4 examples/serve_cartpole.py"""

import argparse
import time

import gymnasium as gym
import torch
from tensordict import TensorDict

import meshinfer


class Policy(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        return super().forward(observation).argmax(-1)


def step(policy: meshinfer.InferenceClient, num_envs: int, steps: int, seed: int) -> str:
    envs = gym.make_vec("CartPole-v1", num_envs=num_envs)
    observation, _ = envs.reset(seed=seed)
    began, episodes = time.perf_counter(), 0
    for _ in range(steps):
        request = TensorDict({"observation": torch.from_numpy(observation)}, [num_envs])
        reply = policy(request)
        observation, _, terminated, truncated, _ = envs.step(reply["action"].numpy())
        episodes += int((terminated | truncated).sum())
    envs.close()
    total, version = steps * num_envs, int(reply["policy_version"][0])
    rate = total / (time.perf_counter() - began)
    return f"{total} steps, {episodes} episodes, {rate:.0f} steps/s, policy version {version}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--envs", type=int, default=8, help="environments in each env rank")
    parser.add_argument("--steps", type=int, default=1000, help="steps of each environment")
    args = parser.parse_args()

    mesh = meshinfer.init_mesh()  # rank 0 is the group "server", all other ranks are "env"
    request = TensorDict({"observation": torch.zeros(args.envs, 4)}, [args.envs])
    response = TensorDict({"action": torch.zeros(args.envs, dtype=torch.int64)}, [args.envs])
    transport = mesh.transport(request, response)
    if mesh.role == "server":
        keys = {"in_keys": ["observation"], "out_keys": ["action"]}
        with meshinfer.InferenceServer(Policy(), transport, **keys) as server:
            server.serve()  # until every env rank has come and left
            stats = server.stats()
        print(f"rank 0 served {stats.requests} requests in batches of {stats.batch_sizes}")
    else:
        with transport.client() as policy:
            print(f"rank {mesh.rank}: {step(policy, args.envs, args.steps, seed=mesh.rank)}")


if __name__ == "__main__":
    main()
