"""Reads from a transformers config which layers have experts and how tokens are routed to them."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

FAMILIES = ("qwen2_moe", "qwen3_moe", "mixtral", "deepseek_v2", "deepseek_v3")


@dataclass(frozen=True)
class Mixture:
    """`layers`: which layers have experts; `active`: experts per token; `width`: inner width of an expert.

    Scores are a softmax over all experts, or sigmoids. The best experts come from the `active_groups` best of `groups`
    groups; a group counts the sum of its `best_of_group` best experts. Weights are the scores, `normalized` or not,
    times `scaling`. `correction`: a bias per expert is added to scores for the selection only. `shared_width`: of the
    experts that process all tokens, together; `shared_gate`: their output is weighted by a sigmoid of the input.
    """

    layers: tuple[bool, ...]
    experts: int
    active: int
    width: int
    normalized: bool
    shared_width: int | None = None
    shared_gate: bool = False
    sigmoid: bool = False
    correction: bool = False
    scaling: float = 1.0
    groups: int = 1
    active_groups: int = 1
    best_of_group: int = 1

    @classmethod
    def of(cls, config: PretrainedConfig) -> Mixture | None:
        """Returns the mixture of a transformers config; None for a family without experts."""
        family, layers = config.model_type, range(config.num_hidden_layers)
        if family not in FAMILIES:
            return None
        active = config.num_experts_per_tok
        if family == "mixtral":
            experts, width = config.num_local_experts, config.intermediate_size
            return cls(tuple(True for _ in layers), experts, active, width, normalized=True)
        if family.startswith("qwen"):
            every, without = config.decoder_sparse_step, config.mlp_only_layers
            shared = family == "qwen2_moe"
            return cls(
                tuple(layer not in without and (layer + 1) % every == 0 for layer in layers),
                config.num_experts,
                active,
                config.moe_intermediate_size,
                normalized=config.norm_topk_prob,
                shared_width=config.shared_expert_intermediate_size if shared else None,
                shared_gate=shared,
            )
        third = family == "deepseek_v3"
        grouped = third or config.topk_method == "group_limited_greedy"
        return cls(
            tuple(layer >= config.first_k_dense_replace for layer in layers),
            config.n_routed_experts,
            active,
            config.moe_intermediate_size,
            normalized=third and config.norm_topk_prob,
            shared_width=config.moe_intermediate_size * config.n_shared_experts,
            sigmoid=third,
            correction=third,
            scaling=config.routed_scaling_factor,
            groups=config.n_group if grouped else 1,
            active_groups=config.topk_group if grouped else 1,
            best_of_group=2 if third else 1,
        )

    def scores(self, logits: Tensor) -> Tensor:
        """Returns the scores [N,E] of router logits [N,E] float32."""
        return logits.sigmoid() if self.sigmoid else logits.softmax(dim=-1)

    def routes(self, scores: Tensor, correction: Tensor | None) -> Tensor:
        """Returns the selected experts [N,active] of scores [N,E] and a bias [E]. Not differentiable."""
        choice = scores.detach() if correction is None else scores.detach() + correction
        if self.groups > 1:
            grouped = choice.unflatten(-1, (self.groups, -1))
            values = grouped.topk(self.best_of_group, dim=-1).values.sum(dim=-1)
            best = values.topk(self.active_groups, dim=-1).indices
            kept = values.new_zeros(values.shape).scatter(1, best, 1.0)
            choice = grouped.masked_fill(kept[..., None] == 0, -inf).flatten(1)
        return choice.topk(self.active, dim=-1).indices

    def weights(self, logits: Tensor, scores: Tensor, routes: Tensor) -> Tensor:
        """Returns the weights [N,active] of the selected experts."""
        if self.normalized and not self.sigmoid:
            # softmax(z)_i / sum_selected softmax(z)_j is the softmax over the selected logits
            return logits.gather(1, routes).softmax(dim=-1) * self.scaling
        weights = scores.gather(1, routes)
        if self.normalized:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
        return weights * self.scaling
