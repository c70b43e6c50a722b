"""Controllers of monarch, as programs of their own: ``monarch_scripts.py NAME [ARGUMENT]``."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

from meshinfer.optional import load_monarch

monarch = load_monarch("this program")

from monarch_policy import AddOne, request, value_of  # noqa: E402
from monarch_roles import Asking, Serving, outcome  # noqa: E402

from meshinfer import InferenceServer  # noqa: E402
from meshinfer.inference.monarch import MonarchTransport  # noqa: E402

SECONDS = 60.0


def two_hosts() -> None:
    """A server and a client on different hosts, which have TCP between them, and then the server's process dies."""
    monarch.unhandled_fault_hook = lambda _: None
    hosts = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
    loops = [subprocess.Popen([sys.executable, "-c", LOOP, host]) for host in hosts]
    try:
        monarch.enable_transport("tcp://127.0.0.1:0")
        mesh = monarch.attach_to_workers(ca="trust_all_connections", workers=hosts, name="pair")
        mesh.initialized.get(timeout=SECONDS)
        procs = [mesh.slice(hosts=index).spawn_procs(per_host={"procs": 1}) for index in range(2)]
        server = procs[0].spawn("server", Serving)
        there, here = server.clients.call_one(2).get(timeout=SECONDS)
        asking = procs[1].spawn("asking", Asking, there)
        print(asking.ask.call_one(1.0).get(timeout=SECONDS))
        print(asking.ask_in_threads.call_one([2.0]).get(timeout=SECONDS)[0])
        print(value_of(here(request(3.0), SECONDS)))
        waiting = here.submit(request(60_000.0))
        os.kill(server.process.call_one().get(timeout=SECONDS), signal.SIGKILL)
        print(outcome(lambda: waiting.result(SECONDS))[0])
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


LOOP = (
    "import sys; from monarch.actor import run_worker_loop_forever as run; "
    "run(address=sys.argv[1], ca='trust_all_connections')"
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def leave_open() -> None:
    """End with a server, clients and requests here and in an actor."""
    server = InferenceServer(AddOne(), MonarchTransport()).start()
    procs = monarch.this_host().spawn_procs(per_host={"procs": 1})
    asking = procs.spawn("asking", Asking, server.client())
    print(asking.ask.call_one(1.0).get(timeout=SECONDS))
    asking.submit.call_one(60_000.0).get(timeout=SECONDS)
    client = server.client()
    OPEN.extend([server, client, procs, asking, client.submit(request(1.0))])
    sys.exit(3)


OPEN: list[object] = []

if __name__ == "__main__":
    {"two_hosts": two_hosts, "leave_open": leave_open}[sys.argv[1]](*sys.argv[2:])
