"""Batches of transitions out of rows that workers have filled: whole rows are copied, then taken apart leaf by leaf."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from meshinfer.collect.keys import keys_of
from meshinfer.collect.specs import STEPPED, VERSION, CollectionPlan
from meshinfer.layout import RowViews

__all__ = ["BatchAssembler"]


class BatchAssembler:
    """Stages rows until they are enough for a batch.

    Rows of one environment stay in the order of time. What a batch has no room for (some rows of a vector's step)
    begins the next one.

    Args:
        plan: of the collection.
        steps: to make room for at first.
    """

    def __init__(self, plan: CollectionPlan, steps: int) -> None:
        self._plan = plan
        self._keys = keys_of(plan.transition)
        self._stepped = self._keys.index(STEPPED)
        self._count = 0
        self._frames = 0
        self._skip = 0
        self._rows: Tensor = plan.transition.new_rows(0)
        self._workers: Any = np.zeros(0, np.int64)
        self._grow(steps)

    @property
    def frames(self) -> int:
        """Transitions that are staged."""
        return self._frames

    def stage(self, worker: int, rows: Tensor) -> None:
        """Copy rows of one worker, uint8 ``[n, row_bytes]``."""
        begin, end = self._count, self._count + len(rows)
        if end > len(self._rows):
            self._grow(2 * end)
        self._rows[begin:end] = rows
        self._workers[begin:end] = worker
        self._count = end
        if self._plan.is_batched:
            self._frames += int(self._views.tensors[self._stepped][begin:end].sum())
        else:
            self._frames += len(rows)

    def batch(self, frames: int) -> TensorDict:
        """The first ``frames`` staged transitions, environment by environment, in memory of its own.

        Args:
            frames: at most as many as are staged.
        """
        steps, rows, envs = self._places(frames)
        order = np.argsort(envs, kind="stable")
        steps, rows, envs = (torch.from_numpy(array[order]) for array in (steps, rows, envs))
        result = TensorDict({"env_index": envs}, [frames])
        for key, tensor in zip(self._keys, self._views.tensors, strict=True):
            target = self._plan.version_key if key == VERSION else key
            if key == STEPPED or target is None:
                continue
            batched = self._plan.is_batched
            result[target] = tensor[steps, rows] if batched else tensor.index_select(0, steps)
        self._drop(frames)
        return result

    def _places(self, frames: int) -> tuple[Any, Any, Any]:
        """Step, row within it and environment of each of the first ``frames`` staged transitions."""
        if not self._plan.is_batched:
            return np.arange(frames), np.zeros(frames, np.int64), self._workers[:frames]
        size = self._plan.num_envs
        valid = self._views.tensors[self._stepped][: self._count].numpy().reshape(-1)
        places = np.flatnonzero(valid)[self._skip : self._skip + frames]
        steps, rows = np.divmod(places, size)
        return steps, rows, self._workers[steps] * size + rows

    def _drop(self, frames: int) -> None:
        """Forget the first ``frames`` transitions, and the steps that have no others."""
        self._frames -= frames
        used = self._count
        if self._plan.is_batched:
            valid = self._views.tensors[self._stepped][: self._count].sum(1).cumsum(0).numpy()
            done = self._skip + frames
            used = int(np.searchsorted(valid, done, side="right"))
            self._skip = done - (int(valid[used - 1]) if used else 0)
        else:
            used = frames
        left = self._count - used
        if left:
            self._rows[:left] = self._rows[used : self._count].clone()
            self._workers[:left] = self._workers[used : self._count].copy()
        self._count = left

    def _grow(self, steps: int) -> None:
        rows, workers = self._plan.transition.new_rows(steps), np.zeros(steps, np.int64)
        rows[: self._count] = self._rows[: self._count]
        workers[: self._count] = self._workers[: self._count]
        self._rows, self._workers = rows, workers
        self._views: RowViews = self._plan.transition.views(rows)
