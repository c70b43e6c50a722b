"""Lend this host to a monarch controller elsewhere until that is done: python launch/monarch/host.py CONTROLLER

CONTROLLER is its name or address. Prints where this host listens, on a port that was free: what several_hosts.py wants.
slurm.py starts it by itself. Whoever reaches that port may run any code here: only on a network of your own.
"""

import os
import socket
import sys

from monarch.actor import run_worker_loop_until_shutdown


def main():
    controller = sys.argv[1] if len(sys.argv) > 1 else os.environ["SLURM_LAUNCH_NODE_IPADDR"]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((controller, 9))  # sends nothing: only looks up the way there
        address = probe.getsockname()[0]
    with socket.socket() as probe:  # monarch does not tell which port the system has chosen
        probe.bind((address, 0))
        port = probe.getsockname()[1]
    print(f"monarch host tcp://{address}:{port}", flush=True)
    run_worker_loop_until_shutdown(address=f"tcp://{address}:{port}", ca="trust_all_connections")


if __name__ == "__main__":
    main()
