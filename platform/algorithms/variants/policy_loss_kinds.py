"""Policy losses beside PPO's clipped surrogate, each from a paper.

Arguments and results are those of `policy_losses.ppo_clip`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_platform.algorithms.aggregation import select
from rl_platform.algorithms.metrics import Metrics
from rl_platform.algorithms.policy_losses import (
    LARGEST_RATIO,
    clip_counts,
    clipped_surrogate,
    ppo_clip,
    ratio_metrics,
    with_gradient,
)
from rl_platform.algorithms.ratios import LOG_RATIO_LIMIT, ratio_of
from rl_platform.algorithms.variants.user_policy_loss import PolicyLoss
from rl_platform.config.schema.algorithm import Algorithm

if TYPE_CHECKING:
    from rl_platform.algorithms.shapes import BoolBT, FloatBT


def gspo(
    log_probs: FloatBT, old_log_probs: FloatBT, advantages: FloatBT, mask: BoolBT | None, algorithm: Algorithm
) -> tuple[FloatBT, Metrics]:
    """Returns `clipped_surrogate` with one ratio per row: the geometric mean of its positions' ratios.

    The sequence ratio of GSPO (Zheng et al. 2025, arXiv 2507.18071, eq. 7), the same at every position of the row. Rows
    must be whole.
    """
    # s_i = exp(1/|o_i| sum_t log(pi / pi_old))
    row_means = _row_means(select(log_probs - old_log_probs, mask), mask)
    loss, gradient, metrics = clipped_surrogate(select(row_means.detach(), mask), advantages, mask, algorithm)
    return with_gradient(row_means, loss, gradient), metrics


def gspo_token(
    log_probs: FloatBT, old_log_probs: FloatBT, advantages: FloatBT, mask: BoolBT | None, algorithm: Algorithm
) -> tuple[FloatBT, Metrics]:
    """Returns the loss of `gspo` with the gradient of each position on its own log-prob only.

    Advantages may therefore differ inside a row. GSPO-token (Zheng et al. 2025, eq. 13 and 14), the form that verl
    calls gspo. Loss and gradient equal those of `gspo` where all positions of a row have one advantage and one weight.
    """
    # s_it = stop(s_i) pi / stop(pi)
    row_means = _row_means(select(log_probs.detach() - old_log_probs, mask), mask)
    loss, gradient, metrics = clipped_surrogate(select(row_means, mask), advantages, mask, algorithm)
    return with_gradient(log_probs, loss, gradient), metrics


def gmpo(
    log_probs: FloatBT, old_log_probs: FloatBT, advantages: FloatBT, mask: BoolBT | None, algorithm: Algorithm
) -> tuple[FloatBT, Metrics]:
    """Returns -A exp(mean over the row's active positions of log rho, each clipped on the side to which A moves it).

    Geometric-mean policy optimization (Zhao et al. 2025, arXiv 2507.20673): log rho of a position is at most
    `clip_ratio_high` where A >= 0 and at least -`clip_ratio_low` where A < 0. Rows must be whole.
    """
    log_ratio = select(log_probs - old_log_probs, mask)
    losing = select(-advantages, mask) > 0  # A < 0
    # min(log rho, eps_high) where A >= 0, max(log rho, -eps_low) where A < 0
    low, high = log_ratio.clamp(min=-algorithm.clip_ratio_low), log_ratio.clamp(max=algorithm.clip_ratio_high)
    bounded = torch.where(losing, low, high)
    row_means = _row_means(bounded, mask)
    with torch.no_grad():
        # L_it = -A_it (prod_s rho_is)^(1/|o_i|), its own derivative with respect to the exponent
        means = select(row_means, mask).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        loss = select(-advantages, mask) * means.exp()
        clipped = clip_counts((log_ratio > bounded) & ~losing, (log_ratio < bounded) & losing)
        metrics = ratio_metrics(means, means.exp(), clipped, mask)
    return with_gradient(row_means, loss, loss), metrics


def sapo(
    log_probs: FloatBT, old_log_probs: FloatBT, advantages: FloatBT, mask: BoolBT | None, algorithm: Algorithm
) -> tuple[FloatBT, Metrics]:
    """Returns -A (4 / tau) sigmoid(tau (rho - 1)), a soft gate in place of the clip.

    tau is `sapo_tau_pos` where A > 0, else `sapo_tau_neg`. Soft adaptive policy optimization (Gao et al. 2025, arXiv
    2511.20347). At rho = 1 the gradient is that of -A log pi. It falls off smoothly on both sides.
    """
    with torch.no_grad():
        log_ratio = select(log_probs - old_log_probs, mask)
        ratio = ratio_of(log_ratio)
        cost = select(-advantages, mask)
        tau = torch.where(cost < 0, algorithm.sapo_tau_pos, algorithm.sapo_tau_neg)
        gate = torch.sigmoid(tau * (ratio - 1.0))
        loss = cost * 4.0 / tau * gate
        # dL / d log rho = -A 4 sigmoid (1 - sigmoid) rho
        gradient = cost * 4.0 * gate * (1.0 - gate) * ratio
        metrics = ratio_metrics(log_ratio, ratio, {}, mask)
    return with_gradient(log_probs, loss, gradient), metrics


def cispo(
    log_probs: FloatBT, old_log_probs: FloatBT, advantages: FloatBT, mask: BoolBT | None, algorithm: Algorithm
) -> tuple[FloatBT, Metrics]:
    """Returns -stop(clip(rho, 1 - clip_ratio_low, 1 + clip_ratio_high)) A log_probs: clipping bounds a weight.

    No position loses its gradient. MiniMax-M1 (2025). `actor/clip_frac` counts positions whose weight is bounded,
    whatever the sign of A.
    """
    with torch.no_grad():
        log_ratio = select(log_probs - old_log_probs, mask)
        ratio = log_ratio.exp()
        # rho^ = clip(rho, 1 - eps_low, 1 + eps_high)
        bounded = ratio.clamp(1.0 - algorithm.clip_ratio_low, min(1.0 + algorithm.clip_ratio_high, LARGEST_RATIO))
        clipped = clip_counts(ratio > bounded, ratio < bounded)
        metrics = ratio_metrics(log_ratio, ratio, clipped, mask)
        weight = select(-advantages, mask) * bounded
    return weight * select(log_probs, mask), metrics  # -stop(rho^) A log pi


def ratio_only(
    log_probs: FloatBT, old_log_probs: FloatBT, advantages: FloatBT, mask: BoolBT | None, algorithm: Algorithm
) -> tuple[FloatBT, Metrics]:
    """Returns -A rho, without a clip."""
    with torch.no_grad():
        log_ratio = select(log_probs - old_log_probs, mask)
        ratio = ratio_of(log_ratio)
        loss = select(-advantages, mask) * ratio  # -A rho, its own derivative with respect to log rho
        metrics = ratio_metrics(log_ratio, ratio, {}, mask)
    return with_gradient(log_probs, loss, loss), metrics


def at_covariant(
    loss: FloatBT, log_probs: FloatBT, old_log_probs: FloatBT, covariant: BoolBT, algorithm: Algorithm
) -> FloatBT:
    """Returns the `loss` [B,T] of clip_cov or kl_cov with the positions of large covariance [B,T] treated apart.

    clip_cov: they have neither loss nor gradient. kl_cov: kl_coef |log rho| is added. Cui et al. 2025.
    """
    if algorithm.policy_loss == "clip_cov":
        return loss.masked_fill(covariant, 0.0)
    # L_t + beta |log pi - log pi_old|
    return loss + algorithm.covariance.kl_coef * select(log_probs - old_log_probs, covariant).abs()


def reinforce(
    log_probs: FloatBT, old_log_probs: FloatBT, advantages: FloatBT, mask: BoolBT | None, algorithm: Algorithm
) -> tuple[FloatBT, Metrics]:
    """Returns -A log_probs (Williams 1992). The old log-probs serve the metrics only."""
    with torch.no_grad():
        log_ratio = select(log_probs - old_log_probs, mask)
        metrics = ratio_metrics(log_ratio, log_ratio.exp(), {}, mask)
    return select(-advantages, mask) * select(log_probs, mask), metrics  # -A log pi


def dppo_tv(
    log_probs: FloatBT, old_log_probs: FloatBT, advantages: FloatBT, mask: BoolBT | None, algorithm: Algorithm
) -> tuple[FloatBT, Metrics]:
    """Returns `_divergence_masked` with the total variation |pi - pi_old| of the token: DPPO-Binary-TV."""
    new, old = (select(x.detach(), mask).exp() for x in (log_probs, old_log_probs))
    return _divergence_masked(log_probs, old_log_probs, advantages, mask, algorithm, (new - old).abs())


def dppo_kl(
    log_probs: FloatBT, old_log_probs: FloatBT, advantages: FloatBT, mask: BoolBT | None, algorithm: Algorithm
) -> tuple[FloatBT, Metrics]:
    """Returns `_divergence_masked` with the KL(pi_old || pi) of "this token or another one": DPPO-Binary-KL."""
    new, old = (select(x.detach(), mask) for x in (log_probs, old_log_probs))
    p, q = new.exp(), old.exp()
    others_new, others_old = ((1.0 - x).clamp(min=1e-8) for x in (p, q))
    # D = q log(q / p) + (1 - q) log((1 - q) / (1 - p)), q = pi_old, p = pi
    divergence = q * (old - new) + others_old * (others_old.log() - others_new.log())
    return _divergence_masked(log_probs, old_log_probs, advantages, mask, algorithm, divergence)


def _row_means(log_ratio: FloatBT, mask: BoolBT | None) -> FloatBT:
    """Returns the mean over the active positions of a row, at each of its positions [B,T].

    `log_ratio` is 0 outside `mask`.
    """
    lengths = log_ratio.shape[1] if mask is None else mask.sum(dim=1, keepdim=True).clamp(min=1)
    return (log_ratio.sum(dim=1, keepdim=True) / lengths).expand_as(log_ratio)


def _divergence_masked(
    log_probs: FloatBT,
    old_log_probs: FloatBT,
    advantages: FloatBT,
    mask: BoolBT | None,
    algorithm: Algorithm,
    divergence: FloatBT,
) -> tuple[FloatBT, Metrics]:
    """Returns -A rho; 0 where the step leads away from pi_old and `divergence` [B,T] is above its threshold.

    Divergence PPO (Qi et al. 2026, arXiv 2602.04879) with its binary approximations. `clip_ratio_high` is the threshold
    for A > 0, `clip_ratio_low` for A < 0. Without the truncation of rho that verl adds.
    """
    with torch.no_grad():
        log_ratio = select(log_probs - old_log_probs, mask)
        ratio = ratio_of(log_ratio)
        cost = select(-advantages, mask)
        # L = -M A rho, with M = 0 where A > 0, rho > 1, D > clip_ratio_high, or A < 0, rho < 1, D > clip_ratio_low
        above = (cost < 0) & (log_ratio > 0) & (divergence > algorithm.clip_ratio_high)
        below = (cost > 0) & (log_ratio < 0) & (divergence > algorithm.clip_ratio_low)
        loss = (cost * ratio).masked_fill(above | below, 0.0)  # its own derivative with respect to log rho
        metrics = ratio_metrics(log_ratio, ratio, clip_counts(above, below), mask)
    return with_gradient(log_probs, loss, loss), metrics


KINDS: dict[str, PolicyLoss] = {  # by the name of `algorithm.policy_loss`
    "reinforce": reinforce,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "gmpo": gmpo,
    "sapo": sapo,
    "cispo": cispo,
    "clip_cov": ppo_clip,
    "kl_cov": ratio_only,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
}
