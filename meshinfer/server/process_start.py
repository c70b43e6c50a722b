"""What is checked before the process of a server is started."""

from __future__ import annotations

import multiprocessing
import pickle
import reprlib
from typing import Any

import torch

__all__ = ["check_may_start", "pickled_factory"]


def pickled_factory(factory: Any) -> bytes:
    """``factory`` for another process; :class:`TypeError` for one that cannot go there."""
    if not callable(factory) or isinstance(factory, torch.nn.Module):
        raise TypeError(
            f"policy_factory: expected a function that returns the policy, found"
            f" {type(factory).__name__}"
        )
    try:
        return pickle.dumps(factory)
    except Exception as error:  # a class may raise anything while it is pickled
        raise TypeError(
            f"policy_factory={reprlib.repr(factory)} cannot be sent to the server's process ({error}); give a"
            " function at the top level of a module, or functools.partial of one"
        ) from error


def check_may_start(context: Any) -> None:
    """Raises :class:`RuntimeError` where a process of this context could not work, or not be started."""
    if context.get_start_method() == "fork" and _cuda_in_use():
        raise RuntimeError(
            "mp_context='fork' cannot be used once CUDA has been initialised in this process; use"
            " 'spawn' or 'forkserver'"
        )
    if multiprocessing.current_process().daemon:
        raise RuntimeError(
            "a daemonic process may not start others: start the server elsewhere, or make this"
            " process with daemon=False"
        )


def _cuda_in_use() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]
