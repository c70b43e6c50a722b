"""A driver that shuts Ray down while requests are pending: ``ray_driver.py ADDRESS``."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import ray
import ray_roles as roles

from meshinfer import InferenceServer, PeerLostError
from meshinfer.inference.ray import RayTransport


def main(address: str) -> None:
    ray.init(address=address, log_to_driver=False, configure_logging=False)
    server = ray.remote(roles.Serving).options(num_cpus=0).remote()
    client = ray.get(server.client.remote())
    policy = roles.Holding()
    with InferenceServer(policy, RayTransport()) as here:
        pending = [server.ask.remote(here.client())]
        told: list[str] = []
        threads = [threading.Thread(target=ask, args=(client, told)) for _ in range(2)]
        for thread in threads:
            thread.start()
        while here.transport.num_clients < 1 or client.in_flight < 2:  # type: ignore[attr-defined]
            time.sleep(0.01)
        began = time.monotonic()
        ray.shutdown()
        print("shutdown", time.monotonic() - began)
        for thread in threads:
            thread.join(roles.SECONDS)
        print("told", time.monotonic() - began)
        print(*told, sep="\n")
        while here.transport.num_clients > 0:  # type: ignore[attr-defined]
            time.sleep(0.01)
        policy.gate.set()
    del pending
    try:
        client(roles.number(1), 1.0)
    except PeerLostError as error:
        print("later", error)


def ask(client: Any, told: list[str]) -> None:
    try:
        client(roles.number(roles.HELD))
    except PeerLostError as error:
        told.append(f"PeerLostError {error}")


if __name__ == "__main__":
    main(sys.argv[1])
