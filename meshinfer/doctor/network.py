"""Names, interfaces and the job's store."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

from torch.distributed import TCPStore

from meshinfer.doctor.context import Context
from meshinfer.doctor.findings import Finding, Status, blame, fail, info, ok, warn
from meshinfer.doctor.rollcall import RollCall
from meshinfer.errors import MeshError, RefusedError
from meshinfer.mesh import init_mesh
from meshinfer.rendezvous import INTERFACE_VARIABLE, explain_address, resolve

__all__ = ["host_name", "interface", "job_store", "network_failure", "pretty_seconds"]

_SLOW_SECONDS = 1.0
_PROBES = 5
_NO_ROUTE = (errno.EHOSTUNREACH, errno.ENETUNREACH)
STORE_SHARE = 0.6
"""Of the timeout: until then the job's store must have been reached."""


def host_name(context: Context) -> Finding:
    """What this host's name means here, and how long it takes to find out."""
    name, began = context.hostname, time.monotonic()
    try:
        found = socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        text = f"{name} does not resolve ({error.strerror})"
        if not context.spans_hosts:
            return info(text)
        return warn(
            text, "give every host a line in /etc/hosts or DNS, or use addresses instead of names"
        )
    addresses = sorted({str(entry[4][0]) for entry in found})
    # torch looks the name of each address up as well, as an IPv6 one, of which /etc/hosts knows nothing
    asked = addresses[0] if ":" in addresses[0] else f"::ffff:{addresses[0]}"
    with contextlib.suppress(OSError):
        socket.getnameinfo((asked, 0), 0)
    seconds = time.monotonic() - began
    text = f"{name} is {', '.join(addresses)}"
    if context.spans_hosts and all(_is_loopback(address) for address in addresses):
        return warn(
            f"{text}: loopback, in a job of several nodes",
            f"take {name} out of the line of {addresses[0]} in /etc/hosts; or give the launcher an address that other "
            f"hosts reach (torchrun --rdzv-endpoint, --local-addr; MASTER_ADDR) and set {INTERFACE_VARIABLE}",
            addresses=addresses,
        )
    if seconds > _SLOW_SECONDS:
        return warn(
            f"{text}, found in {pretty_seconds(seconds)}",
            "a name server does not answer: mend /etc/resolv.conf, or RES_OPTIONS='timeout:1 attempts:1'; "
            "every connection of torch waits that long",
            addresses=addresses,
            seconds=seconds,
        )
    return ok(text, addresses=addresses, seconds=seconds)


def job_store(context: Context) -> Finding:
    """Whether the store where servers are found can be reached, and how fast it answers."""
    here = context.environment
    if here is None:
        return info("none without a launcher")
    try:
        found = _reach_store(context)
    except (MeshError, TimeoutError, RuntimeError, OSError) as error:
        found = network_failure("", error)
    address = here.store_address
    if found.status is Status.FAIL and address and here.spans_hosts:
        numeric = resolve(address[0])
        return _loopback_store(*address, numeric) if _is_loopback(numeric) else found
    return found


def _reach_store(context: Context) -> Finding:
    began = time.monotonic()
    context.mesh = init_mesh(context.groups)
    context.closing.callback(context.mesh.close)
    directory = context.mesh.directory
    if directory is None:
        return info("none in a world of one")
    store = directory.connect(context.left(STORE_SHARE))
    connected = time.monotonic() - began
    context.roll = RollCall(store, directory.prefix)
    if context.rank == 0:
        context.roll.open(range(1, context.world_size if context.spans_hosts else 1))
    answer = _answer_seconds(store, f"{directory.prefix}/doctor/probe/{context.rank}")
    return ok(
        f"{directory.host}:{store.port}, connected in {pretty_seconds(connected)}, answers in "
        f"{pretty_seconds(answer)}",
        host=directory.host,
        port=store.port,
        connect_seconds=connected,
        answer_seconds=answer,
    )


def _loopback_store(host: str, port: int, numeric: str) -> Finding:
    return fail(
        f"{host}:{port} is {numeric} here, the loopback of each node: ranks of other nodes would look for it at "
        "home",
        "start the job with an address of rank 0's node that other nodes reach (MASTER_ADDR, --rdzv-endpoint, "
        f"--local-addr), or take {host} out of the loopback lines of /etc/hosts",
        host=host,
        port=port,
    )


def _answer_seconds(store: TCPStore, key: str) -> float:
    """The median of a few questions. A store answers every question, but not that something was set."""
    times = []
    for _ in range(_PROBES):
        began = time.monotonic()
        store.check([key])
        times.append(time.monotonic() - began)
    return statistics.median(times)


def interface(context: Context) -> Finding:
    """Which address this rank's server would listen on, why that one, and what else there is."""
    there = ", ".join(f"{name} {address}" for name, address in _interfaces().items()) or "none"
    reach = _reach(context)
    if reach is None and context.world_size > 1:
        return info(f"not chosen, as there is no store of the job to reach; this host has {there}")
    try:
        address, origin = explain_address(reach=reach, spans_hosts=context.spans_hosts)
    except MeshError as error:
        return network_failure(f"this host has {there}: ", error)
    name = next((name for name, known in _interfaces().items() if known == address), None)
    return ok(
        f"{address} ({name or 'on no interface of its own'}), from {origin}; this host has {there}",
        address=address,
        interface=name,
        origin=origin,
        interfaces=_interfaces(),
    )


def _reach(context: Context) -> tuple[str, int] | None:
    if context.mesh is not None and context.mesh.directory is not None:
        return context.mesh.directory.host, context.mesh.directory.port
    return None if context.environment is None else context.environment.store_address


def _interfaces() -> dict[str, str]:
    found = {}
    for _, name in socket.if_nameindex():
        try:
            found[name], _ = explain_address(name)
        except MeshError:  # no IPv4 address
            continue
    return found


def network_failure(what: str, error: Exception) -> Finding:
    """What a failed connection usually comes from.

    Args:
        what: was tried, put before the error.
        error: of this library, torch or the system.
    """
    says_what_to_do = isinstance(error, (MeshError, RefusedError)) and "; " in str(error)
    return blame(error, what) if says_what_to_do else fail(f"{what}{error}", _remedy(error))


def _remedy(error: Exception) -> str:
    reasons = list(_causes(error))
    if any(isinstance(reason, ConnectionRefusedError) for reason in reasons):
        return (
            "nothing listens there, or a firewall turns connections away: has the rank on that host started, is the "
            "address its own, and may nodes reach each other by TCP?"
        )
    if any(getattr(reason, "errno", None) in _NO_ROUTE for reason in reasons):
        return f"no route leads there: choose another interface with {INTERFACE_VARIABLE}, or mend the network"
    if "closed" in str(error):
        return "what was at the other end has gone: see the lines of its rank and of its launcher"
    if isinstance(error, RefusedError):
        return "give all ranks one secret (MESHINFER_SECRET, or none) and one version of meshinfer"
    return (
        "packets get lost on the way (a firewall?), or that process is stopped: let nodes reach each other by TCP on "
        f"ports {_port_range()}, and see whether its rank runs"
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _port_range() -> str:
    try:
        return "-".join(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    except OSError:  # hidden here
        return "32768-60999"


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def pretty_seconds(seconds: float) -> str:
    """Two digits or three with a unit that fits."""
    if seconds >= 1.0:
        return f"{seconds:.1f} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"
