"""One peer under one workload, obeying the harness: `python -m benchmarks.conductor`.

It runs in the peer's own interpreter and is the parent of the server and of every client, or, where these are threads,
their process, or, where these are actors, the program that has them started.
Commands and answers are JSON objects over the inherited connection whose number it is given.
"""

from __future__ import annotations

import importlib.metadata
import json
import multiprocessing
import platform
import sys
import time
import traceback
from array import array
from collections.abc import Iterator
from contextlib import nullcontext
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any

from .client import CONNECT, answer, client_main
from .collecting import CollectorConductor
from .peers import (
    IN_ACTORS,
    IN_COLLECTORS,
    IN_THREADS,
    IN_WEIGHTS,
    START_METHOD,
    ClientEnd,
    Connector,
    Peer,
    load_collecting,
    load_peer,
)
from .workload import WORKLOADS, Workload

# Only a backstop: the harness has a deadline for each command and gives up first.
CLIENT_SECONDS = 300.0
_HEAD_START_SECONDS = 0.05
_HEAD_START_SECONDS_PER_CLIENT = 0.001


class _Client:
    """The conductor's end of one client, which is a process or, `in_threads`, a thread."""

    def __init__(
        self, connector: Connector, workload: Workload, number: int, in_threads: bool
    ) -> None:
        self._number = number
        self._pipe, theirs = multiprocessing.Pipe()
        arguments = (connector, workload, number, theirs)
        make: Any = Thread if in_threads else multiprocessing.get_context(START_METHOD).Process
        self._body = make(target=client_main, args=arguments, daemon=True)
        self._body.start()
        if not in_threads:
            # With this copy closed, the death of the process ends the pipe and no read hangs.
            theirs.close()

    def tell(self, command: Any) -> None:
        self._pipe.send(command)

    def answer(self) -> Any:
        """Wait for the command's outcome; raises RuntimeError with the client's own traceback."""
        return answer(self._pipe, f"client {self._number}", self._body, CLIENT_SECONDS)


class Conductor:
    """The commands that the harness may send, one method each."""

    def __init__(self, peer: str, transport: str, workload: str) -> None:
        self._peer = load_peer(peer)
        self._workload = WORKLOADS[workload]
        self._in_threads = transport in (*IN_THREADS, *IN_WEIGHTS)
        self._in_actors = transport in IN_ACTORS
        self._serves_itself = transport in IN_THREADS
        if not self._in_threads and not self._in_actors:
            # It imports while we do.
            multiprocessing.set_forkserver_preload(list(self._peer.MODULES))
            forkserver.ensure_running()
        self._service: Any = self._peer.open_service(self._workload, transport)
        self._clients: list[ClientEnd] = []
        self._connected = 0

    def launch(self) -> dict[str, Any]:
        """Start the server and then clients that do not connect yet."""
        connectors = () if self._in_actors else self._service.connectors()
        server_pid = self._service.start()
        if self._in_actors:
            self._clients = list(self._service.clients())
        else:
            self._clients = [
                _Client(connector, self._workload, number, self._in_threads)
                for number, connector in enumerate(connectors)
            ]
        return {"server_pid": server_pid, "versions": _versions(self._peer)}

    def connect(self, clients: int) -> dict[str, Any]:
        """Connect and warm up clients until there are `clients` of them."""
        newcomers = self._clients[self._connected : clients]
        self._ask(newcomers, CONNECT)
        self._connected = clients
        return {}

    def measure(self, seconds: float) -> dict[str, Any]:
        """All clients at once in a closed loop for `seconds`, or longer if the workload asks for it."""
        seconds = max(seconds, self._workload.burst_seconds)
        forward = self._forward()
        head_start = _HEAD_START_SECONDS + _HEAD_START_SECONDS_PER_CLIENT * len(self._clients)
        start = time.monotonic() + head_start
        with self._service.publishing() if self._workload.publishes else nullcontext():
            answers = self._ask(self._clients, (start, start + seconds))
        summary = summarise([array("d", answer) for answer in answers])
        if forward is not None:
            alone = len(self._clients) == 1
            each = summary["p50_us"] if alone else 1e6 / summary["rate"]
            summary["overhead_us"] = each - 1e6 * forward
        return summary

    def stop(self) -> dict[str, Any]:
        """Close the clients, then the server."""
        self._ask(self._clients, None)
        self._service.stop()
        return {}

    def _ask(self, clients: list[ClientEnd], command: Any) -> list[Any]:
        for client in clients:
            client.tell(command)
        return [client.answer() for client in clients]

    def _forward(self) -> float | None:
        """Seconds of a bare forward pass for each of its rows, where server and clients share our process."""
        if not self._serves_itself:
            return None
        from .policy import forward_seconds

        return forward_seconds(self._workload) / self._workload.clients


def summarise(clients: list[array[float]]) -> dict[str, Any]:
    """Total rate in requests/s and latency percentiles in microseconds over all clients."""
    merged = sorted(latency for client in clients for latency in client)
    quantiles = {
        f"p{percent}_us": 1e6 * merged[min(len(merged) - 1, len(merged) * percent // 100)]
        for percent in (50, 95, 99)
    }
    # Each client over its own busy time: the last request may end after the others' windows.
    rate = sum(len(client) / sum(client) for client in clients)
    return {"requests": len(merged), "rate": rate, **quantiles}


def _versions(peer: Peer) -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for package in peer.PACKAGES:
        versions[package] = _version(package)
    return versions


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "source tree"


def _commands(harness: Connection) -> Iterator[tuple[str, dict[str, Any]]]:
    name = ""
    while name != "stop":
        try:
            name, arguments = json.loads(harness.recv_bytes())
        except EOFError:
            # The harness is gone; the children are daemons and end with this process.
            return
        yield name, arguments


def _conductor(peer: str, transport: str, workload: str) -> Conductor | CollectorConductor:
    if transport not in IN_COLLECTORS:
        return Conductor(peer, transport, workload)
    service = load_collecting(peer, WORKLOADS[workload], transport)
    versions = _versions(load_peer(peer))
    return CollectorConductor(service, {**versions, "gymnasium": _version("gymnasium")})


def main(peer: str, transport: str, workload: str, descriptor: str) -> int:
    """Answer commands until `stop`, a failure, or the end of the harness."""
    harness = Connection(int(descriptor))
    try:
        conductor = _conductor(peer, transport, workload)
        for name, arguments in _commands(harness):
            answer = getattr(conductor, name)(**arguments)
            harness.send_bytes(json.dumps(answer).encode())
    except Exception:
        harness.send_bytes(json.dumps({"failed": traceback.format_exc()}).encode())
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
