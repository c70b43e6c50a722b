"""The store of a job, where servers are published: the launcher's, the one a user names, or one that rank 0 hosts."""

from __future__ import annotations

import dataclasses
import hashlib
import ipaddress
import os
import socket
import threading
from collections.abc import Callable

from meshinfer.errors import MeshError
from meshinfer.mesh.ancestry import descends_from
from meshinfer.mesh.beacon import Beacon, candidate_ports
from meshinfer.mesh.beacon_directory import BeaconDirectory
from meshinfer.mesh.hostlist import node_address
from meshinfer.mesh.launcher import LaunchEnvironment
from meshinfer.mesh.variables import JOB_VARIABLE
from meshinfer.rendezvous import (
    INTERFACE_VARIABLE,
    PORT_VARIABLE,
    Directory,
    PrivateStore,
    given_secret,
    named_address,
    resolve,
)

__all__ = ["open_job_store"]

_CHECK_SECONDS = 1.0

Close = Callable[[], None]


def open_job_store(
    environment: LaunchEnvironment,
    *,
    host: str | None,
    port: int | None,
    secret: str | bytes | None,
    interface: str | None,
) -> tuple[Directory | None, Close | None]:
    """Where the ranks of the job find each other, and at rank 0, if it hosts that, what ends it.

    Args:
        environment: what the launcher said.
        host, port: of the store when both are given, with rank 0 hosting it; ``host`` alone is where rank 0 is.
        secret, interface: see :func:`~meshinfer.init_mesh`.

    Raises:
        MeshError: the address of rank 0 cannot be told, resolved or listened on, or another job has the same identity.
    """
    if port is not None:
        return _at_given_port(environment, host, port)
    if environment.store_address is not None and host is None:
        return Directory(*environment.store_address, _prefix(environment)), None
    if not environment.identity:
        if host is not None:
            raise MeshError(f"host={host!r} and port=None: give both")
        return None, None
    directory = _beacon_directory(environment, host, secret, interface)
    if environment.rank != 0:
        return directory, None
    return directory, _host(directory, interface)


def _at_given_port(
    environment: LaunchEnvironment, host: str | None, port: int
) -> tuple[Directory, Close | None]:
    if host is None:
        raise MeshError(f"host=None and port={port!r}: give both")
    if not 0 < port < 65536:
        raise MeshError(f"port={port}: expected 1 to 65535, the same on every rank")
    directory = Directory(host, port, _prefix(environment))
    if environment.rank != 0:
        return directory, None
    return directory, PrivateStore(resolve(host), port).close


def _prefix(environment: LaunchEnvironment) -> str:
    """Separates the attempts of a job that torchrun restarts.

    On several nodes the agents count their restarts each for itself, so the count cannot be part of a common key:
    there a server writes over its entry, and a client that finds nobody at the address it read reads it again.
    """
    counted = environment.num_nodes == 1
    attempt = f"attempt{environment.restart_count}" if counted else "attempts"
    return f"meshinfer/{environment.job_id}/{attempt}"


# --- Where rank 0 is ----------------------------------------------------------------------------


def _beacon_directory(
    environment: LaunchEnvironment,
    host: str | None,
    secret: str | bytes | None,
    interface: str | None,
) -> BeaconDirectory:
    name = host or environment.master_host
    if name is None:
        raise _no_host(environment)
    own = named_address(interface) if _beside_rank_0(environment) else None
    address = _reachable(name, own, environment)
    taken = os.environ.get(PORT_VARIABLE, "")
    avoid = [int(taken)] if taken.isdecimal() else []
    ports = tuple(candidate_ports(environment.identity, avoid))
    key = environment.identity, given_secret(secret)
    placement = _placement(environment)
    return BeaconDirectory(address, 0, "meshinfer", *key, ports, environment.launcher, placement)


def _placement(environment: LaunchEnvironment) -> str:
    """A digest of which rank is where, for comparing; empty where that is not known."""
    if not environment.nodes or min(environment.nodes) < 0:
        return ""
    return hashlib.sha256(repr(environment.nodes).encode()).hexdigest()


def _no_host(environment: LaunchEnvironment) -> MeshError:
    if environment.launcher == "slurm":
        return MeshError(
            f"cannot tell which of the {environment.num_nodes} nodes of the step {environment.job_id} hosts rank 0, as "
            "SLURM does not say how it deals ranks out; start with srun -m block, or pass host= (an address of rank "
            "0's node) to init_mesh"
        )
    return MeshError(
        f"{environment.launcher} does not say where rank 0 is: set MASTER_ADDR, or pass host= (an address of rank 0's "
        "node) to init_mesh, on every rank"
    )


def _beside_rank_0(environment: LaunchEnvironment) -> bool:
    if environment.rank == 0 or environment.num_nodes == 1:
        return environment.rank == 0
    return bool(environment.nodes) and environment.nodes[0] == environment.node_rank


def _reachable(name: str, own: str | None, environment: LaunchEnvironment) -> str:
    """The numeric address of rank 0's host ``name``, or its interface's address ``own`` where the name is loopback."""
    try:
        address = resolve(name)
    except MeshError as error:
        listed = node_address(name) if environment.launcher == "slurm" else None
        if listed is None or listed == name:
            raise MeshError(
                f"the node of rank 0, {name!r}, cannot be found from {socket.gethostname()}: {error}; pass host= (an "
                "address of that node) to init_mesh"
            ) from error
        address = resolve(listed)
    if not (environment.spans_hosts and ipaddress.ip_address(address).is_loopback):
        return address
    if own is not None and not ipaddress.ip_address(own).is_loopback:
        return own
    raise MeshError(
        f"the node of rank 0, {name!r}, has the loopback address {address} as seen from {socket.gethostname()}, which "
        f"other nodes of this job cannot reach; pass interface= (a name such as 'eth0', or an address) or set "
        f"{INTERFACE_VARIABLE} on rank 0's node, and host= of init_mesh where that is not enough"
    )


# --- What rank 0 does ---------------------------------------------------------------------------


class _Hosted:
    """The store and beacon of one job in this process, for as many meshes as have asked for it."""

    def __init__(self, directory: BeaconDirectory, interface: str | None) -> None:
        own = named_address(interface)
        self.pid = os.getpid()
        self.meshes = 0
        self.store = _open_store(own or directory.host)
        content = {"host": self.store.host, "port": self.store.port, "pid": self.pid}
        content |= {"node": socket.gethostname(), "placement": directory.placement}
        addresses = [directory.host, *([own] if own else [])]
        try:
            self.beacon = Beacon(directory.key, addresses, directory.ports, content)
        except MeshError:
            self.store.close()
            raise

    def close(self) -> None:
        self.beacon.close()
        self.store.close()


def _open_store(address: str) -> PrivateStore:
    try:
        return PrivateStore(address)
    except MeshError as error:
        raise MeshError(
            f"rank 0 runs on {socket.gethostname()} and cannot host the job's store at {address}: {error.__cause__}; "
            "pass host= (an address of rank 0's node) to init_mesh on every rank"
        ) from error


_hosted: dict[str, _Hosted] = {}
_hosting = threading.Lock()


def _host(directory: BeaconDirectory, interface: str | None) -> Close | None:
    """Host the job's store until what is returned is called; ``None`` where an ancestor of this process does."""
    with _hosting:
        hosted = _hosted.get(directory.identity)
        if hosted is None or hosted.pid != os.getpid():
            if _ancestor_hosts(directory):
                return None
            hosted = _hosted[directory.identity] = _Hosted(directory, interface)
            directory.reached.set()
            # somebody may have been as quick
            before = directory.ports[: directory.ports.index(hosted.beacon.addresses[0][1])]
            if before:
                try:
                    _ancestor_hosts(dataclasses.replace(directory, ports=before))
                except MeshError:
                    _hosted.pop(directory.identity).close()
                    raise
        hosted.meshes += 1
    return _Lease(directory.identity, hosted).close


def _ancestor_hosts(directory: BeaconDirectory) -> bool:
    found = directory.search().run(_CHECK_SECONDS, once=True)
    if found is None:
        return False
    if found["node"] == socket.gethostname() and descends_from(found["pid"]):
        return True
    raise MeshError(
        f"process {found['pid']} on {found['node']} is rank 0 of a job with the same identity as this one's "
        f"({directory.launcher} job, {directory.identity!r}); give one of them another MASTER_PORT, or set "
        f"{JOB_VARIABLE} to a word of its own on all of its ranks"
    )


class _Lease:
    """One mesh's part in a hosted store."""

    def __init__(self, identity: str, hosted: _Hosted) -> None:
        self._identity = identity
        self._hosted: _Hosted | None = hosted

    def close(self) -> None:
        with _hosting:
            hosted, self._hosted = self._hosted, None
            if hosted is None or hosted.pid != os.getpid():
                return
            hosted.meshes -= 1
            if not hosted.meshes:
                del _hosted[self._identity]
                hosted.close()
