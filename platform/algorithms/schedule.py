"""Which rows stand behind which optimizer step. Splitting a mini-batch into micro-batches is the engine's business."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_platform.errors import ConfigError, Problem


def mini_batches(rows: int, size: int, generator: torch.Generator) -> list[Tensor]:
    """One epoch: every row index once, shuffled by `generator`, in rows / size int64 tensors of `size` indices.

    Raises ConfigError if `size` does not divide `rows`: a smaller last mini-batch would weigh its rows more.
    """
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
    return list(torch.split(torch.randperm(rows, generator=generator), size))
