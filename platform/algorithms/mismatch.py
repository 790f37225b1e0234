"""Metrics of the mismatch: rollout engine and training engine give the same token slightly different log-probs.

Always u = log pi_train - log pi_rollout on the active positions. Computed once per rollout batch, before it is split.
Weights that correct for the difference are in variants/importance_weights.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_platform.algorithms.aggregation import select
from rl_platform.algorithms.ratios import LOG_RATIO_LIMIT, k3
from rl_platform.algorithms.statistics import active_numbers

if TYPE_CHECKING:
    from rl_platform.algorithms.shapes import BoolBT, FloatBT


@torch.no_grad()
def mismatch_metrics(log_probs: FloatBT, rollout_log_probs: FloatBT, mask: BoolBT) -> dict[str, float]:
    """Returns how far the two engines disagree, over all active positions [B,T].

    prob_error = mean exp|u| (1 is perfect; above 1.05 look into it), abs_logp = mean |u|, kl = mean(-u) and
    k3 = mean(exp(u) - 1 - u), two estimates of KL(rollout || training).
    """
    active = active_numbers(mask)
    u = (active(log_probs).float() - active(rollout_log_probs)).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    size = u.abs()
    each = {"prob_error": size.exp(), "abs_logp": size, "kl": -u, "k3": k3(u)}
    count = max(len(u), 1)
    return {f"mismatch/{name}": float(x.sum(dtype=torch.float64)) / count for name, x in each.items()}


@torch.no_grad()
def token_mismatch_metrics(log_probs: FloatBT, rollout_log_probs: FloatBT, mask: BoolBT) -> dict[str, float]:
    """Returns more metrics where a row [B,T] is a sequence of tokens; empty if no position is active.

    prob_diff_mean, _max: of |p_training - p_rollout|; prob_diff_pearson: correlation of the two (left out where one
    does not vary); chi2_token, chi2_seq: mean w^2 - 1 of the tokens' ratios and of the sequences' products;
    ppl_ratio: mean over sequences of training perplexity over rollout perplexity; seq_prob_error_*: extrema and mean
    over sequences of mean exp|u|.
    """
    if not bool(mask.any()):
        return {}
    trained, rolled = (select(x, mask).double() for x in (log_probs, rollout_log_probs))
    u = (trained - rolled).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    rows = mask.any(dim=1)
    lengths = mask.sum(dim=1)[rows]
    row_sums = u.sum(dim=1)[rows]
    row_errors = select(u.abs().exp(), mask).sum(dim=1)[rows] / lengths
    p, q = trained[mask].exp(), rolled[mask].exp()
    result = {
        "mismatch/prob_diff_mean": float((p - q).abs().mean()),
        "mismatch/prob_diff_max": float((p - q).abs().max()),
        "mismatch/chi2_token": float(torch.expm1(2.0 * u[mask]).mean()),
        "mismatch/chi2_seq": float(torch.expm1(2.0 * row_sums.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)).mean()),
        "mismatch/ppl_ratio": float((-row_sums / lengths).exp().mean()),
        "mismatch/seq_prob_error_max": float(row_errors.max()),
        "mismatch/seq_prob_error_mean": float(row_errors.mean()),
        "mismatch/seq_prob_error_min": float(row_errors.min()),
    }
    p, q = p - p.mean(), q - q.mean()
    spread = float((p.square().sum() * q.square().sum()).sqrt())
    return result | ({"mismatch/prob_diff_pearson": float((p * q).sum()) / spread} if spread > 0 else {})
