"""What a user may give as ``DistributedTransport(backend=)``."""

from __future__ import annotations

import torch

from meshinfer.inference.distributed.nccl import NcclRows
from meshinfer.inference.distributed.plane import RowBackend

__all__ = ["row_backend"]

_METHODS = ("describe", "objection", "new_row", "channel")
_MOST_ANNOUNCED = 2
"""Rows of one client that its server has place for: more would wait in the GPU, where nothing should wait for long."""


def row_backend(
    backend: str | RowBackend, *, device: torch.device | str | int | None, window: int
) -> RowBackend | None:
    """What a user asked for; ``None`` for rows in their frames.

    Raises:
        ValueError, TypeError: there is no such backend, here or at all; says which argument is to blame.
    """
    if isinstance(backend, str):
        rows = _named(backend, device)
    elif isinstance(backend, type):
        name = backend.__name__
        raise TypeError(f"backend={name}: a class; give an instance, {name}(...)")
    elif not all(callable(getattr(backend, name, None)) for name in _METHODS):
        raise TypeError(
            f"backend={backend!r}: expected 'gloo', 'nccl' or a RowBackend such as NcclRows(device=0)"
        )
    elif device is not None:
        raise ValueError(
            f"device={str(device)!r}: a ready backend has its own; give it there, as in NcclRows(device=0)"
        )
    else:
        rows = backend
    if rows is not None and window > _MOST_ANNOUNCED:
        raise ValueError(
            f"window={window}: at most {_MOST_ANNOUNCED} over {rows.name!r}, since a server has no place for more"
        )
    return rows


def _named(backend: str, device: torch.device | str | int | None) -> RowBackend | None:
    if backend == "nccl":
        return NcclRows(device)
    if backend != "gloo":
        raise ValueError(f"backend={backend!r}: expected 'gloo' or 'nccl'")
    if device is not None and str(device) != "cpu":
        raise ValueError(
            f"device={str(device)!r}: over gloo, payloads are in CPU memory; give backend='nccl' too, or leave "
            "device= out"
        )
    return None
