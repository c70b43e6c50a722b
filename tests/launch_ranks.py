"""What the ranks of jobs do for which rank 0 hosts the store: ``launch_ranks.py <scenario> [argument ...]``."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mesh_jobs import RESULTS_VARIABLE, report
from mesh_ranks import REQUEST, RESPONSE, SECONDS, Plus, ask, serve
from support import wait_until
from tensordict import TensorDict

import meshinfer


def wait_for(label: str) -> None:
    """Until somebody has reported."""
    path = Path(os.environ[RESULTS_VARIABLE]) / f"{label}.json"
    if not wait_until(path.exists, SECONDS):
        raise TimeoutError(f"nobody reported {label}")


def failing(client: Any) -> dict[str, Any]:
    """The error of one request, and how long it took."""
    began = time.monotonic()
    try:
        client(TensorDict({"x": torch.tensor(1.0)}))
    except (meshinfer.TransportError, TimeoutError) as error:
        kind = type(error).__name__
        return {"error": kind, "text": str(error), "seconds": time.monotonic() - began}
    return {}


def first_to_go() -> None:
    """Rank 0, which serves and hosts the store, ends while the client lives; it was closed in good order."""
    mesh = meshinfer.init_mesh()
    transport = mesh.transport(REQUEST, RESPONSE)
    if mesh.role == "server":
        with meshinfer.InferenceServer(Plus(100.0), transport):
            wait_for("asked")
        report("gone")
        return
    client, late = transport.client(), transport.client()
    report("asked", said=ask(client, 1))
    wait_for("gone")
    other = mesh.transport(REQUEST, RESPONSE, name="other").client()
    seen = {"first": failing(client), "again": failing(client), "late": failing(late)}
    report("client", **seen, other=failing(other))
    began = time.monotonic()
    for each in (client, late, other):
        each.close()
    report("closed", seconds=time.monotonic() - began)


def coming_back(life: str) -> None:
    """Rank 0 dies without a word and is started again, with another policy; the client goes on asking."""
    mesh = meshinfer.init_mesh()
    transport = mesh.transport(REQUEST, RESPONSE)
    if mesh.role == "server":
        constant = 100.0 * int(life)
        report(f"server{life}", requests=serve(transport, constant))
        return
    with transport.client() as client:
        report("asked", said=ask(client, 1))
        errors = []
        said: list[float] = []
        while not said or said[0] == 100.0:
            try:
                said = ask(client, 1)
            except meshinfer.TransportError as error:
                errors.append(type(error).__name__)
                if len(errors) == 1:
                    report("lost", error=str(error))
                time.sleep(0.05)  # an environment that has nothing to do until the policy is back
        report("found", said=said, errors=sorted(set(errors)))


def family() -> None:
    """Rank 0 has two meshes, and a child that inherits its variables and is a client."""
    first, second = meshinfer.init_mesh(), meshinfer.init_mesh({"server": 1, "env": ...})
    first.close()
    child = multiprocessing.get_context("fork").Process(target=heir)
    child.start()
    transport = second.transport(REQUEST, RESPONSE)
    report("server", requests=serve(transport, num_clients=1))
    child.join(SECONDS)
    report("parent", code=child.exitcode)
    second.close()
    third = meshinfer.init_mesh()
    report("third", hosts=third._close_store is not None)


def heir() -> None:
    mesh = meshinfer.init_mesh()
    transport = meshinfer.DistributedTransport(
        REQUEST, RESPONSE, role="client", directory=mesh.directory, name="policy/0"
    )
    with transport.client() as client:
        report("child", said=ask(client, 5), role=mesh.role)


SCENARIOS: dict[str, Callable[..., None]] = {
    scenario.__name__: scenario for scenario in (first_to_go, coming_back, family)
}

if __name__ == "__main__":
    SCENARIOS[sys.argv[1]](*sys.argv[2:])
