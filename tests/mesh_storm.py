"""Many independent jobs at once in forked processes, while ephemeral ports come and go: see test_rendezvous.py.

``mesh_storm.py <jobs> <clients of each> <rounds>``. One process imports the library and forks the others, which
keeps a round short enough for all servers to open their ports within the same moment.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import traceback

import torch
from mesh_jobs import report
from tensordict import TensorDict

import meshinfer

REQUEST = TensorDict({"x": torch.zeros(())})
RESPONSE = TensorDict({"y": torch.zeros(())})
SECONDS = 30.0


def serve(number: int, clients: int, ports: list[int]) -> None:
    transport = meshinfer.DistributedTransport(
        REQUEST, RESPONSE, secret=f"job {number}", timeout=SECONDS
    )

    def policy(batch: TensorDict) -> TensorDict:
        return TensorDict({"y": batch["x"] + number}, batch.batch_size)

    with meshinfer.InferenceServer(policy, transport) as server:
        for pipe in ports:
            os.write(pipe, str(transport.address.port).encode())
        server.serve(num_clients=clients, timeout=SECONDS)


def ask(number: int, port: int) -> None:
    transport = meshinfer.DistributedTransport(
        REQUEST, RESPONSE, role="client", port=port, secret=f"job {number}", timeout=SECONDS
    )
    with transport.client() as client:
        for step in range(3):
            reply = client(TensorDict({"x": torch.tensor(float(step))}), timeout=SECONDS)
            if float(reply["y"]) != step + number:
                raise ValueError(f"job {number} was answered by another: {reply['y']}")


def client_of(number: int, pipe: int) -> None:
    ask(number, int(os.read(pipe, 16)))


def disturb_ports() -> None:
    stop = threading.Event()
    threading.Thread(target=end_with_parent, args=(stop,), daemon=True).start()
    while not stop.is_set():
        opened = [socket.socket() for _ in range(50)]
        for each in opened:
            each.bind(("127.0.0.1", 0))
        for each in opened:
            each.close()


def end_with_parent(stop: threading.Event) -> None:
    os.read(NOISE[0], 1)  # returns when the parent closes its end
    stop.set()


def fork(work: object, *arguments: object) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 0
    try:
        work(*arguments)  # type: ignore[operator]
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)


def one_round(jobs: int, clients: int) -> int:
    """How many of all processes failed."""
    pids = []
    for number in range(jobs):
        pipes = [os.pipe() for _ in range(clients)]
        pids.append(fork(serve, number, clients, [write for _, write in pipes]))
        pids += [fork(client_of, number, read) for read, _ in pipes]
        for pipe in pipes:
            os.close(pipe[0])
            os.close(pipe[1])
    return sum(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0 for pid in pids)


if __name__ == "__main__":
    jobs, clients, rounds = map(int, sys.argv[1:])
    NOISE = os.pipe()
    noise = os.fork()
    if noise == 0:
        os.close(NOISE[1])
        disturb_ports()
        os._exit(0)
    os.close(NOISE[0])
    failed = [one_round(jobs, clients) for _ in range(rounds)]
    os.close(NOISE[1])
    os.waitpid(noise, 0)
    report("storm", failed=failed)
