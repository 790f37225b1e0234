"""PF-PPO (policy filtration, Shen and Zhang 2024): rows with informative rewards are trained on more.

Applied once per rollout, after advantages, returns and metrics of the whole batch, so that none depends on the choice.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from rl_platform.config.schema.algorithm import PFPPO
from rl_platform.errors import DataError
from rl_platform.records import RolloutBatch

if TYPE_CHECKING:
    from rl_platform.algorithms.shapes import BoolB, FloatB

SMALLEST_WEIGHT = 1e-8  # rewards that are all 0 give a uniform choice


def row_probabilities(scores: FloatB, counted: BoolB, options: PFPPO) -> FloatB:
    """Returns [B] float64, with sum 1: how likely each row is drawn; 0 for rows that are not `counted` [B] bool.

    In proportion to 1e-8 plus: |s|^power (`pow`); 1 for the highest and the lowest score, else 0 (`max_min`); 0.4 for
    the highest score, else 0.1 (`max_random`). Raises DataError for a counted score without a finite
    weight.
    """
    scores = scores.double()
    highest = scores == scores[counted].max()
    match options.method:
        case "pow":  # |s|^k
            weights = scores.abs() ** options.power
        case "max_min":
            weights = (highest | (scores == scores[counted].min())).double()
        case "max_random":
            weights = torch.where(highest, 0.4, 0.1).double()
    unusable = counted & ~(torch.isfinite(scores) & torch.isfinite(weights))
    if bool(unusable.any()):
        row = int(unusable.nonzero()[0])
        raise DataError(f"the reward of row {row}, {float(scores[row])}, gives no finite weight for PF-PPO")
    weights = torch.where(counted, weights + SMALLEST_WEIGHT, 0.0)
    # p_i = w_i / sum_j w_j
    return weights / weights.sum()


def apply_pf_ppo(
    batch: RolloutBatch, scores: FloatB, options: PFPPO, generator: torch.Generator
) -> tuple[RolloutBatch, dict[str, float]]:
    """Returns the batch that is trained on, and `pf_ppo/effective_rows`, 1 / sum(p^2): how many rows share the weight.

    resample: as many rows as before, drawn with replacement by `generator`, every field of a row together. weight: the
    same rows, `loss_weights` multiplied by weights of mean 1 over the rows that count. They act on the policy loss
    alone: the critic still fits the returns of the policy.
    """
    counted = batch.mask.any(dim=1)
    probabilities = row_probabilities(scores, counted, options)
    metrics = {"pf_ppo/effective_rows": float(1.0 / probabilities.square().sum())}
    if options.mode == "resample":
        return batch.select(torch.multinomial(probabilities, len(batch), True, generator=generator)), metrics
    factors = (probabilities * counted.sum())[:, None].float().expand(batch.action_mask.shape)
    weights = factors if batch.loss_weights is None else batch.loss_weights * factors
    return replace(batch, loss_weights=weights.contiguous()), metrics
