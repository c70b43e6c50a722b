"""What ``launch/monarch`` holds for SLURM, on a real cluster whose nodes have addresses of their own."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from cluster import Slurm
from mesh_jobs import ROOT
from support import wait_until

pytestmark = pytest.mark.slow

LAUNCH = ROOT / "launch" / "monarch"
SECONDS = 120.0


def test_monarch_on_two_nodes(slurm: Slurm, warm: dict[str, str], tmp_path: Path) -> None:
    """The server is on the first node, and its clients on both; afterwards nothing is left."""
    pytest.importorskip("gymnasium")
    files = (str(LAUNCH / "slurm.sbatch"), str(LAUNCH / "slurm.py"), "20")
    job = slurm.submit(tmp_path, *files, variables=warm)
    ended = job.end(SECONDS)
    assert (ended.state, ended.code) == ("COMPLETED", 0), str(ended)
    assert "Traceback" not in ended.text, str(ended)
    for rank, node in enumerate(("n0", "n0", "n1", "n1")):
        assert f"env {rank} on {node}: 160 steps" in ended.text, str(ended)
    assert "server 0 served 80 requests" in ended.text, str(ended)
    assert wait_until(lambda: not any(map(alive, job.processes())), 60.0)


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
