"""What every training engine offers, and how a mini-batch becomes micro-batches. Backends differ only behind this."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from rl_platform.algorithms.aggregation import Denominators
from rl_platform.algorithms.losses import ModelOutputs
from rl_platform.algorithms.metrics import Metrics
from rl_platform.config.schema.models import Optim
from rl_platform.engines.training.sharded_state import ShardedState
from rl_platform.records import RolloutBatch

Loss = Callable[[ModelOutputs, RolloutBatch, Denominators], tuple[Tensor, Metrics]]


class TrainingEngine(Protocol):
    """One rank of one model in training.

    All ranks call the same methods in the same order, with the same batches; each works on its share of the rows.

    `model`: the platform's own model it was made from; where another library holds the weights, its config and names.
    """

    model: Any

    def evaluate(self, batch: RolloutBatch, micro_batches: MicroBatches) -> ModelOutputs:
        """Outputs [B,T] for the whole batch on every rank, without gradient, float32 on the CPU."""

    def step(self, mini_batch: RolloutBatch, loss: Loss, micro_batches: MicroBatches) -> Metrics | None:
        """One optimizer step; the metrics of the whole mini-batch, on every rank.

        None when loss or gradient were not finite: then no rank changed its parameters or its optimizer state.
        """

    def set_learning_rate(self, value: float) -> None: ...

    def weights(self) -> dict[str, Tensor]:
        """All parameters by name, unsharded, on every rank; the live ones where plain torch has one rank."""

    def gathered(self) -> Iterator[tuple[Sequence[str], Tensor]]:
        """The same one by one, each with its names, for ranks that go through them together: nobody needs room for more
        than one."""

    def offloadable(self) -> tuple[list[Tensor], list[Tensor]]:
        """This rank's parameters, and what only `step` needs: gradients that are there, and the optimizer's state."""

    def sharded_state(self) -> ShardedState:
        """This rank's parts of what is trained and of the optimizer state, live: write them, or fill them to go on.

        Names are those of the model, `model.NAME` and `optimizer.NAME.KEY`, whatever the backend and the ranks: a state
        that one layout has written is read by any other. Learning rate and betas are the config's business.
        """


@dataclass(frozen=True)
class MicroBatches:
    """How many rows, or how many tokens, fit into one forward-backward. Both None: a mini-batch at once.

    Never changes a result: losses are partial sums over the denominators of the whole mini-batch.
    """

    rows: int | None = None
    tokens: int | None = None

    def split(self, batch: RolloutBatch, rows: Sequence[int]) -> list[Sequence[int]]:
        """The given rows of the batch, micro-batch by micro-batch; nothing for no rows.

        Sequences stand beside others of similar length, so that attention pads little; a token budget is strict, but
        for a single row that is longer.
        """
        if self.rows is None and self.tokens is None:
            return [rows] if rows else []
        most_rows, most_tokens = self.rows or math.inf, self.tokens or math.inf
        lengths = row_lengths(batch)
        parts: list[list[int]] = []
        tokens = 0
        for row in sorted(rows, key=lengths.__getitem__):
            if not parts or len(parts[-1]) == most_rows or tokens + lengths[row] > most_tokens:
                parts.append([])
                tokens = 0
            parts[-1].append(row)
            tokens += lengths[row]
        return parts


def row_lengths(batch: RolloutBatch) -> list[int]:
    """Tokens of each row; rows without a length of their own are as long as the batch is wide."""
    lengths = batch.inputs.get("lengths")
    return [batch.action_mask.shape[1]] * len(batch) if lengths is None else lengths.tolist()


def learning_rate(optim: Optim, step: int, total_steps: int) -> float:
    """Learning rate of PPO step `step` (from 0): linear warm-up, then constant, linear or cosine down to min_lr."""
    if step < optim.lr_warmup_steps:
        return optim.lr * (step + 1) / optim.lr_warmup_steps
    done = min((step - optim.lr_warmup_steps) / max(total_steps - optim.lr_warmup_steps, 1), 1.0)
    left = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}[optim.lr_schedule]
    return optim.min_lr + (optim.lr - optim.min_lr) * left
