"""Rewards of greedy responses as baselines (`adv_type: remax`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from rl_platform.algorithms.shaping import ShapedRewards
from rl_platform.records import RolloutBatch, Trajectory
from rl_platform.runners.trajectories import mean


def with_baselines(
    batch: RolloutBatch, greedy: Sequence[Trajectory], shaped: ShapedRewards
) -> tuple[RolloutBatch, dict[str, float]]:
    """Returns the batch with the reward of the greedy response to each row's prompt, process rewards included.

    shaped: rewards of `greedy`. Rows do not count if the greedy response to their prompt has no score.
    """
    rewards = {
        trajectory.prompt.index: outcome + sum(reward for _, reward in trajectory.step_rewards)
        for trajectory, outcome in zip(greedy, shaped.rewards.tolist(), strict=True)
        if trajectory.valid
    }
    row_baselines = [rewards.get(index) for index in batch.group_ids.tolist()]
    known = torch.tensor([baseline is not None for baseline in row_baselines])
    baselines = torch.tensor([baseline or 0.0 for baseline in row_baselines])
    metrics = {"baseline/mean": mean([*rewards.values()]), "baseline/unscored": float(len(greedy) - len(rewards))}
    return replace(batch, baselines=baselines, sample_mask=batch.sample_mask & known), metrics
