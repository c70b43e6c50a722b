"""TorchRL's own virtual environment, so that its pins never meet those of meshinfer."""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

REQUIREMENTS = ("torch==2.13.0", "torchrl==0.14.1")
# What both sides of a comparison between actors stand on, or of one between collectors, in our own version.
LAUNCHERS, ENVIRONMENTS = ("ray", "torchmonarch"), ("gymnasium",)
_INSTALL_SECONDS = 1800
_CHECK_SECONDS = 60
_VERSIONS = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
def find(package):
    try:
        return version(package)
    except PackageNotFoundError:
        return None
print(json.dumps({package: find(package) for package in sys.argv[1:]}))
"""
_MONARCH = """
from importlib.metadata import version
from torchrl.modules.inference_server import MonarchTransport
try:
    MonarchTransport()
    said = "was made"
except Exception as exc:
    said = f"raised {type(exc).__name__}: {exc} ({exc.__context__})"
print(f"MonarchTransport() of TorchRL {version('torchrl')} with torchmonarch {version('torchmonarch')} {said}")
"""
_LOGGER = logging.getLogger("benchmarks.torchrl_env")


class EnvironmentFailed(RuntimeError):
    """TorchRL's environment could not be made or is not usable; the message says why."""


def ensure(python: Path, shared: Sequence[str] = ()) -> None:
    """Make sure that `python` has TorchRL and what is `shared`, creating its environment if it does not exist."""
    if not python.exists():
        _create(python)
    command = [str(python), "-c", _VERSIONS, "torchrl", *shared]
    found = json.loads(_run(command, _CHECK_SECONDS, "is broken; delete it and run again"))
    if found.pop("torchrl") is None:
        raise EnvironmentFailed("TorchRL's environment has no TorchRL; delete it and run again")
    ours = {name: version(name) for name in shared}
    if found != ours:
        raise EnvironmentFailed(
            f"TorchRL's environment has {_listed(found)}, and this one {_listed(ours)}; delete it and run again"
        )


def try_monarch(python: Path) -> str:
    """What comes of TorchRL's own transport for monarch, in a line; `python` has TorchRL and monarch."""
    said = _run([str(python), "-c", _MONARCH], _CHECK_SECONDS, "could not try monarch")
    return " ".join(said.split())


def _create(python: Path) -> None:
    if python.parent.name != "bin" or python.parent.parent.exists():
        raise EnvironmentFailed(f"{python} is missing and its folder is no place for a new one")
    folder, requirements = (
        python.parent.parent,
        (*REQUIREMENTS, *_pinned((*LAUNCHERS, *ENVIRONMENTS))),
    )
    _LOGGER.info("creating %s with %s", folder, " ".join(requirements))
    try:
        _run([sys.executable, "-m", "venv", str(folder)], _INSTALL_SECONDS, "was not created")
        # Linters and git that look at the whole tree then leave it alone.
        (folder / ".gitignore").write_text("*\n")
        install = [str(python), "-m", "pip", "install", "--quiet", *requirements]
        _run(install, _INSTALL_SECONDS, "could not be filled")
    except BaseException:
        # Half an environment would be taken for a whole one by the next run.
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _pinned(packages: Sequence[str]) -> list[str]:
    """Those of them that this interpreter has, in its versions."""
    pins = []
    for package in packages:
        try:
            pins.append(f"{package}=={version(package)}")
        except PackageNotFoundError:
            _LOGGER.info("%s is not installed here, so TorchRL's environment goes without", package)
    return pins


def _listed(versions: Mapping[str, str | None]) -> str:
    return ", ".join(f"{name} {found or '(none)'}" for name, found in versions.items())


def _run(command: list[str], seconds: int, problem: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds)
    except (subprocess.TimeoutExpired, OSError) as exc:
        raise EnvironmentFailed(f"TorchRL's environment {problem}: {exc}") from exc
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise EnvironmentFailed(f"TorchRL's environment {problem}: {last}")
    return done.stdout
