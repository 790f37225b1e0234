"""Adds the load-balancing loss to the backward pass of a micro-batch: each router adds that of its layer.

Megatron's routers call `RouterBalance` themselves; `BalancedRouters` does it for those of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from rl_platform.algorithms.router_balance import sequence_balance
from rl_platform.models.routers import Routing, routers, scores

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


class BalancedRouters:
    """The routers of a transformers model. `current`: the balance of the micro-batch that is trained; None: of none."""

    def __init__(self, backbone: object) -> None:
        self.current: RouterBalance | None = None
        self.routers = routers(backbone)
        for layer, router in self.routers.items():
            router.register_forward_hook(partial(self._attach, layer))

    def _attach(self, layer: int, router: nn.Module, _: object, output: tuple[Tensor, Tensor, Tensor]) -> object:
        if self.current is None:
            return output
        logits, weights, routes = Routing.of(output)
        selected = torch.zeros_like(logits, dtype=torch.bool).scatter(1, routes, True)
        attached = self.current.attached(layer, weights, scores(router, logits), selected, routes.shape[1])
        return output[0], attached, output[2]


def membership(flat_index: Tensor, lengths: Tensor, count: int) -> Tensor:
    """Returns 1 where a sequence of `lengths` [B] has one of this rank's `count` tokens, float [B,N].

    flat_index [B,T]: the index of position t of row b among the tokens; others are outside [0, count).
    """
    there = torch.arange(flat_index.shape[1], device=flat_index.device) < lengths[:, None]
    rows, columns = (there & (flat_index >= 0) & (flat_index < count)).nonzero(as_tuple=True)
    members = torch.zeros(len(lengths), count, device=flat_index.device)
    return members.index_put_((rows, flat_index[rows, columns]), members.new_ones(()))


def mean_loss(balances: Sequence[RouterBalance], coefficient: float, layers: int, like: Tensor) -> Tensor:
    """Returns this rank's part of the load-balancing loss without its coefficient, the mean over `layers`."""
    losses = [loss for balance in balances for loss in balance.losses.values()]
    return (torch.stack(losses).sum() if losses else torch.zeros_like(like)) / (coefficient * layers)


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, weights: Tensor, loss: Tensor) -> Tensor:
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, gradient.new_ones(())
