"""The tests that need a GPU, as one part: `pytest -m gpu tests/gpu`."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys

from ..contestant import REPOSITORY
from .part import Impossible, Part

_NO_TESTS = 5
_LINES = 20
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?|deselected|xfailed)")


def run(part: Part) -> None:
    """Run them and tell what the summary says."""
    if importlib.util.find_spec("pytest") is None:
        raise Impossible("pytest is not installed; pip install pytest")
    if not (REPOSITORY / "tests" / "gpu").is_dir():
        raise Impossible("there is no folder tests/gpu here")
    options = ["-m", "gpu", "-q", "-rsfE", "--no-header", "--tb=short", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/gpu", *options],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(done.stdout, flush=True)
    lines = done.stdout.strip().splitlines()
    if done.returncode == _NO_TESTS:
        raise Impossible("tests/gpu has no test that runs here")
    part.row(summary=lines[-1].strip("= ") if lines else "nothing printed", **counts(lines[-1:]))
    for line in lines[-_LINES:-1]:
        if line.startswith(("FAILED", "ERROR")) or (part.on_gpu and line.startswith("SKIPPED")):
            part.note(line)
    if done.returncode:
        part.wrong(f"pytest ended with {done.returncode}")


def counts(lines: list[str]) -> dict[str, int]:
    """The numbers of pytest's last line, by what they count."""
    return {what: int(number) for line in lines for number, what in _COUNT.findall(line)}
