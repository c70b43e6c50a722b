"""How a server batches, checked at construction."""

from __future__ import annotations

from dataclasses import dataclass

from meshinfer.arguments import as_count, as_seconds

__all__ = ["InferenceServerConfig"]


@dataclass(frozen=True)
class InferenceServerConfig:
    """When a batch is made and what is recorded.

    Args:
        max_batch_size: requests in one forward pass, at most.
        min_batch_size: requests to wait for, as long as ``timeout`` allows.
        timeout: seconds that the oldest waiting request may wait for ``min_batch_size`` to be reached.
        stats_window: how many of the latest requests and batches percentiles are computed over.
        inline: whether the thread that received a request may serve it, when nobody is serving: saves a hand-over
            between threads. ``None`` decides at start: only with ``min_batch_size=1``, a CPU policy and
            ``torch.get_num_threads() == 1`` (each thread that computes with several would start its own pool).

    Raises:
        ValueError: a value is out of range, or ``min_batch_size > max_batch_size``.
        TypeError: a count is not an int, or ``timeout`` not a number.
    """

    max_batch_size: int = 64
    min_batch_size: int = 1
    timeout: float = 0.01
    stats_window: int = 1024
    inline: bool | None = None

    def __post_init__(self) -> None:
        for name in ("max_batch_size", "min_batch_size", "stats_window"):
            as_count(name, getattr(self, name))
        if self.min_batch_size > self.max_batch_size:
            raise ValueError(
                f"min_batch_size={self.min_batch_size} is larger than "
                f"max_batch_size={self.max_batch_size}; a batch could never be made"
            )
        as_seconds("timeout", self.timeout, zero=True)
        if self.inline and self.min_batch_size > 1:
            raise ValueError(
                "inline=True needs min_batch_size=1: a receiving thread cannot wait for others"
            )
