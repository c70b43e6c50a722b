"""Versions, packages, accelerators and the scheduler's tools."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import warnings
from importlib import metadata
from pathlib import Path
from typing import Any

import tensordict
import torch
from torch.torch_version import TorchVersion

import meshinfer
from meshinfer.doctor.context import Context
from meshinfer.doctor.findings import Finding, info, ok, warn

__all__ = ["gpus", "packages", "slurm_tools", "versions"]

_OTHERS = ("torchmonarch", "ray", "gymnasium", "torchrl", "numpy", "psutil")
_EXTRAS = {"ray": "pip install 'meshinfer[ray]' for Ray actors"}
_SLURM_TOOLS = ("srun", "sbatch", "scontrol", "scancel")
_TOOL_SECONDS = 5.0


def versions(_: Context) -> Finding:
    """Of this library, Python, torch and what lies below."""
    found = {
        "meshinfer": meshinfer.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "tensordict": str(tensordict.__version__),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()).strip() or "unknown",
        "machine": platform.machine(),
    }
    build = "CPU only" if torch.version.cuda is None else f"CUDA {torch.version.cuda}"
    text = ", ".join(f"{name} {version}" for name, version in found.items() if name != "machine")
    text = f"{text}, {found['machine']}; torch is built for {build}; {sys.executable}"
    old = [*_too_old({"torch": found["torch"], "tensordict": found["tensordict"]})]
    if old:
        return warn(f"{text}; {', '.join(old)}", "install meshinfer again with pip", **found)
    return ok(text, torch_build=build, executable=sys.executable, **found)


def _too_old(installed: dict[str, str]) -> list[str]:
    """What is older than this package says that it needs; nothing where it is run without being installed."""
    try:
        needed = metadata.requires("meshinfer") or []
    except metadata.PackageNotFoundError:
        needed = []
    pairs = (re.match(r"([\w-]+)>=([\d.]+)$", requirement) for requirement in needed)
    return [
        f"{pair[1]} {installed[pair[1]]} is older than {pair[2]}"
        for pair in pairs
        if pair and pair[1] in installed and TorchVersion(installed[pair[1]]) < pair[2]
    ]


def packages(_: Context) -> Finding:
    """What else of the field is installed."""
    found = {name: _version_of(name) for name in _OTHERS}
    text = ", ".join(f"{name} {version or 'not installed'}" for name, version in found.items())
    if found["torchmonarch"] is None:
        return warn(text, "pip install torchmonarch, which monarch meshes need", **found)
    hints = [hint for name, hint in _EXTRAS.items() if found[name] is None]
    return info("; ".join((text, *hints)), **found)


def _version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def gpus(_: Context) -> Finding:
    """Names, memory, driver, NCCL; a driver without a torch that uses it."""
    driver = _driver()
    with warnings.catch_warnings(record=True) as raised:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        if driver is None:
            return info("none", count=0)
        reason = str(raised[0].message).splitlines()[0] if raised else "no device is visible"
        if torch.version.cuda is None:
            reason = "torch is built for CPUs only"
        return warn(
            f"driver {driver}, but torch sees no GPU: {reason}",
            "install a torch build for CUDA, and look at CUDA_VISIBLE_DEVICES and the scheduler's --gres or --gpus",
            count=0,
            driver=driver,
        )
    try:
        devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        return warn(
            f"driver {driver}, but torch cannot use a GPU: {reason}",
            "try nvidia-smi",
            driver=driver,
        )
    names = [f"{d.name} ({d.total_memory / 2**30:.0f} GiB)" for d in devices]
    nccl = _nccl()
    text = f"{len(names)}: {', '.join(names)}; driver {driver or 'unknown'}, NCCL {nccl or 'none'}"
    return ok(text, count=len(names), names=names, driver=driver, nccl=nccl)


def _driver() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:  # no such driver
        return None
    found = re.search(r"\b(\d+\.\d+(\.\d+)?)\b", text)
    return found[1] if found else None


def _nccl() -> str | None:
    if not torch.distributed.is_nccl_available():
        return None
    nccl: Any = torch.cuda.nccl
    return ".".join(map(str, nccl.version()))


def slurm_tools(_: Context) -> Finding:
    """Which of SLURM's programs are on the path."""
    paths = {name: shutil.which(name) for name in _SLURM_TOOLS}
    there = [name for name, path in paths.items() if path is not None]
    if not there:
        return info("none", **paths)
    version = _tool_version(there[0])
    missing = [name for name in _SLURM_TOOLS if name not in there]
    text = f"{version}: {', '.join(there)}" + (f"; without {', '.join(missing)}" if missing else "")
    return info(text, version=version, **paths)


def _tool_version(tool: str) -> str:
    try:
        done = subprocess.run(
            [tool, "--version"],
            capture_output=True,
            text=True,
            timeout=_TOOL_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return f"{tool} --version failed ({error})"
    text = f"{done.stdout}{done.stderr}".strip()
    found = re.search(r"^slurm\S* \S+", text, re.MULTILINE)
    return (
        found[0]
        if found
        else f"{tool} does not work: {text.splitlines()[0] if text else 'no output'}"
    )
