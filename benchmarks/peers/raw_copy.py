"""The floor of an update: a copy of the same tensors within one process, over and over."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ..workload import Workload
from . import Connector, Trainer

NAME = "raw_copy"
PACKAGES = ("torch",)
MODULES = ("benchmarks.policy",)


def open_service(workload: Workload, transport: str) -> CopyService:
    return CopyService(workload)


class CopyService:
    """No server."""

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def connectors(self) -> Sequence[Connector]:
        import torch

        from ..policy import make_policy, with_ballast

        source, target = ([*with_ballast(make_policy(), self._workload).parameters()] for _ in "12")

        def copy() -> None:
            with torch.no_grad():
                for here, there in zip(source, target, strict=True):
                    there.copy_(here)

        return [Trainer(copy)]

    def start(self) -> int:
        return os.getpid()

    def stop(self) -> None:
        """Nothing is left."""
