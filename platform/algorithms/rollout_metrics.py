"""Metrics of one rollout for the log: rewards, advantages, returns, values, mismatch, lengths.

Computed once per rollout on the whole batch before it is split. Metrics of the updates are in losses.py; components and
runners measure what needs more than the batch (truncation, prompt lengths, throughput).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_platform.algorithms.mismatch import mismatch_metrics, token_mismatch_metrics
from rl_platform.algorithms.statistics import active_numbers, explained_variance, variance
from rl_platform.records import RolloutBatch

if TYPE_CHECKING:
    from jaxtyping import Float


@torch.no_grad()
def rollout_metrics(batch: RolloutBatch) -> dict[str, float]:
    """Returns metrics of the fields that the batch has, over its active positions; call it before
    `RolloutBatch.flatten`.

    `reward/*` are of the rewards in the batch: per trajectory, or per step if the batch has `ends` (a row is a stretch
    of steps). They, advantages, returns and values are measured at the positions of values
    (`RolloutBatch.value_positions`), everything else at the positions of log-probs. With `batch/active_positions` 0
    there is nothing to train on.
    """
    mask, valued = batch.mask, batch.value_positions
    result = {"batch/active_positions": float(mask.sum())}
    active = active_numbers(valued)
    if batch.ends is None:
        rewards, lengths = _of_trajectories(batch)
        result |= _spread("reward", rewards, "/")
        result |= _spread("len/response", lengths)
    else:
        result |= _spread("reward", active(batch.rewards), "/")
    if batch.advantages is not None:
        advantages = active(batch.advantages)
        result |= _spread("adv", advantages, "/")
        result["adv/std"] = math.sqrt(variance(advantages))
    if batch.returns is not None and batch.values is not None:
        result |= _spread("critic/returns", active(batch.returns))
        result |= _spread("critic/values", active(batch.values))
        explained, valid = explained_variance(batch.returns, batch.values, valued)
        result |= {"critic/explained_var": explained, "critic/explained_var_valid": float(valid)}
    if batch.log_probs is not None:
        result |= mismatch_metrics(batch.log_probs, batch.rollout_log_probs, mask)
        if batch.ends is None:
            result |= token_mismatch_metrics(batch.log_probs, batch.rollout_log_probs, mask)
    return result


def _of_trajectories(batch: RolloutBatch) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    """Returns the reward and the number of sampled tokens of each trajectory with a row that counts.

    Every row has the reward of its trajectory, whose own is their mean. Its tokens are those of all rows.
    """
    rewards, lengths = torch.where(batch.mask, batch.rewards, 0.0).sum(dim=1), batch.mask.sum(dim=1).float()
    counted = batch.mask.any(dim=1)
    if batch.continues is None:
        return rewards[counted], lengths[counted]
    number = ((~batch.continues).cumsum(0) - 1)[counted]  # of each row's trajectory
    sums = torch.zeros(3, len(batch)).index_add_(
        1, number, torch.stack([rewards[counted], lengths[counted], torch.ones(len(number))])
    )
    rewards, lengths, rows = sums[:, sums[2] > 0]
    return rewards / rows, lengths


def _spread(name: str, numbers: Float[Tensor, " n"], separator: str = "_") -> dict[str, float]:
    """Returns mean, min and max of [N]; nothing if there are none."""
    if not len(numbers):
        return {}
    lowest, highest = numbers.aminmax()
    return {
        f"{name}{separator}mean": float(numbers.sum(dtype=torch.float64)) / len(numbers),
        f"{name}{separator}min": float(lowest),
        f"{name}{separator}max": float(highest),
    }
