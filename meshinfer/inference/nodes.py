"""The address at which a node is reached by the others of its job, as far as the job's runtime knows it."""

from __future__ import annotations

import ipaddress
import re
import socket
import sys

from meshinfer.errors import MeshError
from meshinfer.optional import load_ray
from meshinfer.rendezvous import INTERFACE_VARIABLE, resolve
from meshinfer.transport import PolicyBackend

__all__ = ["node_address"]

_LOOPBACK = "127.0.0.1"
_MONARCH_HOST = re.compile(r"^tcp:(?:\[(.+)\]|([^:]+)):\d+$")


def node_address(policy_backend: PolicyBackend) -> str | None:
    """This node's address, numeric; ``None`` in a topology without a runtime that knows it.

    ``"ray"``: the node's address in the Ray cluster. ``"monarch"``: where this process listens for messages of other
    hosts; the loopback address while it listens on none.

    Raises:
        MeshError: monarch connects hosts by name, and this host's name resolves to a loopback address.
        ValueError, ImportError: Ray is not initialised here, or not installed.
    """
    if policy_backend == "ray":
        return str(load_ray("policy_backend='ray'").util.get_node_ip_address())
    if policy_backend == "monarch":
        return _monarch_address()
    return None


def _monarch_address() -> str:
    if "monarch.actor" not in sys.modules:  # nobody has asked for other hosts
        return _LOOPBACK
    from monarch.config import get_global_config

    transport = str(get_global_config().get("default_transport", ""))
    given = _MONARCH_HOST.match(transport)
    if given is not None:
        return _address_of(given.group(1) or given.group(2))
    if transport.startswith(("tcp", "metatls", "tls", "quic")):
        return _address_of(socket.gethostname())
    return _LOOPBACK


def _address_of(host: str) -> str:
    address = resolve(host)
    parsed = ipaddress.ip_address(address)
    if parsed.is_unspecified:
        return _address_of(socket.gethostname())
    if parsed.is_loopback and host == socket.gethostname():
        raise MeshError(
            f"monarch connects hosts by name, and this host's name {host!r} resolves to the loopback"
            f" address {address}; pass interface= (a name such as 'eth0', or an address) or set"
            f" {INTERFACE_VARIABLE}"
        )
    return address
