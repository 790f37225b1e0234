"""Importance weights for the difference between rollout and training engine (`algorithm.rollout_is`).

Always u = log pi_train - log pi_rollout on the active positions: tokens were sampled from the rollout's distribution,
so exp(u) is their importance ratio. Computed once per rollout batch, before it is split. The ratio of current and old
policy is in policy_losses.py.

Truncated importance sampling: Ionides 2008, for two engines Yao et al. 2025. IcePop: Ling Team 2025. Geometric mask of
sequences: Liu, Li et al. 2025, "When Speed Kills Stability".
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_platform.algorithms.aggregation import select
from rl_platform.algorithms.ratios import k3, ratio_of
from rl_platform.algorithms.statistics import masked_mean
from rl_platform.config.schema.algorithm import Rejection, RolloutIS
from rl_platform.records import RolloutBatch

if TYPE_CHECKING:
    from jaxtyping import Bool, Int

    from rl_platform.algorithms.shapes import BoolBT, FloatBT


@torch.no_grad()
def mismatch_weights(
    log_probs: FloatBT, rollout_log_probs: FloatBT, mask: BoolBT, correction: RolloutIS
) -> tuple[FloatBT, dict[str, float]]:
    """Returns constants [B,T] that multiply the policy loss, 0 outside `mask` [B,T] bool, and the metrics `is/*`.

    `correction` selects truncated importance sampling, IcePop or the geometric mask of sequences. It may also reject by
    an estimate of the KL, and veto sequences with a token that is nearly impossible in training. A weight that is not
    finite becomes 0 and is counted. Positions with weight 0 still count in the denominators of the loss.
    """
    u = select(log_probs.float() - rollout_log_probs.float(), mask)
    broken = ~u.isfinite()
    u = u.masked_fill(broken, math.nan)  # NaN is inside no bounds, nor is a sum that contains it
    lengths = mask.sum(dim=1, keepdim=True).clamp(min=1)
    weights, outside = _weights(u, lengths, correction)
    weights = select(weights, mask)
    if correction.batch_normalize:
        mean = masked_mean(weights, mask)
        weights = weights / torch.where(mean > 0, mean, 1.0)
    rejected = torch.zeros_like(mask) if correction.reject is None else mask & _rejected(u, lengths, correction.reject)
    if correction.veto is not None:  # min_t exp(u_t) < veto
        rejected = rejected | mask & (u.nan_to_num(0.0).amin(dim=1, keepdim=True) < math.log(correction.veto))
    weights = weights.masked_fill(rejected, 0.0)
    return weights, _weight_metrics(weights, mask, outside, broken, rejected)


def without_rejected(batch: RolloutBatch, *, values_too: bool) -> RolloutBatch:
    """Returns the batch with an action mask of the positions whose weight is not 0.

    values_too: the batch also trains a value head, whose loss still counts every position.
    """
    assert batch.loss_weights is not None
    weighted = batch.loss_weights > 0
    accepted = replace(batch, action_mask=batch.action_mask & weighted)
    if batch.entropy_units is not None:
        accepted = replace(accepted, entropy_units=batch.entropy_units * weighted)
    if values_too and batch.values is not None and batch.value_mask is None:
        accepted = replace(accepted, value_mask=batch.action_mask)
    return accepted


def _weights(u: FloatBT, lengths: Int[Tensor, "batch 1"], correction: RolloutIS) -> tuple[FloatBT, BoolBT]:
    """Returns weights [B,T], and the positions [B,T] bool outside the bounds. NaN is outside and has weight 0."""
    if correction.mode is None:
        return (~u.isnan()).to(u.dtype), torch.zeros_like(u, dtype=torch.bool)
    by_sequence = correction.level == "sequence" and correction.mode != "sequence_mask"
    # w_t = exp(u_t); of a sequence, w = prod_t exp(u_t) = exp(sum_t u_t)
    weights = ratio_of(u.sum(dim=1, keepdim=True).expand_as(u) if by_sequence else u)
    bounded = weights
    if correction.mode == "sequence_mask":  # g = exp(1/|o| sum_t u_t), the geometric mean of the ratios
        bounded = ratio_of(u.sum(dim=1, keepdim=True) / lengths).expand_as(u)
    low, high = correction.low, math.inf if correction.high is None else correction.high
    outside = ~((bounded >= low) & (bounded <= high))
    if correction.mode == "truncate":  # truncated importance sampling: clip(w, low, high)
        return weights.clamp(low, high).nan_to_num(0.0), outside
    return weights.masked_fill(outside, 0.0), outside  # IcePop and the geometric mask: w inside the bounds, else 0


def _rejected(u: FloatBT, lengths: Int[Tensor, "batch 1"], rejection: Rejection) -> Bool[Tensor, "batch _"]:
    """Returns the positions [B,T] or rows [B,1] to reject, bool. A statistic that is not finite is rejected."""
    match rejection.stat:
        case "k1":
            statistic = -u
        case "k2":
            statistic = 0.5 * u.square()
        case "k3":
            statistic = k3(u)
    if rejection.level == "sequence":
        statistic = statistic.sum(dim=1, keepdim=True) / lengths
    low = -math.inf if rejection.low is None else rejection.low
    return ~((statistic <= rejection.threshold) & (statistic >= low))


def _weight_metrics(
    weights: FloatBT, mask: BoolBT, outside: BoolBT, broken: BoolBT, rejected: BoolBT
) -> dict[str, float]:
    """Returns metrics of the applied weights. ess: effective sample size (sum w)^2 / sum w^2, a share of the tokens."""
    count = int(mask.sum())
    if count == 0:
        return {}
    total, squares = weights.double().sum(), weights.double().square().sum()
    dropped = mask.any(dim=1) & ~(weights > 0).any(dim=1)
    return {
        "is/weight_mean": float(total) / count,
        "is/weight_max": float(weights[mask].max()),
        "is/weight_min": float(weights[mask].min()),
        "is/ess": float(total.square() / squares) / count if squares > 0 else 0.0,
        "is/oob_frac": int((outside & mask).sum()) / count,
        "is/rejected_frac": int(rejected.sum()) / count,
        "is/nonfinite": float(broken.sum()),
        "is/masked_seqs": float(dropped.sum()),
    }
