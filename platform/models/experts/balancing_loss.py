"""The load-balancing loss of routers, sequence by sequence, so that no split of a mini-batch changes it.

Each router adds the loss of its layer to the backward pass of a micro-batch. Megatron's routers call `RouterBalance`
themselves; `BalancedRouters` does it for those of transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rl_platform.models.experts.routers import Routing, routers, scores
from rl_platform.models.forward import TokenModel, packed_rows

if TYPE_CHECKING:
    from jaxtyping import Bool, Float
    from torch.autograd.function import FunctionCtx

    from rl_platform.records import RolloutBatch


def sequence_balance(
    scores: Float[Tensor, "tokens experts"],
    selected: Bool[Tensor, "tokens experts"],
    membership: Float[Tensor, "batch tokens"],
    lengths: Float[Tensor, " batch"],
    active: int,
    total: Callable[[Tensor], Tensor],
) -> Float[Tensor, " batch"]:
    """E sum_i f_i P_i of each sequence: 1 if all experts have equal shares of tokens and scores.

    The sequence-wise balance loss of DeepSeek-V2 and -V3 (2024), without its factor. `scores` of the router are
    normalised per token; `membership`: 1 where a token belongs to a sequence; `lengths`: tokens of whole sequences;
    `active`: K experts per token.
    `total` sums counts over the ranks that have other tokens of the same sequences: then the results of these ranks
    add up to the loss. The gradient flows through P only.
    """
    # f_bi = sum_t [i selected for t] / (K L_b)
    fractions = total(membership @ selected.to(membership.dtype)) / (active * lengths[:, None])
    # P_bi = sum_t s_ti / sum_j s_tj / L_b
    shares = membership @ (scores / scores.sum(dim=1, keepdim=True)) / lengths[:, None]
    return scores.shape[1] * (fractions * shares).sum(dim=1)


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
        attached: Tensor = _Attach.apply(weights, loss)  # type: ignore[no-untyped-call]
        return attached


class BalancedRouters:
    """The routers of a transformers model whose ranks, `world_size`, split each mini-batch; `coefficient` of the loss.

    For every mini-batch, call `begin` before the forward of each part, and `finish` after the last backward.
    """

    def __init__(self, model: TokenModel, coefficient: float, world_size: int) -> None:
        self._model, self._world_size = model, world_size
        # as with the other losses, the mean of FSDP over all ranks becomes a sum
        self._factor = coefficient * world_size
        self._balances: list[RouterBalance] = []
        self._routers = routers(model.model.backbone)
        for layer, router in self._routers.items():
            router.register_forward_hook(partial(self._attach, layer))

    def begin(self, part: RolloutBatch, sequences: int) -> None:
        """`part`: of a mini-batch with this number of valid sequences."""
        context = self._model.context
        packed, _, _ = packed_rows(part, context)
        lengths = part.inputs["lengths"]
        members = membership(packed.flat_index, lengths, len(packed.tokens))

        def total(counts: Tensor) -> Tensor:
            if context is not None:
                dist.all_reduce(counts, group=context.group)
            return counts

        factors = part.sample_mask.float() * (self._factor / max(sequences, 1))
        self._balances.append(RouterBalance(factors, members, lengths.float(), total))

    def finish(self, like: Tensor) -> Tensor:
        """Returns the loss without its coefficient, the mean over layers, on every rank."""
        balances, self._balances = self._balances, []
        loss = mean_loss(balances, self._factor, len(self._routers), like)
        if self._world_size > 1:
            dist.all_reduce(loss)  # each rank has its tokens
        return loss

    def _attach(self, layer: int, router: nn.Module, _: object, output: tuple[Tensor, Tensor, Tensor]) -> object:
        if not self._balances:
            return output
        logits, weights, routes = Routing.of(output)
        selected = torch.zeros_like(logits, dtype=torch.bool).scatter(1, routes, True)
        attached = self._balances[-1].attached(layer, weights, scores(router, logits), selected, routes.shape[1])
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
