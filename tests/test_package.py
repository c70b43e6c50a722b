"""The package as it is installed: public names, wheel, and an import that does nothing else."""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import meshinfer

ROOT = Path(__file__).resolve().parents[1]
IN_THE_BUILD = ("pyproject.toml", "README.md", "LICENSE")

REPORT = """
import json, logging, os, sys, threading
root_handlers = list(logging.getLogger().handlers)
import meshinfer
import importlib.metadata, psutil, torch
print(json.dumps({
    "file": meshinfer.__file__,
    "metadata": importlib.metadata.version("meshinfer"),
    "version": meshinfer.__version__,
    "threads": [t.name for t in threading.enumerate()],
    "children": len(psutil.Process().children()),
    "sockets": len(psutil.Process().net_connections("inet")),
    "root_handlers_unchanged": logging.getLogger().handlers == root_handlers,
    "handlers": [type(h).__name__ for h in logging.getLogger("meshinfer").handlers],
    "propagates": logging.getLogger("meshinfer").propagate,
    "group": torch.distributed.is_initialized(),
    "cuda": torch.cuda.is_initialized(),
    "files": os.listdir(),
}))
"""


def documentable(value: object) -> bool:
    return inspect.isroutine(value) or inspect.isclass(value)


def run(*command: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **environment}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a copy: a build in the checkout would leave its files there."""
    source = tmp_path_factory.mktemp("source with a space")
    shutil.copytree(
        ROOT / "meshinfer", source / "meshinfer", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in IN_THE_BUILD:
        shutil.copy(ROOT / name, source)
    (source / "tests").mkdir()
    (source / "tests" / "__init__.py").touch()
    dist = tmp_path_factory.mktemp("dist")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(dist), ".", cwd=source)
    (built,) = dist.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def imported(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a new interpreter in an empty folder reports after it has imported the built wheel."""
    target = tmp_path_factory.mktemp("target")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    empty = tmp_path_factory.mktemp("empty")
    output = run(sys.executable, "-W", "error", "-c", REPORT, cwd=empty, PYTHONPATH=str(target))
    report = json.loads(output)
    assert Path(report["file"]).is_relative_to(target)
    return report


def test_the_wheel_holds_the_package_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    info = f"meshinfer-{meshinfer.__version__}.dist-info"
    assert {name.split("/")[0] for name in names} == {"meshinfer", info}
    assert "meshinfer/py.typed" in names
    assert any(name.startswith(info) and name.endswith("LICENSE") for name in names)


def test_every_module_is_in_the_wheel(wheel: Path) -> None:
    modules = {str(p.relative_to(ROOT)) for p in (ROOT / "meshinfer").rglob("*.py")}
    assert modules <= set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_has_one_version(imported: dict[str, Any]) -> None:
    assert imported["version"] == imported["metadata"] == meshinfer.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", meshinfer.__version__)


def test_an_import_starts_nothing(imported: dict[str, Any]) -> None:
    assert imported["threads"] == ["MainThread"]
    assert imported["children"] == 0
    assert imported["sockets"] == 0
    assert imported["files"] == []


def test_an_import_leaves_logging_to_the_user(imported: dict[str, Any]) -> None:
    assert imported["root_handlers_unchanged"]
    assert imported["handlers"] == ["NullHandler"]
    assert imported["propagates"]


def test_an_import_leaves_torch_as_it_was(imported: dict[str, Any]) -> None:
    assert not imported["group"]
    assert not imported["cuda"]


def test_public_names_are_listed_once() -> None:
    assert len(meshinfer.__all__) == len(set(meshinfer.__all__))


@pytest.mark.parametrize("name", meshinfer.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(meshinfer, name) is not None


@pytest.mark.parametrize(
    "value", [*filter(documentable, map(vars(meshinfer).get, meshinfer.__all__))]
)
def test_every_public_function_and_class_is_documented(value: Any) -> None:
    assert value.__doc__
    assert not value.__doc__.startswith(f"{value.__name__}(")  # what a dataclass writes by itself


def test_nothing_public_is_left_out_of_all() -> None:
    public = {
        name
        for name, value in vars(meshinfer).items()
        if getattr(value, "__module__", "").startswith("meshinfer.") and not name.startswith("_")
    }
    assert public <= set(meshinfer.__all__)
