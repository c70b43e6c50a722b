"""What the ranks of the job in test_weights_distributed.py do."""

from __future__ import annotations

import time

import torch
from distributed_weights_roles import REPLY, REQUEST, SECONDS, Versioned
from mesh_jobs import report
from tensordict import TensorDict

import meshinfer

VERSIONS = 100
UPDATES_PER_SECOND = 100


def learn(mesh: meshinfer.Mesh) -> None:
    """Publish versions 1 to ``VERSIONS``, in which every weight is its version."""
    model = Versioned()
    with (
        mesh.weight_transport(Versioned()) as transport,
        transport.publisher(model) as publisher,
    ):
        while publisher.subscribers < len(mesh.group("server")):
            time.sleep(0.01)
        began = time.monotonic()
        for version in range(1, VERSIONS + 1):
            with torch.no_grad():
                model.weight.fill_(version)
                model.offset.fill_(version)
            publisher.publish()
            if version % 10 == 0:
                publisher.wait(timeout=SECONDS)  # however slow this machine is
            time.sleep(max(began + version / UPDATES_PER_SECOND - time.monotonic(), 0.0))
        publisher.wait(timeout=SECONDS)
        report("learner", published=publisher.version)


def serve(mesh: meshinfer.Mesh) -> None:
    """Serve whatever version has arrived, until the environments have left."""
    server = meshinfer.InferenceServer(
        Versioned(),
        mesh.transport(REQUEST, REPLY),
        weight_transport=mesh.weight_transport(Versioned()),
    )
    with server:
        server.serve(timeout=2 * SECONDS)
        report(f"server{mesh.rank}", updates=server.stats().weight_updates)


def act(mesh: meshinfer.Mesh) -> None:
    """Ask until the last version answers; every reply must have been computed by the version that it names."""
    seen = [0]
    with mesh.transport(REQUEST, REPLY).client() as client:
        while seen[-1] < VERSIONS:
            reply = client(TensorDict({"x": torch.zeros(1)}, []), timeout=SECONDS)
            version = int(reply["policy_version"])
            assert reply["y"].tolist() == [version, version], (version, reply["y"])
            if version != seen[-1]:
                seen.append(version)
    report(f"env{mesh.rank}", rising=seen == sorted(seen), versions=len(seen))


if __name__ == "__main__":
    joined = meshinfer.init_mesh({"server": 2, "learner": 1, "env": ...})
    {"server": serve, "learner": learn, "env": act}[joined.role](joined)
