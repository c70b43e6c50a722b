"""What the ranks of the jobs in test_mesh.py do: ``mesh_ranks.py <scenario> [argument ...]``."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from mesh_jobs import report
from tensordict import TensorDict

import meshinfer

REQUEST = TensorDict({"x": torch.zeros(())})
RESPONSE = TensorDict({"y": torch.zeros(())})
SECONDS = 20.0
CLONE_NEWNET = 0x40000000


class Plus:
    """Answers ``x`` with ``x + constant``: wrong rows and wrong servers both show."""

    def __init__(self, constant: float) -> None:
        self.constant = constant

    def __call__(self, batch: TensorDict) -> TensorDict:
        return TensorDict({"y": batch["x"] + self.constant}, batch.batch_size)


def ask(client: Any, value: float, times: int = 5) -> list[float]:
    """Replies to ``value``, ``value + 1`` ..., with what was sent taken off: constants of who answered."""
    found = []
    for step in range(times):
        reply = client(TensorDict({"x": torch.tensor(float(value + step))}), timeout=SECONDS)
        found.append(float(reply["y"]) - value - step)
    return found


def total(mesh: meshinfer.Mesh) -> float:
    """The user's own collective: the sum of all ranks."""
    value = torch.tensor(float(mesh.rank))
    dist.all_reduce(value)
    return float(value)


def initialized() -> bool:
    return dist.is_initialized()


def serve(transport: Any, constant: float = 100.0, **arguments: Any) -> int:
    """Serve until the clients have left; how many requests there were."""
    arguments.setdefault("timeout", 2 * SECONDS)
    with meshinfer.InferenceServer(Plus(constant), transport) as server:
        server.serve(**arguments)
        return server.stats().requests


def own_group_first() -> None:
    """The user's group exists before ours, and is destroyed while the library runs."""
    dist.init_process_group("gloo")
    mesh = meshinfer.init_mesh()
    seen: dict[str, Any] = {"before": initialized(), "sum": total(mesh)}
    transport = mesh.transport(REQUEST, RESPONSE)
    if mesh.role == "server":
        with meshinfer.InferenceServer(Plus(100.0), transport) as server:
            seen["sum_while_serving"] = total(mesh)
            dist.destroy_process_group()
            seen["after_destroy"] = initialized()
            server.serve(timeout=2 * SECONDS)
            seen["requests"] = server.stats().requests
    else:
        with transport.client() as client:
            seen["first"] = ask(client, mesh.rank)
            seen["sum_while_serving"] = total(mesh)
            dist.destroy_process_group()
            seen["after_destroy"] = initialized()
            seen["second"] = ask(client, mesh.rank)
    report(f"rank{mesh.rank}", **seen, at_end=initialized())


def own_group_last() -> None:
    """The user's group is made when the library already runs, and outlives it."""
    mesh = meshinfer.init_mesh()
    seen: dict[str, Any] = {"before": initialized()}
    transport = mesh.transport(REQUEST, RESPONSE)
    if mesh.role == "server":
        with meshinfer.InferenceServer(Plus(100.0), transport) as server:
            dist.init_process_group("gloo")
            seen["sum"] = total(mesh)
            server.serve(timeout=2 * SECONDS)
    else:
        with transport.client() as client:
            seen["first"] = ask(client, mesh.rank)
            seen["while_connected"] = initialized()
            dist.init_process_group("gloo")
            seen["sum"] = total(mesh)
            seen["second"] = ask(client, mesh.rank)
    seen["after"] = initialized()
    seen["sum_after"] = total(mesh)
    dist.destroy_process_group()
    report(f"rank{mesh.rank}", **seen)


def several() -> None:
    """Two servers with two policies each, three clients, one rank that is neither; no group of the user's."""
    mesh = meshinfer.init_mesh({"server": 2, "env": 3, "learner": ...})
    assignment = mesh.assignment()
    seen: dict[str, Any] = {
        "text": repr(mesh),
        "assignment": {str(client): server for client, server in assignment.items()},
        "agent_store": os.environ["TORCHELASTIC_USE_AGENT_STORE"],
    }
    if mesh.role == "learner":
        try:
            mesh.transport(REQUEST, RESPONSE)
        except meshinfer.MeshError as error:
            seen["error"] = str(error)
    elif mesh.role == "server":
        constant = 100.0 * (1 + mesh.group("server").index(mesh.rank))
        critics = meshinfer.InferenceServer(
            Plus(7.0 + constant), mesh.transport(REQUEST, RESPONSE, name="critic")
        )
        with critics:
            seen["requests"] = serve(mesh.transport(REQUEST, RESPONSE), constant)
            critics.serve(timeout=SECONDS)
            seen["critic_requests"] = critics.stats().requests
    else:
        seen.update(use_both(mesh))
    report(f"rank{mesh.rank}", **seen, initialized=initialized())


def use_both(mesh: meshinfer.Mesh) -> dict[str, Any]:
    actors = mesh.transport(REQUEST, RESPONSE)
    critics = mesh.transport(REQUEST, RESPONSE, name="critic")
    other = TensorDict({"x": torch.zeros(()), "goal": torch.zeros(3)})
    wrong = mesh.transport(other, RESPONSE, name="critic", rank=None).client()
    with actors.client() as actor, critics.client() as critic:
        actor_said = ask(actor, mesh.rank)
        critic_said = ask(critic, mesh.rank)
        try:
            wrong(other, timeout=SECONDS)
        except meshinfer.RefusedError as error:
            refusal = str(error)
        wrong.close()
        return {"actor": actor_said, "critic": critic_said, "refusal": refusal}


def spawner(port: str) -> None:
    """Rank 1 spawns a process that is a client: with a client that it was given, and with one of its own."""
    mesh = meshinfer.init_mesh()
    chosen = meshinfer.init_mesh(host="127.0.0.1", port=int(port))
    if mesh.role == "server":
        found = [serve(mesh.transport(REQUEST, RESPONSE), num_clients=2)]
        found.append(serve(chosen.transport(REQUEST, RESPONSE, name="chosen"), 200.0))
        report("server", requests=found)
        return
    client = mesh.transport(REQUEST, RESPONSE).client()
    child = multiprocessing.get_context("spawn").Process(target=spawned, args=(client,))
    child.start()
    child.join(2 * SECONDS)
    report("parent", exit_code=child.exitcode)
    with chosen.transport(REQUEST, RESPONSE, name="chosen").client() as client:
        report("chosen", said=ask(client, 2))
    client.close()


def spawned(given: meshinfer.DistributedClient) -> None:
    with given:
        said = ask(given, 5)
    mesh = meshinfer.init_mesh()  # the launcher's variables are inherited
    with mesh.transport(REQUEST, RESPONSE).client() as own:
        report("child", given=said, own=ask(own, 9), text=repr(mesh), initialized=initialized())


def restarting() -> None:
    """Rank 1 fails in the first attempt, after it has been served."""
    mesh = meshinfer.init_mesh()
    attempt = mesh.environment.restart_count
    transport = mesh.transport(REQUEST, RESPONSE)
    if mesh.role == "server":
        report(f"server-{attempt}", requests=serve(transport, 100.0 * (1 + attempt)))
        return
    with transport.client() as client:
        report(f"rank{mesh.rank}-{attempt}", said=ask(client, mesh.rank))
        if mesh.rank == 1 and attempt == 0:
            raise RuntimeError("this rank fails in its first attempt")


def constant(value: str) -> None:
    """One of two jobs that run at once."""
    mesh = meshinfer.init_mesh()
    transport = mesh.transport(REQUEST, RESPONSE)
    if mesh.role == "server":
        report("server", requests=serve(transport, float(value)))
    else:
        with transport.client() as client:
            report(f"rank{mesh.rank}", said=ask(client, mesh.rank, times=200))


def explicit(rank: str, world_size: str, port: str) -> None:
    """No launcher at all; the last rank never asks anything."""
    mesh = meshinfer.init_mesh(
        rank=int(rank), world_size=int(world_size), host="127.0.0.1", port=int(port)
    )
    transport = mesh.transport(REQUEST, RESPONSE)
    seen: dict[str, Any] = {"text": repr(mesh)}
    if mesh.role == "server":
        seen["requests"] = serve(transport)
    else:
        with transport.client() as client:
            if mesh.rank != mesh.world_size - 1:
                seen["said"] = ask(client, mesh.rank)
    report(f"rank{rank}", **seen)


def namespaced(rank: str, master: str, port: str, interface: str, address: str) -> None:
    """One of two hosts: with no option, with the variable, with the argument by name and by address."""
    enter_namespace(interface)
    mesh = meshinfer.init_mesh(
        rank=int(rank), world_size=2, local_world_size=1, host=master, port=int(port)
    )
    seen: dict[str, Any] = {}
    for name, options in (
        ("default", {}),
        ("variable", {}),
        ("named", {"interface": interface}),
        ("numeric", {"interface": address}),
    ):
        if name == "variable":
            os.environ["GLOO_SOCKET_IFNAME"] = interface
        transport = mesh.transport(REQUEST, RESPONSE, name=name, timeout=SECONDS, **options)
        os.environ.pop("GLOO_SOCKET_IFNAME", None)
        if mesh.role == "server":
            seen[name] = transport.address.host
            serve(transport)
        else:
            with transport.client() as client:
                seen[name] = ask(client, 3)
    report(f"rank{rank}", **seen, loopback=refusal_of_loopback(mesh))


def enter_namespace(name: str) -> None:
    """See and use the network of the namespace ``name`` only; the interface in it has the same name."""
    with open(f"/run/netns/{name}") as namespace:
        library = ctypes.CDLL(None, use_errno=True)
        if library.setns(namespace.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")


def refusal_of_loopback(mesh: meshinfer.Mesh) -> dict[str, Any]:
    """At the server when it is made; a client finds out when it joins, within its timeout."""
    began, text = time.monotonic(), ""
    try:
        transport = mesh.transport(REQUEST, RESPONSE, interface="lo", timeout=3.0)
        with transport.client() as client:
            client(TensorDict({"x": torch.tensor(3.0)}), timeout=3.0)
    except (meshinfer.MeshError, meshinfer.TransportError, TimeoutError) as error:
        text = str(error)
    return {"error": text, "seconds": time.monotonic() - began}


SCENARIOS: dict[str, Callable[..., None]] = {
    scenario.__name__: scenario
    for scenario in (
        own_group_first,
        own_group_last,
        several,
        spawner,
        restarting,
        constant,
        explicit,
        namespaced,
    )
}

if __name__ == "__main__":
    SCENARIOS[sys.argv[1]](*sys.argv[2:])
