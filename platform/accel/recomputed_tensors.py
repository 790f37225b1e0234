"""Attention, gated feed-forwards and RMS norms whose backward pass recomputes results instead of storing them.

Three of twelve tensors of a decoder layer's backward pass are an elementwise function of other tensors that autograd
stores anyway. Attention stores padded queries, keys and values, each sequence with a copy of the common prefix. The
backward pass computes these tensors again with the same operations, so all bits are equal. Not covered: matrix
products outside attention, adapters' own tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from rl_platform.accel.embedding_gradient import add_in_place
from rl_platform.models.packed import Attention

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def recompute_tensors(backbone: nn.Module, model_type: str) -> None:
    """Replaces the forward methods of attention, feed-forwards, norms and embeddings of a model of the FAMILIES."""
    if model_type not in FAMILIES:
        return
    for module in backbone.modules():
        if all(hasattr(module, name) for name in PROJECTIONS):
            module.forward = partial(_feed_forward, module, module.forward)
        elif hasattr(module, "q_proj"):
            module.forward = partial(_attention, module.forward)
        elif type(module).__name__.endswith("RMSNorm"):
            module.forward = partial(_norm, module, module.forward)
        elif type(module) is nn.Embedding:
            add_in_place(module)


def _attention(
    original: Callable[..., tuple[Tensor, Tensor | None]],
    *arguments: object,
    attention: Attention | None = None,
    **options: object,
) -> tuple[Tensor, Tensor | None]:
    """Calls the forward method with an attention that stores its inputs only.

    attention: that of the batch; None: transformers' own, of a caller that has no packed rows.
    """
    if attention is None:
        return original(*arguments, **options)
    if torch.is_grad_enabled():
        attention = partial(checkpoint, attention, use_reentrant=False, preserve_rng_state=False)
    return original(*arguments, attention=attention, **options)


def _feed_forward(module: Any, original: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return original(states)
    gate, up = module.gate_proj(states), module.up_proj(states)
    activated = module.act_fn(gate)
    with _storing(activated, module.act_fn, gate):
        product = activated * up
        # silu(gate) is stored for the gradient of `up`, its product with `up` for the one of the next matrix
        with _storing(product, lambda gate, up: module.act_fn(gate) * up, gate, up):
            result: Tensor = module.down_proj(product)
    return result


def _norm(module: Any, original: Callable[[Tensor], Tensor], states: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return original(states)
    wide = states.to(torch.float32)
    root = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + module.variance_epsilon)
    normalised = wide * root
    with _storing(normalised, torch.mul, wide, root):
        result: Tensor = module.weight * normalised.to(states.dtype)
    return result


def _storing(result: Tensor, function: Callable[..., Tensor], *arguments: Tensor) -> saved_tensors_hooks:
    """Returns a context in which autograd stores `arguments` in place of `result`, which is function(*arguments)."""
    address, stored = result.data_ptr(), [tensor.detach() for tensor in arguments]

    def pack(tensor: Tensor) -> Tensor | torch.Size:
        return tensor.shape if tensor.data_ptr() == address else tensor

    def unpack(packed: Tensor | torch.Size) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        with torch.no_grad():
            return function(*stored).view(packed)

    return saved_tensors_hooks(pack, unpack)
