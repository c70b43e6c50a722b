"""CUDA graphs that ``torch.compile`` captures, in the threads that serve."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from typing import Any

import torch

__all__ = ["allow_graphs_here"]

_MODULE = "torch._inductor.cudagraph_trees"
_NAMES = ("tree_manager_containers", "tree_manager_locks")


def allow_graphs_here() -> None:
    """Let the calling thread run a policy of ``torch.compile(mode="reduce-overhead")``, wherever it was compiled.

    torch keeps graphs for each thread. Before 2.13 it makes the places for them only in the thread that has imported
    its module, and fails an assertion in others, such as one that serves what another thread has prepared.
    """
    trees: Any = sys.modules.get(_MODULE)
    if trees is None or hasattr(trees.local, _NAMES[0]) or torch._C._is_key_in_tls(_NAMES[0]):
        return
    places: tuple[Any, ...] = ({}, defaultdict(threading.Lock))
    for name, place in zip(_NAMES, places, strict=True):
        setattr(trees.local, name, place)
        torch._C._stash_obj_in_tls(name, place)
