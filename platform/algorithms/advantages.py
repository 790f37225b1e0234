"""Advantage estimators: from the rewards of one whole rollout batch to advantages and returns, without gradient.

They run once per rollout batch, before the first update; all epochs use the same results. A position that the policy
did not choose is skipped: it adds no discount and no temporal-difference error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from rl_platform.algorithms.action_levels import to_log_prob_level
from rl_platform.algorithms.aggregation import select
from rl_platform.algorithms.gae import decoupled_gae
from rl_platform.algorithms.statistics import whiten, whiten_rows
from rl_platform.algorithms.validation import check_finite
from rl_platform.config.schema.algorithm import ESTIMATORS, Algorithm, estimator_needs
from rl_platform.extras import required
from rl_platform.records import RolloutBatch

if TYPE_CHECKING:
    from rl_platform.algorithms.shapes import FloatBT
    from rl_platform.algorithms.variants.user_estimator import Estimate

VARIANTS = "rl_platform.algorithms.variants"  # an extra


def advantages(batch: RolloutBatch, algorithm: Algorithm) -> tuple[FloatBT, FloatBT | None]:
    """Returns advantages and returns [B,T] of the batch, 0 outside `batch.mask`. Returns are None without a critic.

    Advantages are whitened over active positions, or over rows (`whiten_over`), if the estimator always whitens; for
    other estimators `normalize_advantages` decides. With `distillation_coef` the reverse KL to the teacher is
    subtracted, and `advantage_clip` bounds the result. None of this changes the returns. If values exist at some
    positions only (`batch.value_mask`), those are the time steps, and each advantage is repeated at the positions that
    follow it. Raises Diverged for rewards or values that are not finite.
    """
    mask = batch.value_positions
    check_finite("rewards", batch.rewards, batch.baseline_mask)
    if batch.values is not None:
        check_finite("values", batch.values, mask)
    estimated, returns = estimator(algorithm.adv_type)(batch, algorithm)
    whitens = estimator_needs(algorithm.adv_type).whitens
    if algorithm.normalize_advantages if whitens is None else whitens:
        over = whiten_rows if algorithm.whiten_over == "sequences" else whiten
        estimated = over(estimated, mask)
    if algorithm.distillation_coef:
        estimated = estimated - algorithm.distillation_coef * reverse_kl(batch)
    if algorithm.advantage_clip is not None:
        estimated = estimated.clamp(*algorithm.advantage_clip)  # the bounds enclose 0, so masked positions stay 0
    return to_log_prob_level(estimated, batch), returns


def reverse_kl(batch: RolloutBatch) -> FloatBT:
    """Returns log pi_old - log pi_teacher of each sampled token [B,T], 0 outside `batch.mask`: on-policy distillation.

    Its expectation is the reverse KL(pi || teacher) of the next token, without what follows it (a discount of 0): GKD
    (Agarwal et al. 2024), MiniLLM (Gu et al. 2024), "On-Policy Distillation" (Thinking Machines Lab 2025).
    """
    assert batch.log_probs is not None
    assert batch.reference_log_probs is not None
    # A_t - c (log pi_old,t - log pi_teacher,t)
    return select(batch.log_probs - batch.reference_log_probs, batch.mask)


def estimator(adv_type: str) -> Estimate:
    """Returns the function of `adv_type`. Raises ConfigError for a user's function that cannot be imported."""
    if adv_type == "gae":
        return _gae
    with required(VARIANTS, "algorithm.adv_type"):
        from rl_platform.algorithms.variants.estimator_kinds import KINDS
        from rl_platform.algorithms.variants.user_estimator import load_estimator
    return KINDS[adv_type] if adv_type in ESTIMATORS else load_estimator(adv_type)


def _gae(batch: RolloutBatch, algorithm: Algorithm) -> tuple[FloatBT, FloatBT]:
    assert batch.values is not None, "gae needs batch.values"
    mask = batch.value_positions
    lam, lam_value = algorithm.gae_lambda, algorithm.gae_lambda_value
    lam_policy: float | Tensor | None = algorithm.gae_lambda_policy
    if algorithm.length_adaptive_alpha > 0:
        with required(VARIANTS, "algorithm.length_adaptive_alpha"):
            from rl_platform.algorithms.variants.length_adaptive import length_adaptive_lambda
        lam_policy = length_adaptive_lambda(mask, algorithm.length_adaptive_alpha)
    rewards = batch.rewards
    if batch.ends is None and batch.end_values is not None:
        # delta_T = r_T + gamma V_end - V_T: the last reward of a row includes the value after its end
        rewards = rewards + algorithm.gamma * batch.end_values
    if algorithm.rollout_is is not None and algorithm.rollout_is.vtrace and batch.loss_weights is not None:
        with required(VARIANTS, "algorithm.rollout_is.vtrace"):
            from rl_platform.algorithms.variants.vtrace import vtrace
        weights = batch.loss_weights
        return vtrace(rewards, batch.values, mask, algorithm.gamma, lam, weights, batch.ends, batch.end_values)
    return decoupled_gae(
        rewards,
        batch.values,
        mask,
        algorithm.gamma,
        lam if lam_policy is None else lam_policy,
        lam if lam_value is None else lam_value,
        batch.ends,
        batch.end_values,
    )
