"""Sums of rewards over a response: its outcome score, and its rewards from each position on.

Estimators that compare the responses of a group are in variants/group_estimators.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_platform.algorithms.gae import gae

if TYPE_CHECKING:
    from rl_platform.algorithms.shapes import BoolBT, FloatB, FloatBT


def reward_to_go(rewards: FloatBT, mask: BoolBT, gamma: float) -> FloatBT:
    """Returns G_t = r_t + gamma G_next over active positions: REINFORCE++ (Hu 2025) before its whitening.

    Positions before an observation get the rewards after it. Equal to the returns of GAE with lambda 1 and values 0.
    """
    return gae(rewards, torch.zeros_like(rewards), mask, gamma, 1.0)[1]


def outcome_scores(rewards: FloatBT, mask: BoolBT) -> FloatB:
    """Returns [B] float64: S = sum of r_t over the active positions."""
    return torch.where(mask, rewards, 0.0).sum(dim=1, dtype=torch.float64)
