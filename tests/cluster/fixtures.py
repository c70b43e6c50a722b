"""Fixtures: the hosts and the SLURM cluster that all tests of a session share. They go when the session does."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.hosts import Host, cabled_hosts
from cluster.pythons import warm_python
from cluster.slurm import Slurm, running_slurm

NODES = ("n0", "n1", "n2", "n3")
CONTROLLER = "head"
LOOPBACK = "debian"


@pytest.fixture(scope="session")
def cluster_folder() -> Iterator[Path]:
    """Not one of pytest's: the path of a socket is limited to 107 bytes."""
    folder = Path(tempfile.mkdtemp(prefix="meshinfer-"))
    folder.chmod(0o755)  # as munge wants it
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def hosts(cluster_folder: Path) -> Iterator[dict[str, Host]]:
    """By name: ``head``, ``n0`` to ``n3``, and ``debian``, whose name means loopback to itself."""
    with cabled_hosts(cluster_folder, [CONTROLLER, *NODES], LOOPBACK) as found:
        yield found


@pytest.fixture(scope="session")
def warm(hosts: dict[str, Host], cluster_folder: Path) -> Iterator[dict[str, str]]:
    """The variables of a job on these hosts, but for ``head``, whose ``python`` starts at once."""
    with warm_python([hosts[name] for name in (*NODES, LOOPBACK)], cluster_folder) as variables:
        yield variables


@pytest.fixture(scope="session")
def slurm(hosts: dict[str, Host], cluster_folder: Path) -> Iterator[Slurm]:
    """A SLURM cluster of the nodes ``n0`` to ``n3``; its commands run on ``head``."""
    nodes = [hosts[name] for name in NODES]
    with running_slurm(hosts[CONTROLLER], nodes, cluster_folder) as cluster:
        yield cluster
