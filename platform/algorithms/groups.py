"""Estimators without a critic: from the outcome score of each response, alone or against its group, to advantages.

A group is the samples of one prompt, with its id. S is the score of a row, mu and sigma are mean and standard deviation
of the scores of its group, n is the size of the group. Statistics are in float64. Rows without an active position in
`mask` take no part, except those in `compared` (None: `mask`): the others are compared to their score, but they are not
trained on. Whitening over the batch is not here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_platform.algorithms.gae import gae

if TYPE_CHECKING:
    from rl_platform.algorithms.shapes import BoolBT, FloatB, FloatBT, IntB

STD_EPSILON = 1e-6  # added to the deviation, as in GRPO (Shao et al. 2024)
NO_SPREAD = 1e-12  # scores of a group that differ by less are equal up to rounding


@torch.no_grad()
def grpo(
    rewards: FloatBT, mask: BoolBT, group_ids: IntB, std_normalization: bool = True, compared: BoolBT | None = None
) -> FloatBT:
    """(S - mean of the group) / (unbiased deviation of the group + 1e-6) on the active positions.

    S is the sum of a row's rewards. GRPO (Shao et al. 2024); without the division Dr. GRPO (Liu et al.
    2025), and before whitening REINFORCE++-baseline (Hu 2025). Exactly 0 in groups of one sample or of equal scores.
    """
    group = _Groups(rewards, mask if compared is None else compared, group_ids)
    if not std_normalization:
        return _on_actions(group.centred, mask, rewards)  # A = S - mu
    # A = (S - mu) / (sigma + eps)
    variance = group.sums(group.centred.square()) / (group.sizes - 1).clamp(min=1)
    return _on_actions(group.centred / (variance.sqrt() + STD_EPSILON), mask, rewards)


@torch.no_grad()
def rloo(rewards: FloatBT, mask: BoolBT, group_ids: IntB, compared: BoolBT | None = None) -> FloatBT:
    """S - mean of the other samples of the group = n / (n - 1) (S - mean) (Ahmadian et al. 2024)."""
    group = _Groups(rewards, mask if compared is None else compared, group_ids)
    # A = S - 1/(n-1) sum_{j != i} S_j = n/(n-1) (S - mu)
    return _on_actions(group.centred * group.sizes / (group.sizes - 1).clamp(min=1), mask, rewards)


@torch.no_grad()
def opo(rewards: FloatBT, mask: BoolBT, group_ids: IntB, compared: BoolBT | None = None) -> FloatBT:
    """S - sum of l S / sum of l over the group, l the active positions of a row: On-Policy RL with Optimal baseline.

    Hao et al. 2025 (arXiv 2505.23585): the baseline of least variance if the squared gradient of a row grows with its
    length. Exactly 0 in groups of one sample or of equal scores.
    """
    counted = mask if compared is None else compared
    group, lengths = _Groups(rewards, counted, group_ids), counted.sum(dim=1).double()
    # b = sum_j l_j S_j / sum_j l_j
    baseline = group.sums(lengths * group.scores) / group.sums(lengths).clamp(min=1)
    return _on_actions(torch.where(group.varied, group.scores - baseline, 0.0), mask, rewards)


@torch.no_grad()
def optimal_token_baseline(
    rewards: FloatBT,
    mask: BoolBT,
    group_ids: IntB,
    log_probs: FloatBT,
    squared_probs: FloatBT,
    weights: FloatBT | None = None,
    compared: BoolBT | None = None,
) -> FloatBT:
    """Rewards from a token on, minus their mean over the responses of the group that have such a token.

    The mean weighs a response by the squared gradients of its tokens so far, in the logits: long and uncertain
    responses count more. Tokens are counted from the first active position of a row. `log_probs` [B,T] of the sampled
    tokens, `squared_probs` [B,T] the sum of pi^2 over the vocabulary, `weights` [B,T] factors of the policy loss.
    Exactly 0 where one response alone has such a token, or all have equal rewards from there on. "The Optimal Token
    Baseline" (2026, arXiv 2602.07078).
    """
    counted = mask if compared is None else compared
    to_go = reward_to_go(rewards, counted, 1.0).double()
    # w_t = ||d log pi_t / d logits||^2 = 1 - 2 pi_t + sum_v pi_v^2, not below 0 by rounding
    energy = (1.0 - 2.0 * log_probs.double().exp() + squared_probs.double()).clamp(min=0.0)
    if weights is not None:
        energy = energy * weights.double().square()
    energy = torch.where(counted, energy, 0.0).cumsum(dim=1)[counted]  # W_t = sum_{s <= t} w_s
    _, group = torch.unique(group_ids, return_inverse=True)
    token = (group[:, None] * mask.shape[1] + counted.cumsum(dim=1) - 1)[counted]
    number, scores = len(mask) * mask.shape[1], to_go[counted]
    # B_t = sum_i W_it G_it / sum_i W_it
    sums = [energy.new_zeros(number).index_add_(0, token, x)[token] for x in (energy * scores, energy)]
    highest, lowest = (
        scores.new_full((number,), start).scatter_reduce_(0, token, scores, kind)[token]
        for kind, start in (("amax", -torch.inf), ("amin", torch.inf))
    )
    varied = (highest - lowest > NO_SPREAD) & (sums[1] > 0)
    centred = torch.zeros_like(to_go)
    centred[counted] = torch.where(varied, scores - sums[0] / sums[1], 0.0)
    return torch.where(mask, centred.to(rewards.dtype), 0.0)


@torch.no_grad()
def leave_one_out(rewards: FloatBT, mask: BoolBT, group_ids: IntB, compared: BoolBT | None = None) -> FloatBT:
    """(S - mean of the others) / (unbiased deviation of the others + 1e-6), otherwise as `grpo`.

    NeMo-RL's default for grpo. If the others are all equal, their deviation is 0 or a rounding error, and the advantage
    would be in the thousands. A lone success in a group is therefore not divided by the standard deviation.
    """
    group = _Groups(rewards, mask if compared is None else compared, group_ids)
    means, deviations = group.of_the_others()
    scale = torch.where(deviations > 0, 1.0 / (deviations + STD_EPSILON), 1.0)
    return _on_actions(torch.where(group.varied, (group.scores - means) * scale, 0.0), mask, rewards)


@torch.no_grad()
def remax(rewards: FloatBT, mask: BoolBT, baselines: FloatB) -> FloatBT:
    """Rewards from a position on, minus the reward `baselines` [B] of the greedy response to the same prompt.

    ReMax (Li et al. 2023, arXiv 2310.10505).
    """
    # A_t = sum_{s >= t} r_s - b
    return torch.where(mask, reward_to_go(rewards, mask, 1.0) - baselines[:, None], 0.0)


@torch.no_grad()
def raw(rewards: FloatBT, mask: BoolBT) -> FloatBT:
    """S itself on the active positions."""
    return _on_actions(outcome_scores(rewards, mask), mask, rewards)


def reward_to_go(rewards: FloatBT, mask: BoolBT, gamma: float) -> FloatBT:
    """G_t = r_t + gamma G_next over active positions: REINFORCE++ (Hu 2025) before its whitening.

    Positions before an observation get the rewards after it. Equal to the returns of GAE with lambda 1 and values 0.
    """
    return gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)[1]


def local_penalties(rewards: FloatBT, penalties: FloatBT, mask: BoolBT, gamma: float) -> FloatBT:
    """Returns `reward_to_go` of the task's rewards alone, minus the penalty of each position that `rewards` contain.

    The KL penalty of REINFORCE++ in NeMo-RL: the penalty of a token measures its own drift, not that of later tokens.
    """
    # A_t = sum_{s >= t} gamma^(s-t) r_s - beta K_t
    return torch.where(mask, reward_to_go(rewards + penalties, mask, gamma) - penalties, 0.0)


def outcome_scores(rewards: FloatBT, mask: BoolBT) -> FloatB:
    """Returns [B] float64: S = sum of r_t over the active positions."""
    return torch.where(mask, rewards, 0.0).sum(dim=1, dtype=torch.float64)


class _Groups:
    """sizes [B]: rows that count in a row's group; centred [B]: scores minus the group's mean, 0 without spread;
    varied [B]: the row counts, and its group has a spread."""

    def __init__(self, rewards: FloatBT, mask: BoolBT, group_ids: IntB) -> None:
        scores, counted = outcome_scores(rewards, mask), mask.any(dim=1)
        self.scores, self._counted = scores, counted
        ids, self._group = torch.unique(group_ids, return_inverse=True)
        self._number = len(ids)
        self.sizes = self.sums(torch.ones_like(scores)).clamp(min=1)
        centred = scores - self.sums(scores) / self.sizes
        highest, lowest = self._extrema("amax", -torch.inf), self._extrema("amin", torch.inf)
        self.varied = counted & (highest - lowest > NO_SPREAD)
        self.centred = torch.where(self.varied, centred, 0.0)

    def sums(self, x: FloatB) -> FloatB:
        """Returns [B]: the sum of `x` over the rows of the same group that count."""
        total = x.new_zeros(self._number)
        return total.index_add_(0, self._group, torch.where(self._counted, x, 0.0))[self._group]

    def of_the_others(self) -> tuple[FloatB, FloatB]:
        """Mean and unbiased deviation [B] of the other rows of a row's group; deviation 0 where those do not differ.

        In two passes over a table of groups [N,G], as [N,G,G]: differences of sums would leave rounding errors.
        """
        order = self._group.argsort(stable=True)
        counts = torch.bincount(self._group, minlength=self._number)
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[self._group[order]]
        where = self._group, place
        width = int(counts.max())
        scores = self.scores.new_zeros(self._number, width).index_put_(where, self.scores)[:, None, :]
        counted = self._counted.new_zeros(self._number, width).index_put_(where, self._counted)[:, None, :]
        others = counted & ~torch.eye(width, dtype=torch.bool, device=order.device)
        number = others.sum(dim=2, keepdim=True).clamp(min=1)
        means = torch.where(others, scores, 0.0).sum(dim=2, keepdim=True) / number
        squares = torch.where(others, scores - means, 0.0).square().sum(dim=2, keepdim=True)
        highest, lowest = (torch.where(others, scores, edge) for edge in (-torch.inf, torch.inf))
        spread = highest.amax(dim=2, keepdim=True) - lowest.amin(dim=2, keepdim=True)
        deviations = torch.where(spread > NO_SPREAD, (squares / (number - 1).clamp(min=1)).sqrt(), 0.0)
        return means.squeeze(2)[where], deviations.squeeze(2)[where]

    def _extrema(self, kind: str, start: float) -> FloatB:
        scores = torch.where(self._counted, self.scores, start)
        return scores.new_full((self._number,), start).scatter_reduce_(0, self._group, scores, kind)[self._group]


def _on_actions(per_row: FloatB, mask: BoolBT, like: FloatBT) -> FloatBT:
    return torch.where(mask, per_row.to(like.dtype)[:, None], 0.0)
