"""Token rewards: an outcome reward on the last action, process rewards on theirs, and the KL penalty inside the reward.

Scores are scaled and shaped before (shaping.py). The reward of an embodied step needs no placement and is not handled
here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_platform.algorithms.aggregation import select
from rl_platform.algorithms.kl import kl_estimate
from rl_platform.config.schema.algorithm import Algorithm, KLPenalty
from rl_platform.records import RolloutBatch

if TYPE_CHECKING:
    from jaxtyping import Shaped

    from rl_platform.algorithms.shapes import BoolBT, FloatBT


@torch.no_grad()
def place_outcome_rewards(scores: Shaped[Tensor, " batch"], action_mask: BoolBT) -> FloatBT:
    """Returns rewards [B,T]: each of the `scores` [B] on the last position of `action_mask` [B,T], 0 on the others.

    The last action, not the last token: a trajectory that ends with an observation or with padding keeps its reward.
    A row without any action gets no reward.
    """
    positions = torch.arange(action_mask.shape[1], device=action_mask.device)
    last = torch.where(action_mask, positions, -1).amax(dim=1, keepdim=True)
    return torch.where(positions == last, scores[:, None].float(), 0.0)


@torch.no_grad()
def place_process_rewards(addressed: FloatBT, action_mask: BoolBT) -> tuple[FloatBT, int]:
    """Returns [B,T] rewards of single steps, each on an action, and how many had to be moved there.

    `addressed` [B,T]: a reward outside `action_mask` [B,T] moves to the nearest action before it, or to the
    row's first one where there is none before; several on one action add up. A row without any action gets nothing.
    """
    positions = torch.arange(action_mask.shape[1], device=action_mask.device)
    before = torch.where(action_mask, positions, -1).cummax(dim=1).values
    first = action_mask.to(torch.int8).argmax(dim=1, keepdim=True)
    given = torch.where(action_mask.any(dim=1, keepdim=True), addressed.float(), 0.0)
    placed = torch.zeros_like(given).scatter_add_(1, torch.where(before >= 0, before, first), given)
    return placed, int(((given != 0) & ~action_mask).sum())


@torch.no_grad()
def penalize_kl(
    rewards: FloatBT,
    log_probs: FloatBT,
    reference_log_probs: FloatBT,
    mask: BoolBT,
    coefficient: float,
    estimator: KLPenalty,
    full_kl: FloatBT | None = None,
    output_clip: float | None = 10.0,
) -> tuple[FloatBT, FloatBT]:
    """Returns rewards_t - coefficient * K_t on the positions of `mask`, and K (0 outside `mask`); all tensors [B,T].

    `log_probs` are those of the policy before the update; `full_kl` [B,T] is K for the estimator full; `output_clip`
    bounds k3. Advantages and the critic's returns must both be built from these rewards.
    """
    if estimator == "full":
        assert full_kl is not None
        kl = select(full_kl, mask)
    else:
        kl = kl_estimate(log_probs, reference_log_probs, mask, estimator, output_clip=output_clip)
    # r_t - beta K_t  (Ziegler et al. 2019)
    return rewards - coefficient * kl, kl


def penalized(batch: RolloutBatch, algorithm: Algorithm, coefficient: float) -> tuple[RolloutBatch, FloatBT]:
    """Returns the batch with the penalty of `use_kl_in_reward` subtracted from its rewards, and K [B,T].

    Rows that do not count but serve as a baseline pay as the others do.
    """
    assert batch.log_probs is not None
    assert batch.reference_log_probs is not None
    rewards, kl = penalize_kl(
        batch.rewards,
        batch.log_probs,
        batch.reference_log_probs,
        batch.baseline_mask,
        coefficient,
        algorithm.kl_penalty,
        batch.full_kl,
        algorithm.kl_output_clip,
    )
    return replace(batch, rewards=rewards, kl_penalties=coefficient * kl), kl
