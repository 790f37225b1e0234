"""Which rows stand behind which optimizer step. Splitting a mini-batch into micro-batches is the engine's business."""

from __future__ import annotations

import torch

from rl_platform.errors import ConfigError, Problem
from rl_platform.records import RolloutBatch


def mini_batches(batch: RolloutBatch, size: int, generator: torch.Generator | None) -> list[RolloutBatch]:
    """One epoch: every row of the batch once, shuffled by `generator`, in mini-batches of `size` rows; None: in order.

    Raises ConfigError if `size` does not divide the rows: a smaller last mini-batch would weigh its rows more.
    """
    rows = len(batch)
    if rows % size:
        divisors = [d for d in range(1, rows + 1) if rows % d == 0]
        nearest = min(divisors, key=lambda d: (abs(d - size), -d))
        problem = Problem(
            key="data.mini_batch_size",
            message=f"a rollout has {rows} rows, which mini-batches of {size} do not divide",
            value=str(size),
            allowed=f"a divisor of {rows}",
            hint=f"the nearest is {nearest}",
        )
        raise ConfigError([problem])
    if generator is None:
        return batch.split(size)
    return batch.select(torch.randperm(rows, generator=generator)).split(size)
