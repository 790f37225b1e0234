"""The interface of training engines, and the split of mini-batches into micro-batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypedDict

import torch
from torch import Tensor

from rl_platform.algorithms.aggregation import Denominators
from rl_platform.algorithms.losses import ModelOutputs
from rl_platform.algorithms.metrics import Metrics
from rl_platform.config.schema.models import Optim
from rl_platform.engines.training.sharded_state import ShardedState
from rl_platform.records import RolloutBatch

Loss = Callable[[ModelOutputs, RolloutBatch, Denominators], tuple[Tensor, Metrics]]


class Offloadable(NamedTuple):
    """The tensors of one rank that an engine needs on its device.

    Only `step` uses optimizer state and gradients. Values of gradients are not used after the call that computed them.
    """

    weights: list[Tensor]
    optimizer_state: list[Tensor]
    gradients: list[Tensor]


class EngineOptions(TypedDict):
    """Arguments of the constructor of every training engine, see `FSDPEngine`."""

    dtype: torch.dtype
    horizon: int
    device: torch.device
    nominal: bool
    balance: bool
    gradient_checkpointing: bool


class TrainingEngine(Protocol):
    """One rank of one model in training.

    All ranks call the same methods in the same order with the same batches; each computes its share of the rows.
    `model`: the platform's model that it was built from. If another library holds the weights, only its config and
    parameter names are used.
    """

    model: Any

    def evaluate(self, batch: RolloutBatch, micro_batches: MicroBatches) -> ModelOutputs:
        """Returns outputs [B,T] of the whole batch on every rank, without gradients, float32 on the CPU."""

    def step(self, mini_batch: RolloutBatch, loss: Loss, micro_batches: MicroBatches) -> Metrics | None:
        """Makes one optimizer step and returns the metrics of the whole mini-batch on every rank.

        Returns None if loss or gradient are not finite; no rank has then changed its parameters or optimizer state.
        """

    def set_learning_rate(self, value: float) -> None:
        """Sets the learning rate of the next steps."""

    def weights(self) -> dict[str, Tensor]:
        """Returns all parameters by name, unsharded, on every rank. On one rank of plain torch they are not copied."""

    def gathered(self, dtype: torch.dtype = torch.float32) -> Iterator[tuple[Sequence[str], Tensor]]:
        """Yields (names, whole parameter) one by one. All ranks iterate together and hold one parameter at a time.

        Each rank converts its part to `dtype` before the transfer. Buffers keep their type.
        """

    def offloadable(self) -> Offloadable:
        """Returns this rank's parameters, optimizer state and gradients."""

    def sharded_state(self) -> ShardedState:
        """Returns this rank's parts of the trained parameters and the optimizer state, as views.

        Saving reads them and loading writes into them. Names are `model.NAME` and `optimizer.NAME.KEY` for every
        backend and layout, so any layout can load the state of another. Learning rate and betas are not included; they
        come from the config.
        """


@dataclass(frozen=True)
class MicroBatches:
    """The most rows or tokens of one forward-backward pass. Both None: a whole mini-batch.

    The split changes no result: losses are partial sums over the denominators of the whole mini-batch.
    """

    rows: int | None = None
    tokens: int | None = None

    def split(self, batch: RolloutBatch, rows: Sequence[int]) -> Sequence[Sequence[int]]:
        """Returns the indices `rows` of the batch as micro-batches; an empty list for no rows.

        Sequences of similar length share a micro-batch, so that attention pads little. Only a single row that is
        longer than `tokens` exceeds that limit.
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
    """Returns the number of tokens of each row; the width of the batch if it has no \"lengths\"."""
    lengths = batch.inputs.get("lengths")
    return [batch.action_mask.shape[1]] * len(batch) if lengths is None else lengths.tolist()


def learning_rate(optim: Optim, step: int, total_steps: int) -> float:
    """Returns the learning rate of PPO step `step` (from 0): linear warm-up, then constant, linear or cosine decay."""
    if step < optim.lr_warmup_steps:
        return optim.lr * (step + 1) / optim.lr_warmup_steps
    done = min((step - optim.lr_warmup_steps) / max(total_steps - optim.lr_warmup_steps, 1), 1.0)
    left = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}[optim.lr_schedule]
    return optim.min_lr + (optim.lr - optim.min_lr) * left
