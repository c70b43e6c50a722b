"""The example that the README shows, as a user runs it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mesh_jobs import ROOT, run, torchrun

EXAMPLE = ROOT / "examples" / "serve_cartpole.py"


@pytest.mark.slow
@pytest.mark.parametrize("envs", [8, 1])
def test_the_main_job(tmp_path: Path, envs: int) -> None:
    pytest.importorskip("gymnasium")
    options = ["--steps=50", *([] if envs == 8 else [f"--envs={envs}"])]
    ended = run(tmp_path, torchrun(3, str(EXAMPLE), *options), cold=envs == 8)
    assert ended.code == 0, str(ended)
    assert "meshinfer" not in ended.stderr, str(ended)
    assert "Traceback" not in ended.stderr, str(ended)
    steps = 50 * envs
    for rank in (1, 2):
        line = rf"^rank {rank}: {steps} steps, \d+ episodes, \d+ steps/s, policy version 0$"
        assert len(re.findall(line, ended.stdout, re.MULTILINE)) == 1, str(ended)
    served = re.search(
        r"^rank 0 served (\d+) requests in batches of (\{.+\})$", ended.stdout, re.MULTILINE
    )
    assert served is not None, str(ended)
    sizes = {int(size): int(n) for size, n in re.findall(r"(\d+): (\d+)", served[2])}
    assert int(served[1]) == 100 == sum(size * n for size, n in sizes.items())
    assert len(ended.stdout.splitlines()) == 3


def test_it_is_short_enough_to_copy() -> None:
    assert len(EXAMPLE.read_text().splitlines()) <= 60
