"""How Megatron's ranks share the lasting state of a model they train. `memory` has the rest of the estimate."""

from __future__ import annotations

from rl_platform.config.schema.models import Parallel, Trainable
from rl_platform.placement.model_shape import FLOAT, ModelShape

ADAM_STATES = 2


def layout_of_learner(section: Trainable) -> Parallel:
    """Which ranks of a learner work on the same rows; of tensor and pipeline ranks one where its backend shards."""
    return section.parallel if section.training_backend == "megatron" else Parallel(context=section.parallel.context)


def state_bytes(shape: ModelShape, parallel: Parallel, dtype: str, ranks: int) -> tuple[int, int]:
    """Bytes on one rank that stay: weights, and what the optimizer works on. Of the first pipeline stage.

    The latter are the moments, shared by the ranks that hold copies of the same parameters, in bfloat16 with the
    optimizer's float32 weights; and the float32 gradients, whose buffer Megatron makes once. Experts are whole, and
    shared by the expert ranks; all else by the tensor ranks.
    """
    layers, half = shape.layers / parallel.pipeline, dtype != "float32"
    outer = shape.outer_parameters if parallel.pipeline == 1 else shape.vocabulary * shape.hidden  # head: last stage
    outside = layers * (shape.layer_parameters - shape.expert_parameters) + outer
    distributed = ranks > parallel.tensor * parallel.pipeline  # else every rank has the moments of all it holds
    weights = optimizer = 0.0
    for parameters, sharing in (
        (outside, parallel.tensor),
        (layers * shape.expert_parameters, parallel.expert),
    ):
        own = parameters / sharing
        copies = max(1, ranks // (sharing * parallel.pipeline)) if distributed else 1
        weights += own * (2 if half else FLOAT)
        optimizer += own * FLOAT * (1 + (ADAM_STATES + half) / copies)
    return int(weights), int(optimizer)
