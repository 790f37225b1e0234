"""Adds the load-balancing loss to the backward pass of a micro-batch: each router adds that of its layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_platform.algorithms.router_balance import sequence_balance

if TYPE_CHECKING:
    from torch.autograd.function import FunctionCtx


class RouterBalance:
    """Of one micro-batch. `factors` [B]: of the loss of each sequence, with the coefficient and all denominators.

    membership [B,n], lengths [B], total: see `sequence_balance`, for this rank's n tokens.
    """

    def __init__(self, factors: Tensor, membership: Tensor, lengths: Tensor, total: Callable[[Tensor], Tensor]) -> None:
        self.factors, self.membership, self.lengths, self.total = factors, membership, lengths, total
        self.losses: dict[int, Tensor] = {}  # by layer, as a layer that is recomputed adds its loss twice

    def attached(self, layer: int, weights: Tensor, scores: Tensor, selected: Tensor, active: int) -> Tensor:
        """Returns `weights` [n,E]; its backward also computes the gradient of the layer's loss."""
        per_sequence = sequence_balance(scores, selected, self.membership, self.lengths, active, self.total)
        loss = self.factors @ per_sequence
        self.losses[layer] = loss.detach()
        attached: Tensor = _Attach.apply(weights, loss)
        return attached


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, weights: Tensor, loss: Tensor) -> Tensor:
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.new_ones(())
