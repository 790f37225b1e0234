"""Bytes of model state on Megatron's ranks. `memory` has the rest of the estimate."""

from __future__ import annotations

from rl_platform.config.schema.models import Parallel, Trainable
from rl_platform.placement.model_shape import FLOAT, ModelShape

ADAM_STATES = 2


def layout_of_learner(section: Trainable) -> Parallel:
    """Which ranks of a learner work on the same rows; of tensor and pipeline ranks one where its backend shards."""
    return section.parallel if section.training_backend == "megatron" else Parallel(context=section.parallel.context)


def state_bytes(shape: ModelShape, parallel: Parallel, dtype: str, ranks: int) -> tuple[int, int]:
    """Returns the lasting bytes on one rank of the first pipeline stage: weights and optimizer state.

    Optimizer state: the moments, with the optimizer's float32 weights if the model is bfloat16, sharded over the ranks
    with copies of the same parameters; and the float32 gradients, whose buffer Megatron allocates once. Expert ranks
    share whole experts, tensor ranks all other parameters.
    """
    layers, half = shape.layers / parallel.pipeline, dtype != "float32"
    outer = shape.outer_parameters if parallel.pipeline == 1 else shape.vocabulary * shape.hidden  # head: last stage
    outside = layers * (shape.layer_parameters - shape.expert_parameters) + outer
    distributed = ranks > parallel.tensor * parallel.pipeline  # else every rank holds the moments of all its parameters
    weights = optimizer = 0.0
    for parameters, sharing in ((outside, parallel.tensor), (layers * shape.expert_parameters, parallel.expert)):
        own = parameters / sharing
        copies = max(1, ranks // (sharing * parallel.pipeline)) if distributed else 1
        weights += own * (2 if half else FLOAT)
        optimizer += own * FLOAT * (1 + (ADAM_STATES + half) / copies)
    return int(weights), int(optimizer)
