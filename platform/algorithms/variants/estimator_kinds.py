"""Advantage estimators beside GAE, by their name in `algorithm.adv_type`. Notation: see group_estimators.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_platform.algorithms.reward_sums import reward_to_go
from rl_platform.algorithms.variants.group_estimators import (
    NO_SPREAD,
    STD_EPSILON,
    Groups,
    grpo,
    on_actions,
    raw,
    rloo,
)
from rl_platform.config.schema.algorithm import Algorithm
from rl_platform.records import RolloutBatch

if TYPE_CHECKING:
    from rl_platform.algorithms.shapes import BoolBT, FloatB, FloatBT, IntB
    from rl_platform.algorithms.variants.user_estimator import Estimate


@torch.no_grad()
def opo(rewards: FloatBT, mask: BoolBT, group_ids: IntB, compared: BoolBT | None = None) -> FloatBT:
    """Returns S - sum(l S) / sum(l) on the active positions [B,T], with sums over the group and l the length of a row.

    On-Policy RL with Optimal baseline (Hao et al. 2025, arXiv 2505.23585): the baseline of least variance if the
    squared gradient of a row grows with l, its active positions. Exactly 0 in groups of one sample or of equal scores.
    """
    counted = mask if compared is None else compared
    group, lengths = Groups(rewards, counted, group_ids), counted.sum(dim=1).double()
    # b = sum_j l_j S_j / sum_j l_j
    baseline = group.sums(lengths * group.scores) / group.sums(lengths).clamp(min=1)
    return on_actions(torch.where(group.varied, group.scores - baseline, 0.0), mask, rewards)


@torch.no_grad()
def optimal_token_baseline(
    rewards: FloatBT,
    mask: BoolBT,
    group_ids: IntB,
    log_probs: FloatBT,
    squared_probs: FloatBT,
    weights: FloatBT | None = None,
    compared: BoolBT | None = None,
) -> FloatBT:
    """Returns the rewards from each token on, minus their mean over the group's responses that have such a token [B,T].

    The mean weighs a response by the squared gradients of its tokens so far, in the logits: long and uncertain
    responses count more. Tokens are counted from the first active position of a row. `log_probs` [B,T] of the sampled
    tokens, `squared_probs` [B,T] the sum of pi^2 over the vocabulary, `weights` [B,T] factors of the policy loss.
    Exactly 0 where one response alone has such a token, or all have equal rewards from there on. "The Optimal Token
    Baseline" (2026, arXiv 2602.07078).
    """
    counted = mask if compared is None else compared
    to_go = reward_to_go(rewards, counted, 1.0).double()
    # w_t = ||d log pi_t / d logits||^2 = 1 - 2 pi_t + sum_v pi_v^2, not below 0 by rounding
    energy = (1.0 - 2.0 * log_probs.double().exp() + squared_probs.double()).clamp(min=0.0)
    if weights is not None:
        energy = energy * weights.double().square()
    energy = torch.where(counted, energy, 0.0).cumsum(dim=1)[counted]  # W_t = sum_{s <= t} w_s
    _, group = torch.unique(group_ids, return_inverse=True)
    token = (group[:, None] * mask.shape[1] + counted.cumsum(dim=1) - 1)[counted]
    number, scores = len(mask) * mask.shape[1], to_go[counted]
    # B_t = sum_i W_it G_it / sum_i W_it
    weighted_sum, weight = (energy.new_zeros(number).index_add_(0, token, x)[token] for x in (energy * scores, energy))
    highest, lowest = (
        scores.new_full((number,), start).scatter_reduce_(0, token, scores, kind)[token]
        for kind, start in (("amax", -torch.inf), ("amin", torch.inf))
    )
    varied = (highest - lowest > NO_SPREAD) & (weight > 0)
    centred = torch.zeros_like(to_go)
    centred[counted] = torch.where(varied, scores - weighted_sum / weight, 0.0)
    return torch.where(mask, centred.to(rewards.dtype), 0.0)


@torch.no_grad()
def leave_one_out(rewards: FloatBT, mask: BoolBT, group_ids: IntB, compared: BoolBT | None = None) -> FloatBT:
    """Returns (S - mean of the others) / (unbiased deviation of the others + 1e-6) on the active positions [B,T].

    NeMo-RL's default for grpo. The others are the other rows of the group. If their scores are all equal, their
    deviation is 0 or a rounding error, and the advantage would be in the thousands. A lone success in a group is
    therefore not divided by the standard deviation.
    """
    group = Groups(rewards, mask if compared is None else compared, group_ids)
    means, deviations = statistics_of_others(group)
    scale = torch.where(deviations > 0, 1.0 / (deviations + STD_EPSILON), 1.0)
    return on_actions(torch.where(group.varied, (group.scores - means) * scale, 0.0), mask, rewards)


@torch.no_grad()
def remax(rewards: FloatBT, mask: BoolBT, baselines: FloatB) -> FloatBT:
    """Returns the rewards from each position on, minus the reward of the prompt's greedy response, `baselines` [B].

    ReMax (Li et al. 2023, arXiv 2310.10505).
    """
    # A_t = sum_{s >= t} r_s - b
    return torch.where(mask, reward_to_go(rewards, mask, 1.0) - baselines[:, None], 0.0)


def local_penalties(rewards: FloatBT, penalties: FloatBT, mask: BoolBT, gamma: float) -> FloatBT:
    """Returns `reward_to_go` of the task's rewards alone, minus the penalty of each position that `rewards` contain.

    The KL penalty of REINFORCE++ in NeMo-RL: the penalty of a token measures its own drift, not that of later tokens.
    """
    # A_t = sum_{s >= t} gamma^(s-t) r_s - beta K_t
    return torch.where(mask, reward_to_go(rewards + penalties, mask, gamma) - penalties, 0.0)


def statistics_of_others(groups: Groups) -> tuple[FloatB, FloatB]:
    """Returns mean and unbiased deviation [B] of the other rows of a row's group; the deviation is 0 if they are equal.

    Computed in two passes over all pairs of a group [groups,size,size]. Subtracting a row from the group's sums would
    leave rounding errors.
    """
    order = groups.group.argsort(stable=True)
    counts = torch.bincount(groups.group, minlength=groups.number)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[groups.group[order]]
    where = groups.group, place
    width = int(counts.max())
    scores = groups.scores.new_zeros(groups.number, width).index_put_(where, groups.scores)[:, None, :]
    counted = groups.counted.new_zeros(groups.number, width).index_put_(where, groups.counted)[:, None, :]
    others = counted & ~torch.eye(width, dtype=torch.bool, device=order.device)
    number = others.sum(dim=2, keepdim=True).clamp(min=1)
    means = torch.where(others, scores, 0.0).sum(dim=2, keepdim=True) / number
    squares = torch.where(others, scores - means, 0.0).square().sum(dim=2, keepdim=True)
    highest, lowest = (torch.where(others, scores, edge) for edge in (-torch.inf, torch.inf))
    spread = highest.amax(dim=2, keepdim=True) - lowest.amin(dim=2, keepdim=True)
    deviations = torch.where(spread > NO_SPREAD, (squares / (number - 1).clamp(min=1)).sqrt(), 0.0)
    return means.squeeze(2)[where], deviations.squeeze(2)[where]


def _grpo(batch: RolloutBatch, algorithm: Algorithm) -> tuple[FloatBT, None]:
    arguments = batch.rewards, batch.mask, batch.group_ids
    if algorithm.grpo_leave_one_out:
        return leave_one_out(*arguments, batch.baseline_mask), None
    return grpo(*arguments, algorithm.grpo_std_normalization, batch.baseline_mask), None


def _reinforce_plus_plus(batch: RolloutBatch, algorithm: Algorithm) -> tuple[FloatBT, None]:
    if algorithm.reinforce_kl_credit == "local" and batch.kl_penalties is not None:
        return local_penalties(batch.rewards, batch.kl_penalties, batch.mask, algorithm.gamma), None
    return reward_to_go(batch.rewards, batch.value_positions, algorithm.gamma), None


def _opo(batch: RolloutBatch, _: Algorithm) -> tuple[FloatBT, None]:
    return opo(batch.rewards, batch.mask, batch.group_ids, batch.baseline_mask), None


def _optimal_token_baseline(batch: RolloutBatch, _: Algorithm) -> tuple[FloatBT, None]:
    assert batch.log_probs is not None
    assert batch.squared_probs is not None, "optimal_token_baseline needs batch.squared_probs"
    distributions = batch.log_probs, batch.squared_probs, batch.loss_weights
    return optimal_token_baseline(batch.rewards, batch.mask, batch.group_ids, *distributions, batch.baseline_mask), None


def _remax(batch: RolloutBatch, _: Algorithm) -> tuple[FloatBT, None]:
    assert batch.baselines is not None, "remax needs batch.baselines"
    return remax(batch.rewards, batch.mask, batch.baselines), None


KINDS: dict[str, Estimate] = {
    "grpo": _grpo,
    "rloo": lambda b, _: (rloo(b.rewards, b.mask, b.group_ids, b.baseline_mask), None),
    "reinforce_plus_plus": _reinforce_plus_plus,
    "reinforce_plus_plus_baseline": lambda b, _: (grpo(b.rewards, b.mask, b.group_ids, False, b.baseline_mask), None),
    "raw": lambda b, _: (raw(b.rewards, b.mask), None),
    "distillation": lambda b, _: (torch.zeros_like(b.rewards), None),
    "opo": _opo,
    "optimal_token_baseline": _optimal_token_baseline,
    "remax": _remax,
}
