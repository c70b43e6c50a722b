"""The tests that need a GPU, as one part: `pytest -m gpu tests/gpu`."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Mapping

from ..contestant import REPOSITORY
from .part import Impossible, Part

_NO_TESTS = 5
_PLUGINS = ("pytest_timeout", "xdist.plugin")
_LINES = 20
_COUNT = re.compile(r"(\d+) (passed|failed|skipped|errors?|deselected|xfailed)")


def run(part: Part) -> None:
    """Run them and tell what the summary says."""
    if importlib.util.find_spec("pytest") is None:
        raise Impossible("pytest is not installed; pip install pytest")
    if not (REPOSITORY / "tests" / "gpu").is_dir():
        raise Impossible("there is no folder tests/gpu here")
    options = ["-m", "gpu", "-v", "-rsfE", "--no-header", "--tb=short", "-p", "no:cacheprovider"]
    environment = dict(os.environ)
    if all(importlib.util.find_spec(name.partition(".")[0]) for name in _PLUGINS):
        # A machine may have many others.
        environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
        options += [word for plugin in _PLUGINS for word in ("-p", plugin)]
    status, lines = _printed([sys.executable, "-m", "pytest", "tests/gpu", *options], environment)
    if status == _NO_TESTS:
        raise Impossible("tests/gpu has no test that runs here")
    part.row(summary=lines[-1].strip("= ") if lines else "nothing printed", **counts(lines[-1:]))
    for line in lines[-_LINES:-1]:
        if line.startswith(("FAILED", "ERROR")) or (part.on_gpu and line.startswith("SKIPPED")):
            part.note(line)
    if status:
        part.wrong(f"pytest ended with {status}")


def _printed(command: list[str], environment: Mapping[str, str]) -> tuple[int, list[str]]:
    """Exit status and lines of a command, printed as they come: at the deadline, they tell which test was running."""
    found = ""
    with subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as process:
        assert process.stdout is not None
        while piece := os.read(process.stdout.fileno(), 1 << 16):
            text = piece.decode(errors="replace")
            print(text, end="", flush=True)
            found += text
    return process.returncode, found.strip().splitlines()


def counts(lines: list[str]) -> dict[str, int]:
    """The numbers of pytest's last line, by what they count."""
    return {what: int(number) for line in lines for number, what in _COUNT.findall(line)}
