"""Rows that go from GPU to GPU, each direction of a pair over an NCCL communicator of its own."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import Store

from meshinfer.inference.distributed.nccl_channel import (
    NcclChannel,
    built,
    cuda_memory,
)

__all__ = ["NcclRows"]

_SHARES_A_GPU: Final = (2, 30)
"""The first NCCL that lets two ranks have one GPU, when it is told to."""
_SHARING: Final = "NCCL_MULTI_RANK_GPU_ENABLE"
_MOST_CTAS: Final = 32
_QUEUES: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
_FEWEST_QUEUES: Final = 8
"""CUDA's own default. With fewer, both directions of a client may share a hardware queue, and wait for each other."""


class NcclRows:
    """The :class:`~meshinfer.inference.distributed.plane.RowBackend` of ``backend="nccl"``. Picklable.

    Args:
        device: a CUDA device, or its index. ``None`` for the current one of the thread that first asks for
            :attr:`device`: each thread has its own, and a new one begins with the first GPU.
        ctas: thread blocks, and with them sets of buffers, that a communicator has at most, 1 to 32; the same at both
            sides. NCCL takes a power of two, 2 of 3. See ``docs/nccl.md``.
    """

    name = "nccl"

    def __init__(self, device: torch.device | str | int | None = None, *, ctas: int = 4) -> None:
        if isinstance(ctas, bool) or not isinstance(ctas, int):
            raise TypeError(f"ctas={ctas!r}: expected an int")
        if not 1 <= ctas <= _MOST_CTAS:
            raise ValueError(f"ctas={ctas}: expected 1 to {_MOST_CTAS}")
        self._asked = _index_of(device)
        self._ctas = ctas
        self._here: tuple[int, int] | None = None

    def __reduce__(self) -> tuple[Callable[..., NcclRows], tuple[int | None, int]]:
        return _again, (self._asked, self._ctas)

    def __repr__(self) -> str:
        return f"NcclRows(device={self._asked}, ctas={self._ctas})"

    @property
    def device(self) -> torch.device:
        """See :class:`~meshinfer.inference.distributed.plane.RowBackend`."""
        return cuda_memory(self._index)

    @property
    def _index(self) -> int:
        if self._here is None or self._here[0] != os.getpid():
            self._here = os.getpid(), _available(self._asked)
        return self._here[1]

    def describe(self) -> dict[str, Any]:
        """See :class:`~meshinfer.inference.distributed.plane.RowBackend`."""
        from torch.distributed import ProcessGroupNCCL

        properties = torch.cuda.get_device_properties(self._index)
        groups: Any = ProcessGroupNCCL
        return {
            "device": self._index,
            "gpu": str(properties.uuid),
            "gpu_name": properties.name,
            "slot": _slot_of(properties),
            "nccl": list(groups.get_runtime_nccl_version()),  # the one that is loaded
            "torch": torch.__version__,
            "shares_gpu": os.environ.get(_SHARING, "").strip() not in ("", "0"),
            "ctas": self._ctas,
            "host": socket.gethostname(),
        }

    def objection(self, theirs: Mapping[str, Any]) -> str | None:
        """See :class:`~meshinfer.inference.distributed.plane.RowBackend`."""
        ours = self.describe()
        there, here = _dotted(theirs.get("nccl", ())), _dotted(ours["nccl"])
        if there != here:
            return (
                f"NCCL {there} at the client and {here} at the server, which NCCL does not let meet; "
                "install the same torch, or the same nvidia-nccl, on both sides"
            )
        if theirs.get("ctas") != ours["ctas"]:
            return (
                f"ctas={theirs.get('ctas')} at the client and {ours['ctas']} at the server; "
                "give NcclRows the same at both"
            )
        return _objection_to_sharing(ours, theirs) if _share_a_gpu(ours, theirs) else None

    def new_row(self, nbytes: int) -> Tensor:
        """See :class:`~meshinfer.inference.distributed.plane.RowBackend`."""
        with torch.inference_mode(False):
            return torch.zeros(nbytes, dtype=torch.uint8, device=self.device)

    def channel(self, store: Store, rank: int, *, sends: bool, timeout: float) -> NcclChannel:
        """See :class:`~meshinfer.inference.distributed.plane.RowBackend`.

        NCCL cannot be stopped while it waits for the other side to connect. If that side dies just then, a thread that
        waits stays behind until the process ends, and a socket or two.
        """
        return built(self._index, self._ctas, store, rank, sends=sends, timeout=timeout)


def _again(device: int | None, ctas: int) -> NcclRows:
    return NcclRows(device, ctas=ctas)


def _index_of(device: torch.device | str | int | None) -> int | None:
    if device is None:
        return None
    if isinstance(device, int) and not isinstance(device, bool):
        if device < 0:
            raise ValueError(f"device={device}: expected the index of a CUDA device")
        return device
    if not isinstance(device, str | torch.device):
        raise TypeError(f"device={device!r}: expected a CUDA device or its index")
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ValueError(
            f"device={device!r}: expected a CUDA device, such as 'cuda:0', or its index"
        ) from error
    if found.type != "cuda":
        raise ValueError(f"device={str(device)!r}: NCCL needs a CUDA device; or use backend='gloo'")
    return found.index


def _available(asked: int | None) -> int:
    """The index of the CUDA device of this process that was asked for."""
    if not torch.distributed.is_nccl_available():
        raise ValueError(
            f"backend='nccl': torch {torch.__version__} has no NCCL; install a CUDA build of torch, "
            "or use backend='gloo'"
        )
    count = torch.cuda.device_count()
    if count == 0:
        raise ValueError(
            "backend='nccl': this process sees no CUDA device; look at CUDA_VISIBLE_DEVICES, "
            "or use backend='gloo'"
        )
    _check_environment()
    if asked is None:
        return torch.cuda.current_device()
    if asked >= count:
        raise ValueError(
            f"device={asked}: this process has {count} CUDA devices, numbered from 0; where each rank sees one GPU "
            "(CUDA_VISIBLE_DEVICES), it is 0"
        )
    return asked


def _check_environment() -> None:
    """:class:`ValueError` for what makes NCCL hang instead of failing."""
    address, queues = os.environ.get("NCCL_COMM_ID"), os.environ.get(_QUEUES, "")
    if address:
        raise ValueError(
            f"backend='nccl': with NCCL_COMM_ID={address!r} all communicators of this process meet at one address; "
            "unset it"
        )
    if queues.isdecimal() and 0 < int(queues) < _FEWEST_QUEUES:
        raise ValueError(
            f"backend='nccl': {_QUEUES}={queues}: in so few queues, rows of both directions and your own collectives "
            f"would wait for each other; unset it before CUDA is used, or set it to {_FEWEST_QUEUES} to 32"
        )


def _dotted(version: Sequence[object]) -> str:
    return ".".join(str(part) for part in version) or "of an unknown version"


def _slot_of(properties: Any) -> str | None:
    """Where the GPU is, as far as that can be told: of which running system, and at which place on its bus."""
    parts = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in parts or not any(parts):
        return None
    try:
        system = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return f"{system}/{':'.join(map(str, parts))}"


def _share_a_gpu(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    """Slices of one GPU (MIG) have ids of their own, but NCCL looks at the place on the bus."""
    if ours["gpu"] == theirs.get("gpu"):
        return True
    return ours["slot"] is not None and ours["slot"] == theirs.get("slot")


def _objection_to_sharing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    slices = "" if ours["gpu"] == theirs.get("gpu") else "slices of "
    same = f"client and server have {slices}one GPU ({ours['gpu_name']}, {ours['gpu']}, on {ours['host']})"
    remedy = "give them different device=, or use backend='gloo'"
    if tuple(ours["nccl"]) < _SHARES_A_GPU:
        return f"{same}, which NCCL {_dotted(ours['nccl'])} does not allow, and 2.30 does; {remedy}"
    said = {"client": theirs, "server": ours}
    missing = [who for who, what in said.items() if not what.get("shares_gpu")]
    if not missing:
        return None
    where = " and the ".join(missing)
    return (
        f"{same}; {remedy}, or set {_SHARING}=1 in the environment of both "
        f"(it is missing at the {where})"
    )
