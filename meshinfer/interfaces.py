"""Addresses: of this process on one interface, and of other hosts by name."""

from __future__ import annotations

import fcntl
import ipaddress
import logging
import os
import socket
import struct

from meshinfer.errors import MeshError

__all__ = ["INTERFACE_VARIABLE", "choose_address", "explain_address", "named_address", "resolve"]

logger = logging.getLogger("meshinfer.interfaces")

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915


def resolve(host: str, port: int = 0) -> str:
    """The numeric address of ``host``; :class:`MeshError` when the name is unknown."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise MeshError(
            f"host {host!r} does not resolve ({error.strerror}); give an address or a name that this host knows"
        ) from error
    # torch's store listens on IPv4 wherever it listens
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return str(found[0][4][0])


def choose_address(
    interface: str | None = None,
    *,
    reach: tuple[str, int] | None = None,
    spans_hosts: bool = False,
) -> str:
    """The numeric address that this process listens on; see :func:`explain_address` for why it is that one.

    Args:
        interface: an interface name (``"eth0"``) or one of this host's addresses. Wins over everything.
        reach: ``(host, port)`` of a peer; without ``interface`` and without ``GLOO_SOCKET_IFNAME`` the address
            that the system would use to reach it is taken.
        spans_hosts: whether the job has ranks on other hosts, so that a loopback address cannot work.

    Raises:
        MeshError: unknown interface, wildcard address, or a loopback address in a job that spans hosts.
    """
    address, origin = explain_address(interface, reach=reach, spans_hosts=spans_hosts)
    logger.debug("listening address %s from %s", address, origin)
    return address


def explain_address(
    interface: str | None = None,
    *,
    reach: tuple[str, int] | None = None,
    spans_hosts: bool = False,
) -> tuple[str, str]:
    """What :func:`choose_address` returns for the same arguments, and what decided it; errors as there."""
    address, origin = _pick(interface, reach)
    parsed = ipaddress.ip_address(address)
    if parsed.is_unspecified:
        raise MeshError(
            f"{origin} gives {address}, which is every interface; name one interface or one address"
        )
    if parsed.is_loopback and spans_hosts:
        raise MeshError(
            f"{origin} gives the loopback address {address}, which other hosts of this job cannot reach; "
            f"pass interface= (a name such as 'eth0', or an address) or set {INTERFACE_VARIABLE}"
        )
    return address, origin


def _pick(interface: str | None, reach: tuple[str, int] | None) -> tuple[str, str]:
    if interface is not None:
        return _interface_address(interface), f"interface={interface!r}"
    named = os.environ.get(INTERFACE_VARIABLE, "").split(",")[0].strip()
    if named:
        return _interface_address(named), f"{INTERFACE_VARIABLE}={named!r}"
    if reach is not None:
        return _address_towards(*reach), f"the route to {reach[0]}"
    return "127.0.0.1", "the default for a single host"


def named_address(interface: str | None) -> str | None:
    """The address of the interface that the argument or ``GLOO_SOCKET_IFNAME`` names; ``None`` where neither does."""
    named = os.environ.get(INTERFACE_VARIABLE, "").strip(" ,")
    return None if interface is None and not named else choose_address(interface)


def _interface_address(interface: str) -> str:
    if _is_address(interface):
        return interface
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            named = struct.pack("256s", interface[:15].encode())
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, named)
        except OSError as error:
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise MeshError(
                f"no interface {interface!r} with an IPv4 address on {socket.gethostname()}; there are: {known}"
            ) from error
    return socket.inet_ntoa(answer[20:24])


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _address_towards(host: str, port: int) -> str:
    numeric = resolve(host, port)
    family = socket.AF_INET6 if ":" in numeric else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((numeric, port or 9))  # a datagram socket: only looks the route up
        except OSError as error:
            raise MeshError(
                f"no route from {socket.gethostname()} to {host} ({numeric}): {error.strerror}"
            ) from error
        return str(probe.getsockname()[0])
