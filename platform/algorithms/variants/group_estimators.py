"""Estimators without a critic: from the outcome score of each response, alone or against its group, to advantages.

A group is the samples of one prompt, with its id. S is the score of a row, mu and sigma are mean and standard deviation
of the scores of its group, n is the size of the group. Statistics are in float64. Rows without an active position in
`mask` take no part, except those in `compared` (None: `mask`): the others are compared to their score, but they are not
trained on. Whitening over the batch is not here, nor are the estimators of estimator_kinds.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_platform.algorithms.reward_sums import outcome_scores

if TYPE_CHECKING:
    from rl_platform.algorithms.shapes import BoolBT, FloatB, FloatBT, IntB

STD_EPSILON = 1e-6  # added to the deviation, as verl and NeMo-RL do; the paper of GRPO divides by the deviation alone
NO_SPREAD = 1e-12  # scores of a group that differ by less are equal up to rounding


@torch.no_grad()
def grpo(
    rewards: FloatBT, mask: BoolBT, group_ids: IntB, std_normalization: bool = True, compared: BoolBT | None = None
) -> FloatBT:
    """Returns (S - mean of the group) / (unbiased deviation of the group + 1e-6) on the active positions [B,T].

    S is the sum of a row's rewards. GRPO (Shao et al. 2024). Without the division it is Dr. GRPO (Liu et al. 2025), and
    REINFORCE++-baseline (Hu 2025) before its whitening. Exactly 0 in groups of one sample or of equal scores.
    """
    group = Groups(rewards, mask if compared is None else compared, group_ids)
    if not std_normalization:
        return on_actions(group.centred, mask, rewards)  # A = S - mu
    # A = (S - mu) / (sigma + eps)
    variance = group.sums(group.centred.square()) / (group.sizes - 1).clamp(min=1)
    return on_actions(group.centred / (variance.sqrt() + STD_EPSILON), mask, rewards)


@torch.no_grad()
def rloo(rewards: FloatBT, mask: BoolBT, group_ids: IntB, compared: BoolBT | None = None) -> FloatBT:
    """Returns S - mean of the other samples of the group, on the active positions [B,T]. RLOO (Ahmadian et al. 2024).

    Exactly 0 in groups of one sample or of equal scores.
    """
    group = Groups(rewards, mask if compared is None else compared, group_ids)
    # A = S - 1/(n-1) sum_{j != i} S_j = n/(n-1) (S - mu)
    return on_actions(group.centred * group.sizes / (group.sizes - 1).clamp(min=1), mask, rewards)


@torch.no_grad()
def raw(rewards: FloatBT, mask: BoolBT) -> FloatBT:
    """Returns S itself on the active positions [B,T]."""
    return on_actions(outcome_scores(rewards, mask), mask, rewards)


class Groups:
    """The scores of a batch, compared inside each group. All tensors are [B], one entry per row.

    scores: S, float64. counted: whether the row takes part. group: index of its group, below `number`. sizes: rows of
    its group that take part. varied: whether the row takes part and the scores of its group differ. centred: S minus
    the mean of the group; 0 where not `varied`.
    """

    def __init__(self, rewards: FloatBT, mask: BoolBT, group_ids: IntB) -> None:
        scores, counted = outcome_scores(rewards, mask), mask.any(dim=1)
        self.scores, self.counted = scores, counted
        ids, self.group = torch.unique(group_ids, return_inverse=True)
        self.number = len(ids)
        self.sizes = self.sums(torch.ones_like(scores)).clamp(min=1)
        centred = scores - self.sums(scores) / self.sizes
        highest, lowest = self._extrema("amax", -torch.inf), self._extrema("amin", torch.inf)
        self.varied = counted & (highest - lowest > NO_SPREAD)
        self.centred = torch.where(self.varied, centred, 0.0)

    def sums(self, x: FloatB) -> FloatB:
        """Returns [B]: the sum of `x` over the rows of the same group that count."""
        total = x.new_zeros(self.number)
        return total.index_add_(0, self.group, torch.where(self.counted, x, 0.0))[self.group]

    def _extrema(self, kind: str, start: float) -> FloatB:
        scores = torch.where(self.counted, self.scores, start)
        return scores.new_full((self.number,), start).scatter_reduce_(0, self.group, scores, kind)[self.group]


def on_actions(per_row: FloatB, mask: BoolBT, like: FloatBT) -> FloatBT:
    """Returns [B,T] in the type of `like`: the number of each row on its active positions, 0 on the others."""
    return torch.where(mask, per_row.to(like.dtype)[:, None], 0.0)
