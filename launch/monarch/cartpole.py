"""Monarch actors step CartPole against one served policy: what this_host.py, several_hosts.py and slurm.py run."""

import sys
from pathlib import Path

import cloudpickle
import torch
from monarch.actor import Actor, endpoint
from tensordict import TensorDict

from meshinfer.mesh.monarch import MonarchMesh

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
import serve_cartpole

# Monarch's processes look for modules in their working folder and in PYTHONPATH, not beside this file. What they could
# not find there is sent to them.
cloudpickle.register_pickle_by_value(serve_cartpole)
cloudpickle.register_pickle_by_value(sys.modules[__name__])


class Stepper(Actor):
    def __init__(self, server):
        self.policy = server.client()  # this rank's own

    @endpoint
    def step(self, rank, num_envs, steps):
        with self.policy:
            return serve_cartpole.step(self.policy, num_envs, steps, seed=rank)


def specs(num_envs):
    observation, action = torch.zeros(num_envs, 4), torch.zeros(num_envs, dtype=torch.int64)
    return {
        "request_spec": TensorDict({"observation": observation}, [num_envs]),
        "response_spec": TensorDict({"action": action}, [num_envs]),
        "in_keys": ["observation"],
        "out_keys": ["action"],
    }


def run(hosts, groups, num_envs=8, steps=1000):
    with MonarchMesh(hosts, groups) as mesh:
        # "monarch" instead of "distributed" needs no specs
        server = mesh.serve(serve_cartpole.Policy, "distributed", **specs(num_envs))
        steppers = mesh.spawn("env", "stepper", Stepper, server)
        stepping = [actor.step.call_one(n, num_envs, steps) for n, actor in enumerate(steppers)]
        for rank, future in enumerate(stepping):
            host = mesh.hosts("env")[rank]
            print(f"env {rank} on {host}: {future.get(timeout=600)}", flush=True)
        for rank, stats in enumerate(server.stats()):
            print(
                f"server {rank} served {stats.requests} requests in batches of {stats.batch_sizes}"
            )
