"""Rollout batches with neutral values in the fields that a test does not give. No test by itself."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_platform.records import RolloutBatch


def neutral_batch(action_mask: Tensor, **fields: Any) -> RolloutBatch:
    """Returns a batch with this mask [B,T]. Fields that are not given have no effect: every row counts and is a group
    of its own, rewards and log-probs of the rollout are 0, and there are no inputs."""
    rows = len(action_mask)
    neutral = {
        "inputs": {},
        "sample_mask": torch.ones(rows, dtype=torch.bool),
        "group_ids": torch.arange(rows),
        "rewards": torch.zeros(action_mask.shape),
        "rollout_log_probs": torch.zeros(action_mask.shape),
    }
    return RolloutBatch(action_mask=action_mask, **neutral | fields)
