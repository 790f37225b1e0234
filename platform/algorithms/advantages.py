"""Advantage estimators: from rewards and values of one whole rollout batch to advantages and returns, without gradient.

They run once per rollout batch, before the first update, and their results are frozen for all epochs. Masks are carried
forward: a position that the policy did not choose costs no discount and contributes no temporal-difference error.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rl_platform.algorithms.statistics import whiten
from rl_platform.config.algorithm import Algorithm
from rl_platform.records import RolloutBatch


def advantages(batch: RolloutBatch, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    """Advantages and returns [B,T] of the batch, exactly 0 outside `batch.mask`.

    `algorithm.normalize_advantages` whitens the advantages over all active positions of the batch; returns never are.
    """
    assert batch.values is not None, "advantages need batch.values"
    match algorithm.adv_type:
        case "gae":
            estimated, returns = gae(
                batch.rewards,
                batch.values,
                batch.mask,
                algorithm.gamma,
                algorithm.gae_lambda,
                batch.ends,
                batch.end_values,
            )
    if algorithm.normalize_advantages:
        estimated = whiten(estimated, batch.mask)
    return estimated, returns


@torch.no_grad()
def gae(
    rewards: Tensor,
    values: Tensor,
    mask: Tensor,
    gamma: float,
    lam: float | Tensor,
    ends: Tensor | None = None,
    end_values: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation with masks carried forward; every tensor [B,T]. Returns (advantages, returns).

    Scanning each row from its end with v_next = 0 and g = 0:

        where ends_t:  v_next = end_values_t, g = 0
        where mask_t:  g = r_t + gamma v_next - V_t + gamma lam g;  A_t = g;  v_next = V_t
        elsewhere:     both carried on unchanged, A_t = 0

    and returns = (A + V) * mask. Equal to the textbook recursion (Schulman et al. 2016) on the active positions alone.
    `lam` is a number or one per row [B]. `ends`, `end_values`: an episode or the rollout ends after this position, and
    the value of the state that follows (0 if the episode terminated); None: one episode per row, worth 0 after its end.
    Values outside `mask`, and end values where nothing ends, may be anything.
    """
    active = mask.t()
    rewards, values = (torch.where(active, x.t(), 0.0) for x in (rewards, values))
    if ends is None or end_values is None:
        continues, after_end = None, None
    else:
        continues, after_end = ~ends.t(), torch.where(ends.t(), end_values.t(), 0.0)

    following = _following_values(values, active, continues, after_end)
    # delta_t = r_t + gamma v_next - V_t
    deltas = torch.where(active, rewards + gamma * following - values, 0.0)
    # g_t = delta_t + gamma lam g_{t+1}: factor 1 where masked out, 0 where an episode ends
    factors = torch.where(active, torch.as_tensor(gamma * lam, dtype=values.dtype, device=values.device), 1.0)
    if continues is not None:
        factors = factors * continues
    carried = _reverse_scan(deltas, factors)

    estimated = torch.where(active, carried, 0.0).t().contiguous()
    return estimated, estimated + values.t()


def _following_values(values: Tensor, active: Tensor, continues: Tensor | None, after_end: Tensor | None) -> Tensor:
    """v_next [T,B]: the value of the next action's state, or what follows the end of the episode."""
    if bool(active.all()):
        carried = values
    else:  # c_t = V_t where active, else the end value if the episode ends here, else c_{t+1}
        start = values if after_end is None else torch.where(active, values, after_end)
        passes = ~active if continues is None else ~active & continues
        carried = _reverse_scan(start, passes.to(values.dtype))
    following = torch.cat((carried[1:], torch.zeros_like(carried[:1])))
    if continues is not None and after_end is not None:
        following = torch.where(continues, following, after_end)
    return following


def _reverse_scan(terms: Tensor, factors: Tensor) -> Tensor:
    """x_t = terms_t + factors_t * x_{t+1} over the first dimension of [T,B], x_T = 0: one operation per step."""
    result = terms.contiguous().clone()
    columns = result.unbind(0)
    for column, factor, following in zip(
        reversed(columns[:-1]), reversed(factors.contiguous().unbind(0)[:-1]), reversed(columns[1:]), strict=True
    ):
        column.addcmul_(factor, following)
    return result
