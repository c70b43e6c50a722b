"""What the numbers of a run were made with."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import runpy
import subprocess
from pathlib import Path
from typing import Any

from ..contestant import REPOSITORY
from .part import Part

MULTI_RANK = (2, 30)
"""The first NCCL that lets two ranks share one GPU, when `NCCL_MULTI_RANK_GPU_ENABLE` is 1."""


def run(part: Part) -> None:
    """One row: python, packages, CUDA, driver, NCCL, GPUs, cores."""
    import torch

    row: dict[str, Any] = {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("tensordict", "meshinfer", "torchmonarch", "triton", "pytest"):
        row[package] = _version(package)
    row["cores"] = len(os.sched_getaffinity(0))
    row["cuda"] = torch.version.cuda
    row["gpus"] = torch.cuda.device_count()
    row["nccl_build"] = _dotted(nccl_build())
    row["nccl_runtime"] = _dotted(nccl_runtime())
    row["nccl_preloaded"] = _is_preloaded()
    row["two_ranks_on_one_gpu"] = os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1"
    if row["gpus"]:
        properties = torch.cuda.get_device_properties(0)
        row["gpu"] = properties.name
        row["uuid"] = str(getattr(properties, "uuid", "unknown"))
        row["gpu_mib"] = properties.total_memory >> 20
        row["capability"] = f"{properties.major}.{properties.minor}"
        row["driver"] = _driver()
    part.row(**row)


def nccl_build() -> tuple[int, ...] | None:
    """The NCCL whose headers torch was built with; `None` for a torch without NCCL."""
    import torch

    if not torch.distributed.is_nccl_available():
        return None
    return tuple(part for part in torch.cuda.nccl.version() if isinstance(part, int))


def nccl_runtime() -> tuple[int, ...] | None:
    """The NCCL that is loaded in this process, which need not be the one that torch was built with."""
    import torch

    if not torch.distributed.is_nccl_available():
        return None
    return tuple(torch.distributed.ProcessGroupNCCL.get_runtime_nccl_version())


def _is_preloaded() -> bool:
    """Whether what `gpu.py` unpacked is in this process; the linker only warns of a library that it cannot use."""
    library = os.environ.get("LD_PRELOAD")
    return bool(library) and library in Path("/proc/self/maps").read_text()


def _dotted(version: tuple[int, ...] | None) -> str | None:
    return None if version is None else ".".join(map(str, version))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        if package != "meshinfer":
            return None
        return f"{_source_version()}, source tree"


def _source_version() -> str:
    """Without importing the package, which takes a second."""
    return str(runpy.run_path(str(REPOSITORY / "meshinfer" / "_version.py"))["__version__"])


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.split("\n")[0].strip()
