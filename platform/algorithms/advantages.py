"""Advantage estimators: from the rewards of one whole rollout batch to advantages and returns, without gradient.

They run once per rollout batch, before the first update, and their results are frozen for all epochs. Masks are carried
forward: a position that the policy did not choose costs no discount and contributes no temporal-difference error.
"""

from __future__ import annotations

from torch import Tensor

from rl_platform.algorithms.action_levels import to_log_prob_level
from rl_platform.algorithms.gae import decoupled_gae, length_adaptive_lambda
from rl_platform.algorithms.groups import group_baseline, grpo, raw, reward_to_go, rloo
from rl_platform.algorithms.statistics import whiten
from rl_platform.algorithms.user_estimator import Estimate, first_not_finite, load_estimator
from rl_platform.config.algorithm import Algorithm
from rl_platform.config.estimators import estimator_of
from rl_platform.errors import Diverged
from rl_platform.records import RolloutBatch


def advantages(batch: RolloutBatch, algorithm: Algorithm) -> tuple[Tensor, Tensor | None]:
    """Advantages and returns [B,T] of the batch, exactly 0 outside `batch.mask`; returns None: there is no critic.

    Advantages are whitened over all active positions of the batch where the estimator says so, else where
    `algorithm.normalize_advantages` does; returns never are. Raises Diverged for rewards or values that are not finite.
    Where values stand at some positions only (`batch.value_mask`), those are the time steps, and each advantage is then
    repeated at the positions that follow it.
    """
    mask = batch.value_positions
    for name, tensor in (("rewards", batch.rewards), ("values", batch.values)):
        wrong = None if tensor is None else first_not_finite(tensor, mask)
        if tensor is not None and wrong is not None:
            raise Diverged(f"{name} of the rollout are not finite, first {name}{list(wrong)} = {tensor[wrong].item()}")
    estimated, returns = estimator(algorithm.adv_type)(batch, algorithm)
    whitens = estimator_of(algorithm.adv_type).whitens
    if algorithm.normalize_advantages if whitens is None else whitens:
        estimated = whiten(estimated, mask)
    return to_log_prob_level(estimated, batch), returns


def estimator(adv_type: str) -> Estimate:
    """The function behind `algorithm.adv_type`. Raises ConfigError for a user's function that cannot be imported."""
    return FUNCTIONS.get(adv_type) or load_estimator(adv_type)


def _gae(batch: RolloutBatch, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    assert batch.values is not None, "gae needs batch.values"
    mask = batch.value_positions
    lam_policy: float | Tensor = _or(algorithm.gae_lambda_policy, algorithm.gae_lambda)
    if algorithm.length_adaptive_alpha > 0:
        lam_policy = length_adaptive_lambda(mask, algorithm.length_adaptive_alpha)
    lam_value = _or(algorithm.gae_lambda_value, algorithm.gae_lambda)
    boundaries = batch.ends, batch.end_values
    return decoupled_gae(batch.rewards, batch.values, mask, algorithm.gamma, lam_policy, lam_value, *boundaries)


def _or(number: float | None, default: float) -> float:
    return default if number is None else number


FUNCTIONS: dict[str, Estimate] = {
    "gae": _gae,
    "grpo": lambda b, a: (grpo(b.rewards, b.mask, b.group_ids, a.grpo_std_normalization), None),
    "rloo": lambda b, _: (rloo(b.rewards, b.mask, b.group_ids), None),
    "reinforce_plus_plus": lambda b, a: (reward_to_go(b.rewards, b.mask, a.gamma), None),
    "reinforce_plus_plus_baseline": lambda b, _: (group_baseline(b.rewards, b.mask, b.group_ids), None),
    "raw": lambda b, _: (raw(b.rewards, b.mask), None),
}
