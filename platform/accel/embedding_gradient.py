"""Embedding whose gradient is added to `parameter.grad` in place.

Autograd would allocate a dense gradient, and a second one for their sum if the matrix is also the head's: 0.1 GB each
for the 49,152 tokens of SmolLM2. Not covered: sharded parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rl_platform.models.autograd_context import AutogradContext


class _EmbeddingContext(AutogradContext):
    weight: nn.Parameter
    padding: int | None


class Embedding(torch.autograd.Function):
    """Rows of a matrix. The backward pass first sums the gradient of a token over its positions, as autograd does."""

    @staticmethod
    def forward(ctx: _EmbeddingContext, weight: nn.Parameter, tokens: Tensor, padding: int | None) -> Tensor:
        """weight [V,H], tokens [...] -> [...,H]. padding: a token whose row gets no gradient."""
        ctx.weight, ctx.padding = weight, padding
        ctx.save_for_backward(tokens)
        return weight.index_select(0, tokens.flatten()).unflatten(0, tokens.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: _EmbeddingContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        weight = ctx.weight
        tokens, places = ctx.saved_tensors[0].flatten().unique(return_inverse=True)
        sums = gradient.new_zeros(len(tokens), weight.shape[1]).index_add_(0, places, gradient.flatten(0, -2))
        if ctx.padding is not None:
            sums[tokens == ctx.padding] = 0
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        weight.grad.index_add_(0, tokens, sums)
        return None, None, None


def add_in_place(module: nn.Embedding) -> None:
    """Makes the first backward pass after `zero_grad` add the gradient in place.

    Autograd computes later passes: it sums both gradients of a tied matrix before it adds them to earlier ones.
    """
    module.forward = partial(_embedded, module, module.forward)  # type: ignore[method-assign]


def _embedded(module: nn.Embedding, original: Callable[[Tensor], Tensor], tokens: Tensor) -> Tensor:
    weight = module.weight
    fresh = torch.is_grad_enabled() and weight.requires_grad and weight.grad is None
    result: Tensor = Embedding.apply(weight, tokens, module.padding_idx) if fresh else original(tokens)
    return result
