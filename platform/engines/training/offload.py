"""A training engine that gives up its device's memory between uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rl_platform.algorithms.losses import ModelOutputs
from rl_platform.algorithms.metrics import Metrics
from rl_platform.engines.swap import Swap, storage_of, storages
from rl_platform.engines.training.base import Loss, MicroBatches, TrainingEngine
from rl_platform.engines.training.sharded_state import ShardedState
from rl_platform.records import RolloutBatch


class OffloadingEngine:
    """`engine`, whose tensors on `device` are in host memory until they are used, and again after `offload`.

    Weights and what only a step needs come back separately: an evaluation has no use for the optimizer. All of it
    changes no bit of what is computed. `constant`: the weights never change.
    """

    def __init__(self, engine: TrainingEngine, device: torch.device, *, constant: bool = False) -> None:
        self.engine, self.device = engine, device
        self.model: Any = engine.model
        self._weights = Swap(lambda: engine.offloadable()[0], device, constant=constant)
        self._training = Swap(self._training_tensors, device)
        self.offload(weights=True)

    def offload(self, *, weights: bool) -> None:
        """Gradients and optimizer state leave, and the weights too if asked. What is away stays there."""
        self._training.leave()
        if weights:
            self._weights.leave()

    def onload(self, *, training: bool) -> None:
        """The weights come back, and gradients and optimizer state too if asked. Every use does it by itself."""
        self._weights.enter()
        if training:
            self._training.enter()

    @property
    def away(self) -> tuple[bool, bool]:
        """Whether gradients and optimizer state are in host memory, and whether the weights are."""
        return self._training.away, self._weights.away

    def evaluate(self, batch: RolloutBatch, micro_batches: MicroBatches) -> ModelOutputs:
        self.onload(training=False)
        return self.engine.evaluate(batch, micro_batches)

    def step(self, mini_batch: RolloutBatch, loss: Loss, micro_batches: MicroBatches) -> Metrics | None:
        self.onload(training=True)
        return self.engine.step(mini_batch, loss, micro_batches)

    def set_learning_rate(self, value: float) -> None:
        self.engine.set_learning_rate(value)

    def weights(self) -> dict[str, Tensor]:
        self.onload(training=False)
        return self.engine.weights()

    def gathered(self) -> Iterator[tuple[Sequence[str], Tensor]]:
        self.onload(training=False)
        return self.engine.gathered()

    def offloadable(self) -> tuple[list[Tensor], list[Tensor]]:
        return self.engine.offloadable()

    def sharded_state(self) -> ShardedState:
        self.onload(training=True)
        return self.engine.sharded_state()

    def _training_tensors(self) -> Iterator[Tensor]:
        """Without those that are views of the weights."""
        weights, training = self.engine.offloadable()
        own = storages(weights, self.device)
        for tensor in training:
            storage = storage_of(tensor, self.device)
            if storage is not None and storage._cdata not in own:
                yield tensor


@contextmanager
def onloaded(engine: TrainingEngine) -> Iterator[None]:
    """Within the block all of an engine's state may be used; after it what was away is away again."""
    if not isinstance(engine, OffloadingEngine):
        yield
        return
    training, weights = engine.away
    engine.onload(training=True)
    try:
        yield
    finally:
        if training:
            engine.offload(weights=weights)
