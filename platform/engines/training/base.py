"""What every training engine offers, and how a mini-batch becomes micro-batches. Backends differ only behind this."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from rl_platform.algorithms.aggregation import Denominators
from rl_platform.algorithms.losses import ModelOutputs
from rl_platform.algorithms.metrics import Metrics
from rl_platform.config.components import Optim
from rl_platform.records import RolloutBatch

Loss = Callable[[ModelOutputs, RolloutBatch, Denominators], tuple[Tensor, Metrics]]


class TrainingEngine(Protocol):
    """One rank of one model in training. Every rank is given the same batches and works on its share of the rows."""

    def evaluate(self, batch: RolloutBatch, micro_batches: MicroBatches) -> ModelOutputs:
        """Outputs [B,T] for the whole batch, without gradient, on the CPU."""

    def step(
        self, mini_batch: RolloutBatch, loss: Loss, micro_batches: MicroBatches
    ) -> Metrics | None:
        """One optimizer step on the mini-batch; None when the gradient was not finite and nothing was changed."""

    def set_learning_rate(self, value: float) -> None: ...

    def weights(self) -> dict[str, Tensor]:
        """All parameters by name, unsharded; references to the live ones where there is only one rank."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True)
class MicroBatches:
    """How many rows, or how many tokens, fit into one forward-backward. Both None: a mini-batch at once.

    Never changes a result: losses are partial sums over the denominators of the whole mini-batch.
    """

    rows: int | None = None
    tokens: int | None = None

    def split(self, batch: RolloutBatch, rows: Sequence[int]) -> list[list[int]]:
        """The given rows of the batch, micro-batch by micro-batch.

        Sequences stand beside others of similar length, so that attention pads little; a token budget is strict, but for a
        single row that is longer.
        """
        if "lengths" not in batch.inputs:
            return _chunks(list(rows), self.rows)
        lengths = batch.inputs["lengths"].tolist()
        order = sorted(rows, key=lambda row: lengths[row])
        if self.tokens is None:
            return _chunks(order, self.rows)
        parts: list[list[int]] = []
        room = 0
        for row in order:
            if not parts or lengths[row] > room:
                parts.append([])
                room = self.tokens
            parts[-1].append(row)
            room -= lengths[row]
        return parts


def _chunks(rows: list[int], size: int | None) -> list[list[int]]:
    return [rows[start : start + (size or len(rows))] for start in range(0, len(rows), size or len(rows))]


def learning_rate(optim: Optim, step: int, total_steps: int) -> float:
    """Learning rate of PPO step `step` (from 0): linear warm-up, then constant, linear or cosine down to min_lr."""
    if step < optim.lr_warmup_steps:
        return optim.lr * (step + 1) / optim.lr_warmup_steps
    done = (step - optim.lr_warmup_steps) / max(total_steps - optim.lr_warmup_steps, 1)
    left = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}[optim.lr_schedule]
    return optim.min_lr + (optim.lr - optim.min_lr) * max(left, 0.0)
