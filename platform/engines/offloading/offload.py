"""A training engine whose tensors are in host memory between uses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from rl_platform.algorithms.losses import ModelOutputs
from rl_platform.algorithms.metrics import Metrics
from rl_platform.engines.offloading.swap import Swap, storage_of, storages
from rl_platform.engines.training.base import Loss, MicroBatches, Offloadable, TrainingEngine
from rl_platform.engines.training.sharded_state import ShardedState
from rl_platform.records import RolloutBatch


class OffloadingEngine:
    """Wraps `engine` and keeps its tensors on `device` in host memory until a method uses them.

    Weights move separately from gradients and optimizer state, because an evaluation needs only weights. Gradients are
    freed and not copied, because every step begins with new ones. Offloading changes no bit of the results.
    `constant`: the weights never change.
    """

    def __init__(self, engine: TrainingEngine, device: torch.device, *, constant: bool = False) -> None:
        self.engine, self.device = engine, device
        self.model = engine.model
        self._weights = Swap(lambda: engine.offloadable().weights, device, constant=constant)
        self._training = Swap(self._optimizer_state, device, unneeded=self._gradients)
        self.offload(weights=True)

    def offload(self, *, weights: bool) -> None:
        """Moves gradients and optimizer state to host memory, and with `weights` the weights too."""
        self._training.leave()
        if weights:
            self._weights.leave()

    def onload(self, *, training: bool) -> None:
        """Moves the weights to the device, and with `training` gradients and optimizer state. Methods call it."""
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

    def gathered(self, dtype: torch.dtype = torch.float32) -> Iterator[tuple[Sequence[str], Tensor]]:
        self.onload(training=False)
        return self.engine.gathered(dtype)

    def offloadable(self) -> Offloadable:
        return self.engine.offloadable()

    def sharded_state(self) -> ShardedState:
        self.onload(training=True)
        return self.engine.sharded_state()

    def _optimizer_state(self) -> Iterator[Tensor]:
        tensors = self.engine.offloadable()
        return _not_weights(tensors.optimizer_state, tensors.weights, self.device)

    def _gradients(self) -> Iterator[Tensor]:
        tensors = self.engine.offloadable()
        return _not_weights(tensors.gradients, tensors.weights, self.device)


def _not_weights(tensors: list[Tensor], weights: list[Tensor], device: torch.device) -> Iterator[Tensor]:
    """Yields the tensors on `device` that are not views of the weights."""
    of_weights = storages(weights, device)
    for tensor in tensors:
        storage = storage_of(tensor, device)
        if storage is not None and storage._cdata not in of_weights:
            yield tensor


@contextmanager
def onloaded(engine: TrainingEngine) -> Iterator[None]:
    """Moves all of an engine's state to the device during the block, and then back to where it was."""
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
