"""What a server adds to a policy of 10 ms, at a batch of 64."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ..policy import make_policy
from .load import VECTORS, Load, serving
from .part import Part

_MILLISECONDS, _ROWS = 10.0, 64
_DRY_MILLISECONDS, _DRY_ROWS = 3.0, 4
_CALIBRATION = 20
_WARM_SECONDS = 0.5


class TimedPolicy(nn.Module):
    """The benchmarks' policy after a wait of the device, with the time that both took, batch by batch."""

    def __init__(self, device: torch.device, milliseconds: float) -> None:
        super().__init__()
        self.compute = make_policy().to(device)
        self._on_gpu = device.type == "cuda"
        self._milliseconds = milliseconds
        self._cycles = _cycles(milliseconds) if self._on_gpu else 0
        self._spans: list[tuple[Any, Any]] = []

    def forward(self, *leaves: torch.Tensor) -> torch.Tensor:
        began = self._now()
        if self._on_gpu:
            torch.cuda._sleep(self._cycles)
        else:
            _burn(self._milliseconds)
        result: torch.Tensor = self.compute(*leaves)
        self._spans.append((began, self._now()))
        return result

    def times(self) -> list[float]:
        """Microseconds of each pass so far; forgets them. The device has done them all."""
        spans, self._spans = self._spans, []
        if self._on_gpu:
            return [1e3 * began.elapsed_time(ended) for began, ended in spans]
        return [1e6 * (ended - began) for began, ended in spans]

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _cycles(milliseconds: float) -> int:
    """What `torch.cuda._sleep` takes for so long, at the clock that a busy GPU has."""
    guess = 1_000_000
    deadline = time.monotonic() + _WARM_SECONDS
    while time.monotonic() < deadline:
        _slept(guess)
    each = sorted(_slept(guess) for _ in range(_CALIBRATION))[_CALIBRATION // 2]
    return round(guess * milliseconds / each)


def _slept(cycles: int) -> float:
    """Milliseconds of one sleep."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    began.record()
    torch.cuda._sleep(cycles)
    ended.record()
    ended.synchronize()
    return float(began.elapsed_time(ended))


def _burn(milliseconds: float) -> None:
    deadline = time.perf_counter() + milliseconds / 1e3
    numbers = torch.ones(64, 64)
    while time.perf_counter() < deadline:
        torch.mm(numbers, numbers)


def run(part: Part) -> None:
    """Each transport, 64 clients of one row; the next requests wait while a batch is served."""
    milliseconds, rows = (_DRY_MILLISECONDS, _DRY_ROWS) if part.dry else (_MILLISECONDS, _ROWS)
    seconds = 0.2 if part.dry else 1.0 if part.quick else 3.0
    policy = TimedPolicy(part.device, milliseconds)
    for transport in part.transports:
        load = Load(transport, VECTORS, rows, processes=2 if part.dry else 8)
        with ExitStack() as stack:
            served = stack.enter_context(serving(load, policy, part.device, share_weights=True))
            served.crew.burst(seconds / 4)
            served.settle()
            policy.times()
            found = served.measure(seconds)
            served.settle()
            times = policy.times()
            forward = sorted(times)[len(times) // 2]
        part.row(
            transport=transport,
            rows=rows,
            forward_us=forward,
            overhead=1 - forward / found["us_per_batch"],
            **found,
        )
