"""What the ranks of jobs on several nodes do: ``node_ranks.py <scenario> [argument ...]``."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from mesh_jobs import RESULTS_VARIABLE, report
from mesh_ranks import REQUEST, RESPONSE, SECONDS, Plus, ask, serve, total
from support import wait_until
from tensordict import TensorDict

import meshinfer


def served(constant: str = "100", label: str = "", jobs: str = "1") -> None:
    """The server adds ``constant``; clients report what was added, by a server that is up with those of all jobs."""
    mesh = meshinfer.init_mesh()
    transport = mesh.transport(REQUEST, RESPONSE, timeout=SECONDS)
    seen = {"text": repr(mesh), "host": socket.gethostname()}
    if mesh.role == "server":
        report(f"up{label}", **seen, address=transport.address.host)
        report(f"server{label}", requests=serve(transport, float(constant)))
        return
    with transport.client() as client:
        ask(client, mesh.rank)
        if not wait_until(lambda: len(reports("up*")) == int(jobs), SECONDS):
            raise TimeoutError(f"there are not {jobs} servers: {reports('up*')}")
        report(f"rank{mesh.rank}{label}", **seen, said=ask(client, mesh.rank, times=20))


def restarting(victim: str) -> None:
    """The rank ``victim`` is killed in a step of the first attempt, once all clients have been served."""
    mesh = meshinfer.init_mesh()
    attempt = len(reports(f"rank{mesh.rank}-*"))
    dying = attempt == 0 and mesh.rank == int(victim)
    transport = mesh.transport(REQUEST, RESPONSE, timeout=SECONDS)
    if mesh.role == "server":
        constant = 100.0 * (1 + attempt)
        report(f"rank{mesh.rank}-{attempt}", constant=constant)
        policy = Ending(constant, mesh.world_size, "killed") if dying else Plus(constant)
        with meshinfer.InferenceServer(policy, transport) as server:
            server.serve()
        report(f"served-{attempt}", requests=server.stats().requests)
        return
    with transport.client() as client:
        report(f"rank{mesh.rank}-{attempt}", said=ask(client, mesh.rank))
        while attempt == 0:
            ask_and_end(client, mesh.world_size, "killed" if dying else "")


def ending(victim: str = "", how: str = "") -> None:
    """All go on for ever, but the rank ``victim``, once all clients have been served."""
    mesh = meshinfer.init_mesh()
    dying = how if victim == str(mesh.rank) else ""
    transport = mesh.transport(REQUEST, RESPONSE, timeout=SECONDS)
    if mesh.role == "server":
        report(f"rank{mesh.rank}-0", pid=os.getpid())
        meshinfer.InferenceServer(Ending(1.0, mesh.world_size, dying), transport).serve()
        return
    with transport.client() as client:
        report(f"rank{mesh.rank}-0", pid=os.getpid(), said=ask(client, mesh.rank))
        while True:
            ask_and_end(client, mesh.world_size, dying)


def own_group(order: str, port: str) -> None:
    """The user's own process group, at a port of the user's, made before the mesh or while it works."""
    rank, size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    os.environ |= {"MASTER_ADDR": os.environ["SLURMD_NODENAME"] if rank == 0 else "n0"}
    os.environ |= {"MASTER_PORT": port, "RANK": str(rank), "WORLD_SIZE": str(size)}
    if order == "before":
        dist.init_process_group("gloo", init_method="env://")
    mesh = meshinfer.init_mesh()
    transport = mesh.transport(REQUEST, RESPONSE, timeout=SECONDS)
    seen = {"launcher": mesh.environment.launcher}
    if mesh.role == "server":
        with meshinfer.InferenceServer(Plus(100.0), transport) as server:
            seen["sum"] = own_sum(mesh)
            server.serve(timeout=2 * SECONDS)
    else:
        with transport.client() as client:
            seen["said"] = ask(client, mesh.rank)
            seen["sum"] = own_sum(mesh)
            seen["again"] = ask(client, mesh.rank)
    dist.destroy_process_group()
    report(f"rank{mesh.rank}", **seen)


def own_sum(mesh: meshinfer.Mesh) -> float:
    if not dist.is_initialized():
        dist.init_process_group("gloo", init_method="env://")
    return total(mesh)


class Ending(Plus):
    """A policy that ends its process in the middle of a batch, once all ranks have reported."""

    def __init__(self, constant: float, world_size: int, how: str) -> None:
        super().__init__(constant)
        self.world_size, self.how = world_size, how

    def __call__(self, batch: TensorDict) -> TensorDict:
        end_when_all_were_served(self.world_size, self.how)
        return super().__call__(batch)


def ask_and_end(client: meshinfer.InferenceClient, world_size: int, how: str) -> None:
    waiting = client.submit(TensorDict({"x": torch.tensor(1.0)}))
    end_when_all_were_served(world_size, how)
    waiting.result(SECONDS)


def end_when_all_were_served(world_size: int, how: str) -> None:
    if how and len(reports("rank*-0")) == world_size:
        end(how)


def end(how: str) -> NoReturn:
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(int(how))


def reports(pattern: str) -> list[Path]:
    return list(Path(os.environ[RESULTS_VARIABLE]).glob(f"{pattern}.json"))


SCENARIOS: dict[str, Callable[..., None]] = {
    scenario.__name__: scenario for scenario in (served, restarting, ending, own_group)
}

if __name__ == "__main__":
    SCENARIOS[sys.argv[1]](*sys.argv[2:])
