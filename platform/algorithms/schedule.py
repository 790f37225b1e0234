"""Which rows stand behind which optimizer step. Splitting a mini-batch into micro-batches is the engine's business."""

from __future__ import annotations

import torch

from rl_platform.errors import ConfigError, Problem
from rl_platform.records import RolloutBatch


class MiniBatches:
    """The rows of a batch in mini-batches of `size`, epoch by epoch.

    All shuffled epochs use the same memory and the same records: a mini-batch is valid until the next epoch begins.
    """

    def __init__(self, batch: RolloutBatch, size: int) -> None:
        """Raises ConfigError if `size` does not divide the rows: a smaller last one would weigh its rows more."""
        self._batch, self._size = batch, size
        self._shuffled: RolloutBatch | None = None
        self._parts: list[RolloutBatch] = []
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

    def epoch(self, generator: torch.Generator | None) -> list[RolloutBatch]:
        """Every row once, shuffled by `generator`; None: in order."""
        if generator is None:
            return self._batch.split(self._size)
        order = torch.randperm(len(self._batch), generator=generator)
        if self._shuffled is None:
            self._shuffled = self._batch.select(order)
            self._parts = self._shuffled.split(self._size)
        else:
            self._batch.select(order, out=self._shuffled)
        return self._parts


def mini_batches(batch: RolloutBatch, size: int, generator: torch.Generator | None) -> list[RolloutBatch]:
    """One epoch of `MiniBatches`."""
    return MiniBatches(batch, size).epoch(generator)
