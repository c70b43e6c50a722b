"""torchrun on two hosts, each with an address, a name and processes of its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cluster import Host
from mesh_jobs import RESULTS_VARIABLE, ROOT, Ended, Job, reported, run, running

from meshinfer.rendezvous import INTERFACE_VARIABLE

pytestmark = pytest.mark.slow

LAUNCH = ROOT / "launch" / "torchrun"
EXAMPLE = str(ROOT / "examples" / "serve_cartpole.py")
RANKS = str(ROOT / "tests" / "node_ranks.py")
PORT = "29400"  # these hosts are ours: nothing else listens there


@contextmanager
def started(
    hosts: dict[str, Host],
    folder: Path,
    *script: str,
    nodes: tuple[str, str] = ("n0", "n1"),
    ranks: int = 1,
    **variables: str,
) -> Iterator[list[Job]]:
    """``script`` on two nodes, so many ranks on each."""
    commands = [
        hosts[node].command("env", f"NODE={number}", str(LAUNCH / "several_nodes.sh"), *script)
        for number, node in enumerate(nodes)
    ]
    settings = {"HEAD": nodes[0], "PORT": PORT, "NODES": "2", "RANKS": str(ranks)}
    settings |= {"MESHINFER_SECRET": "a word of this job", RESULTS_VARIABLE: str(folder)}
    with running(folder, *commands, **settings, **variables) as jobs:
        yield jobs


def succeeded(jobs: list[Job]) -> tuple[Ended, Ended]:
    first, second = (job.end() for job in jobs)
    assert (first.code, second.code) == (0, 0), f"{first}\n{second}"
    return first, second


def test_the_example_on_one_node(
    hosts: dict[str, Host], warm: dict[str, str], tmp_path: Path
) -> None:
    pytest.importorskip("gymnasium")
    command = hosts["n0"].command(str(LAUNCH / "one_node.sh"), EXAMPLE, "--steps=20")
    ended = run(tmp_path, command, RANKS="3", **warm)
    assert ended.code == 0, str(ended)
    assert "rank 0 served 40 requests" in ended.stdout
    assert "Traceback" not in ended.stderr


def test_the_example_with_the_server_on_one_node_and_clients_on_both(
    hosts: dict[str, Host], warm: dict[str, str], tmp_path: Path
) -> None:
    pytest.importorskip("gymnasium")
    with started(hosts, tmp_path, EXAMPLE, "--steps=20", ranks=2, **warm) as jobs:
        first, second = succeeded(jobs)
    assert "rank 0 served 60 requests" in first.stdout
    assert "rank 1: 160 steps" in first.stdout
    assert "rank 2: 160 steps" in second.stdout
    assert "rank 3: 160 steps" in second.stdout
    assert "Traceback" not in first.stderr + second.stderr


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_comes_back(
    hosts: dict[str, Host], warm: dict[str, str], tmp_path: Path, victim: int
) -> None:
    """Rank 0 is the server, on the first node; rank 1 is the only client, on the other."""
    with started(hosts, tmp_path, RANKS, "restarting", str(victim), **warm, RESTARTS="1") as jobs:
        succeeded(jobs)
    seen = reported(tmp_path)
    assert seen["rank1-0"]["said"] == [100.0] * 5
    assert seen["rank1-1"]["said"] == [200.0] * 5, "it read what the first attempt had left"
    assert seen["served-1"]["requests"] == 5
    assert "served-0" not in seen, "the server ended well although its client was killed"


def test_a_hostname_that_means_loopback_on_its_own_host(
    hosts: dict[str, Host], warm: dict[str, str], tmp_path: Path
) -> None:
    """The other node knows the address."""
    where = {"nodes": ("debian", "n1"), **warm}
    with started(hosts, tmp_path / "unnamed", RANKS, "served", **where) as (first, second):
        ended = first.end()
        assert second.end().code != 0
    assert ended.code != 0
    assert "the route to debian gives the loopback address 127." in ended.stderr, str(ended)
    assert INTERFACE_VARIABLE in ended.stderr
    named = {INTERFACE_VARIABLE: "eth0"}
    with started(hosts, tmp_path / "named", RANKS, "served", **where, **named) as jobs:
        succeeded(jobs)
    assert reported(tmp_path / "named")["rank1"]["said"] == [100.0] * 20
