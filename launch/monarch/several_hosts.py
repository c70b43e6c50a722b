"""A server on the first host, two env ranks on each, given by address.

On each host, which prints its address:   python launch/monarch/host.py NAME_OF_THE_CONTROLLERS_HOST
Then, where the controller shall be:      python launch/monarch/several_hosts.py tcp://10.0.0.2:34567 tcp://10.0.0.3:45678
"""

import sys
from urllib.parse import urlsplit

import cartpole
from monarch.actor import attach_to_workers, enable_transport, shutdown_context

from meshinfer import PerNode
from meshinfer.monarch_settings import apply_monarch_settings
from meshinfer.rendezvous import choose_address


def run(addresses, steps=1000):
    apply_monarch_settings()
    first = urlsplit(addresses[0])
    enable_transport(f"tcp://{choose_address(reach=(first.hostname, first.port))}:0")
    hosts = attach_to_workers(ca="trust_all_connections", workers=addresses, name="hosts")
    hosts.initialized.get(timeout=60)
    try:
        cartpole.run(hosts, {"server": 1, "env": PerNode(2)}, steps=steps)
    finally:
        hosts.shutdown().get(timeout=30)  # host.py ends there
        shutdown_context(host_timeout=1.0).get(timeout=10)


if __name__ == "__main__":
    run(sys.argv[1:])
