"""Places for CUDA graphs in threads that torch has made none for; a module stands in for torch's."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from meshinfer.server.graphs import allow_graphs_here

NAME = "torch._inductor.cudagraph_trees"


@pytest.fixture
def trees(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module: Any = ModuleType(NAME)
    module.local = threading.local()
    monkeypatch.setitem(sys.modules, NAME, module)
    return module


def in_a_thread(act: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(act()))
    thread.start()
    thread.join()
    return found[0]


def test_a_thread_gets_places_once(trees: Any) -> None:
    def act() -> bool:
        allow_graphs_here()
        places = trees.local.tree_manager_containers, trees.local.tree_manager_locks
        with places[1][0]:
            allow_graphs_here()
        return places[0] is trees.local.tree_manager_containers

    assert in_a_thread(act)


def test_each_thread_has_its_own(trees: Any) -> None:
    def act() -> Any:
        allow_graphs_here()
        return trees.local.tree_manager_containers

    assert in_a_thread(act) is not in_a_thread(act)


def test_torch_is_given_nothing_that_it_would_free_when_the_thread_ends(trees: Any) -> None:
    def act() -> bool:
        allow_graphs_here()
        return torch._C._is_key_in_tls("tree_manager_containers")

    assert not in_a_thread(act)


def test_nothing_is_imported_for_a_policy_that_is_not_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    in_a_thread(allow_graphs_here)
    assert NAME not in sys.modules
