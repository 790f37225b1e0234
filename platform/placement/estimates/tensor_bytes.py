"""Bytes of the tensors of a model, from its shape alone: per token, per row of a policy, and per rank of a layout.

`memory.py` adds them up for a config and a placement.
"""

from __future__ import annotations

import itertools

from rl_platform.config.schema.models import Parallel
from rl_platform.placement.estimates.component_shapes import Shape
from rl_platform.placement.estimates.model_shape import FLOAT, ModelShape
from rl_platform.placement.estimates.policy_shape import PolicyShape

ADAM_STATES = 2


def bytes_of(dtype: str) -> int:
    """Returns the bytes of one number: 2 in bfloat16, otherwise 4."""
    return 2 if dtype == "bfloat16" else FLOAT


def saved_bytes_per_token(
    shape: ModelShape, dtype: str, parallel: Parallel | None = None, *, recomputed: bool = False
) -> int:
    """Returns the bytes that one decoder layer keeps per token for its backward pass, on one tensor rank.

    Two norms keep their input and its normalised form and hand their output to matrices (3 hidden each); attention
    keeps queries, keys and values as wide as queries, its output, and that output in order again (5 widths); the gated
    feed-forward keeps gate, activated gate, up and their product (4 widths of each expert that a token goes through);
    one without a gate keeps 2.
    `recomputed`: without the normalised form, the activated gate and the product; attention keeps queries, keys and
    values without copies for other heads, and its output once (accel/recomputed_tensors.py). In bfloat16 norms do not
    keep their output either (accel/bfloat16_layers.py).
    """
    norms = (2 if recomputed else 4) * shape.hidden
    widths = 2 if recomputed or not shape.gated else 4
    attention = 2 * (shape.attention_width + shape.kv_width) if recomputed else 5 * shape.attention_width
    outputs = 0 if recomputed and bytes_of(dtype) < FLOAT else 2 * shape.hidden
    rest = outputs + attention + widths * shape.feed_forward_width
    tensor, sequence = (1, False) if parallel is None else (parallel.tensor, parallel.sequence)
    return norms * FLOAT // (tensor if sequence else 1) + rest * bytes_of(dtype) // tensor


def live_elements(shape: ModelShape) -> int:
    """Returns the elements per token that one layer holds at its widest point without a backward pass."""
    return 2 * shape.hidden + max(5 * shape.attention_width, (2 + shape.gated) * shape.feed_forward_width)


def kept_by_policy(shape: PolicyShape, dtype: str, *, checkpointed: bool) -> int:
    """Returns the bytes that an embodied policy keeps per row for its backward pass."""
    kept = 2 * sum(shape.elements) * FLOAT
    for stack in shape.trained_stacks:
        layer, per_layer = stack.shape, saved_bytes_per_token(stack.shape, dtype)
        layers = layer.layers * layer.hidden * FLOAT + per_layer if checkpointed else layer.layers * per_layer
        kept += stack.passes * stack.tokens * layers
    return kept


def forward_of_policy(shape: PolicyShape) -> int:
    """Returns the bytes of a row in a forward without a backward pass: the tensors of the largest layer, and the keys
    and values that a later stack attends to."""
    live = max((stack.tokens * live_elements(stack.shape) for stack in shape.stacks), default=0)
    cached = 0
    for before, stack in itertools.pairwise(shape.stacks):
        cached += min(stack.context, before.tokens) * before.shape.kv_elements_per_token
    return (2 * max(shape.elements, default=0) + live + cached) * FLOAT


def half_copy(shape: ModelShape) -> int:
    """Returns the bytes of the bfloat16 copies that exist at a time: at most those of a layer, or that of the head."""
    head = 0 if shape.value_head else shape.vocabulary * shape.hidden
    return max(shape.matrices_per_layer, head) * bytes_of("bfloat16")


def gathered_bytes(shape: Shape) -> int:
    """Returns the unsharded bytes of a rank: parameters outside the layers, one layer and the one fetched ahead."""
    if isinstance(shape, ModelShape):
        return (shape.outer_parameters + 2 * shape.layer_parameters) * FLOAT
    layers = sum(stack.shape.decoder_parameters for stack in shape.stacks)
    largest = max((stack.shape.layer_parameters for stack in shape.stacks), default=0)
    return (shape.parameters - layers + 2 * largest) * FLOAT if shape.stacks else 0


def state_bytes(shape: ModelShape, parallel: Parallel, dtype: str, ranks: int) -> tuple[int, int]:
    """Returns the lasting bytes on one rank of the first pipeline stage: weights and optimizer state.

    Optimizer state: the moments, with the optimizer's float32 weights if the model is bfloat16, sharded over the ranks
    with copies of the same parameters; and the float32 gradients, whose buffer Megatron allocates once. Expert ranks
    share whole experts, tensor ranks all other parameters.
    """
    half, experts = dtype != "float32", shape.expert_parameters / parallel.pipeline
    outer = shape.outer_parameters if parallel.pipeline == 1 else shape.vocabulary * shape.hidden  # head: last stage
    outside = (shape.decoder_parameters - shape.expert_parameters) / parallel.pipeline + outer
    distributed = ranks > parallel.tensor * parallel.pipeline  # else every rank holds the moments of all its parameters
    weights = optimizer = 0.0
    for parameters, sharing in ((outside, parallel.tensor), (experts, parallel.expert)):
        own = parameters / sharing
        copies = max(1, ranks // (sharing * parallel.pipeline)) if distributed else 1
        weights += own * (2 if half else FLOAT)
        optimizer += own * FLOAT * (1 + (ADAM_STATES + half) / copies)
    return int(weights), int(optimizer)


def adapter_bytes(trained: int, parallel: Parallel, dtype: str, ranks: int) -> tuple[int, int]:
    """Returns the lasting bytes of adapters with `trained` parameters on one rank: weights and optimizer state.

    As `state_bytes`; tensor ranks split one of the two matrices of an adapter, here none.
    """
    own, half = trained / parallel.pipeline, dtype != "float32"
    copies = max(1, ranks // (parallel.tensor * parallel.pipeline))
    return int(own * bytes_of(dtype)), int(own * FLOAT * (1 + (ADAM_STATES + half) / copies))
