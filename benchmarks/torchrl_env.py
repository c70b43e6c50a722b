"""TorchRL's own virtual environment, so that its pins never meet those of meshinfer."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = ("torch==2.13.0", "torchrl==0.14.1")
_INSTALL_SECONDS = 1800
_CHECK_SECONDS = 60
_CHECK = "from importlib.metadata import version as v; print(v('torchrl'), v('torch'))"
_LOGGER = logging.getLogger("benchmarks.torchrl_env")


class EnvironmentFailed(RuntimeError):
    """TorchRL's environment could not be made or is not usable; the message says why."""


def ensure(python: Path) -> None:
    """Make sure that `python` has TorchRL, creating its environment if it does not exist."""
    if not python.exists():
        _create(python)
    _run([str(python), "-c", _CHECK], _CHECK_SECONDS, "has no TorchRL; delete it and run again")


def _create(python: Path) -> None:
    if python.parent.name != "bin" or python.parent.parent.exists():
        raise EnvironmentFailed(f"{python} is missing and its folder is no place for a new one")
    folder = python.parent.parent
    _LOGGER.info("creating %s with %s", folder, " ".join(REQUIREMENTS))
    try:
        _run([sys.executable, "-m", "venv", str(folder)], _INSTALL_SECONDS, "was not created")
        # Linters and git that look at the whole tree then leave it alone.
        (folder / ".gitignore").write_text("*\n")
        install = [str(python), "-m", "pip", "install", "--quiet", *REQUIREMENTS]
        _run(install, _INSTALL_SECONDS, "could not be filled")
    except BaseException:
        # Half an environment would be taken for a whole one by the next run.
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _run(command: list[str], seconds: int, problem: str) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except (subprocess.TimeoutExpired, OSError) as exc:
        raise EnvironmentFailed(f"TorchRL's environment {problem}: {exc}") from exc
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise EnvironmentFailed(f"TorchRL's environment {problem}: {last}")
