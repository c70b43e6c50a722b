"""CUDA graphs that ``torch.compile`` captures, in the threads that serve."""

from __future__ import annotations

import sys
import threading
from collections import defaultdict
from typing import Any

__all__ = ["allow_graphs_here"]

_MODULE = "torch._inductor.cudagraph_trees"


def allow_graphs_here() -> None:
    """Let the calling thread run a policy of ``torch.compile(mode="reduce-overhead")``, wherever it was compiled.

    torch keeps graphs for each thread. Before 2.13 it makes the places for them only in the thread that has imported
    its module, and fails an assertion in others, such as one that serves what another thread has prepared.
    """
    trees: Any = sys.modules.get(_MODULE)
    if trees is None or hasattr(trees.local, "tree_manager_containers"):
        return
    # Not in torch's own store for threads as well, which only autograd's threads look at: torch 2.11 takes no reference
    # to what it keeps there, and gives one back when the thread ends.
    trees.local.tree_manager_containers = {}
    trees.local.tree_manager_locks = defaultdict(threading.Lock)
