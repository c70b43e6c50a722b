"""A static batch on the GPU: a policy as it is, compiled with CUDA graphs, and captured by hand."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ..policy import FirstFourMLP, make_policy
from .load import VECTORS, Load, serving
from .part import Part

_SIZE, _PADDED = 64, 40
_DRY_SIZE, _DRY_PADDED = 4, 2
_WIDTH, _DEPTH = 256, 8
_WARM_UP_PASSES = 3


class Deep(FirstFourMLP):
    """The benchmarks' policy beside layers that cost launches and change nothing."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(64, _WIDTH), nn.Tanh()]
        for _ in range(_DEPTH):
            layers += [nn.Linear(_WIDTH, _WIDTH), nn.Tanh()]
        self.depth = nn.Sequential(*layers, nn.Linear(_WIDTH, 2))

    def forward(self, first: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return super().forward(first) + 0.0 * self.depth(first)


class Captured(nn.Module):
    """One CUDA graph of a module, captured with its first batch; the others must have that shape."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self._graph: torch.cuda.CUDAGraph | None = None
        self._input = self._output = torch.empty(0)

    def forward(self, first: torch.Tensor) -> torch.Tensor:
        if self._graph is None:
            self._capture(first)
        assert self._graph is not None
        self._input.copy_(first)
        self._graph.replay()
        return self._output

    def _capture(self, first: torch.Tensor) -> None:
        self._input = first.clone()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP_PASSES):
                self.module(self._input)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        # Other threads may allocate meanwhile.
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            self._output = self.module(self._input)
        self._graph = graph


def run(part: Part) -> None:
    """Each policy with full batches and with padded ones; every reply is compared with the policy's own answer."""
    size, padded = (_DRY_SIZE, _DRY_PADDED) if part.dry else (_SIZE, _PADDED)
    for name, make in _policies(part).items():
        _measure(part, name, make, (size, padded))


def _measure(part: Part, name: str, make: Callable[[], nn.Module], sizes: Sequence[int]) -> None:
    try:
        policy = make()
        for rows in sizes:
            part.row(policy=name, size=sizes[0], **_measured(part, policy, sizes[0], rows))
    except Exception as exc:  # the others are worth having
        traceback.print_exc()
        part.wrong(f"{name}: {type(exc).__name__}: {exc}")


def _policies(part: Part) -> dict[str, Callable[[], nn.Module]]:
    def deep() -> nn.Module:
        return make_policy(Deep).to(part.device)

    if part.dry:
        return {
            "eager": deep,
            "compiled (eager backend)": lambda: _compiled(deep(), backend="eager"),
        }
    return {
        "eager": deep,
        "captured by hand": lambda: Captured(deep()),
        "compiled, CUDA graphs": lambda: _compiled(deep(), mode="reduce-overhead"),
    }


def _compiled(module: nn.Module, **how: Any) -> nn.Module:
    compiled: Any = torch.compile(module, **how)
    return compiled


def _measured(part: Part, policy: nn.Module, size: int, rows: int) -> dict[str, Any]:
    seconds = 0.15 if part.dry else 0.5 if part.quick else 1.5
    load = Load("shared_memory", VECTORS, rows, processes=2 if part.dry else 8)
    began = time.monotonic()
    with ExitStack() as stack:
        served = stack.enter_context(
            serving(
                load,
                policy,
                part.device,
                share_weights=True,
                static_batch_size=size,
                prepared=True,
            )
        )
        ready = time.monotonic() - began
        served.crew.burst(seconds / 3)
        return {"rows": rows, "ready_s": ready, **served.measure(seconds)}
