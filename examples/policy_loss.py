"""A policy loss: Simple Policy Optimization (Xie et al. 2024), a quadratic penalty in place of clipping."""

from rl_platform.algorithms.metrics import Metrics, active_positions, over


def held_ratio(log_probs, old_log_probs, advantages, mask, algorithm):
    # with d = ratio - 1 and eps = clip_ratio_low: |A| d^2 / (2 eps) - A (1 + d)
    change = (log_probs - old_log_probs).exp() - 1
    loss = advantages.abs() * change.square() / (2 * algorithm.clip_ratio_low) - advantages * (1 + change)
    beyond = (change.detach().abs() > algorithm.clip_ratio_low).sum()
    return loss, Metrics(means=over(active_positions(loss, mask), {"actor/beyond_frac": beyond}))
