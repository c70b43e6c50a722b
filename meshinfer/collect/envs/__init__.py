"""Environments as the collector steps them, and what turns those of Gymnasium and TorchRL into such."""

from __future__ import annotations

from meshinfer.collect.envs.protocol import Environment, StepResult
from meshinfer.collect.envs.recognise import as_environment
from meshinfer.collect.envs.rows import ObservationRows

__all__ = ["Environment", "ObservationRows", "StepResult", "as_environment"]
