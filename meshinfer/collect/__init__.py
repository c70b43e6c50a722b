"""Collecting transitions: environments that step, a policy that serves them, and batches to iterate."""

from __future__ import annotations

from meshinfer.collect.collector import AsyncBatchedCollector, CollectorStats
from meshinfer.collect.envs import Environment, StepResult, as_environment

__all__ = [
    "AsyncBatchedCollector",
    "CollectorStats",
    "Environment",
    "StepResult",
    "as_environment",
]
