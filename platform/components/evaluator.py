"""The common part of actor, critic and reference: a model in a training engine, and its outputs."""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from rl_platform.algorithms.losses import ModelOutputs
from rl_platform.components.base import ComponentContext
from rl_platform.config.schema import Config
from rl_platform.config.schema.models import Actor, Critic
from rl_platform.engines.training.base import MicroBatches
from rl_platform.engines.training.build import training_engine
from rl_platform.engines.training.offload import OffloadingEngine
from rl_platform.records import RolloutBatch
from rl_platform.tracing import recorder


class Evaluator:
    """Base of learners and reference. `section`: backend, layout and micro-batches of `model`."""

    def __init__(self, context: ComponentContext, config: Config, section: Actor | Critic, model: nn.Module) -> None:
        self.context, self.config = context, config
        self.device = torch.device("cuda", context.accelerators[0]) if context.accelerators else torch.device("cpu")
        self.engine = training_engine(
            section,
            model,
            dtype=getattr(torch, (section.model or config.actor.model).dtype),
            horizon=config.algorithm.loss_agg_horizon or config.data.max_response_length,
            device=self.device,
            nominal=config.algorithm.loss_agg_denominator == "nominal",
        )
        micro_batch_rows = section.micro_batch_size and section.micro_batch_size // config.sequence_length
        self.training_micro_batches = MicroBatches(micro_batch_rows, section.max_tokens_per_micro_batch)
        forward_rows = config.algorithm.logprob_forward_micro_batch_size
        self.forward_micro_batches = MicroBatches(forward_rows) if forward_rows else self.training_micro_batches

    def outputs(self, batch: RolloutBatch) -> ModelOutputs:
        """Outputs [B,T] of the model as it is now, without gradient."""
        began = time.monotonic()
        outputs = self.engine.evaluate(batch, self.forward_micro_batches)
        recorder.add("work", "inference", began)
        return outputs

    def offload(self, weights: bool) -> None:
        """Moves gradients and optimizer state off the device until they are used, and the weights too if `weights`.
        Only for a section with `offload: true`."""
        assert isinstance(self.engine, OffloadingEngine)
        self.engine.offload(weights=weights)


def present(tensor: Tensor | None) -> Tensor:
    """An output that this kind of model always has."""
    assert tensor is not None
    return tensor
