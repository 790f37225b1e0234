"""Advantages of one step: the temporal-difference error, which is GAE with a lambda of 0."""

import torch
from torch import Tensor

from rl_platform.config.schema.algorithm import Algorithm
from rl_platform.records import RolloutBatch


def td_error(batch: RolloutBatch, algorithm: Algorithm) -> tuple[Tensor, Tensor]:
    following = torch.where(batch.ends, batch.end_values, batch.values.roll(-1, dims=1))
    # delta_t = r_t + gamma V_{t+1} - V_t
    errors = batch.rewards + algorithm.gamma * following - batch.values
    return errors, batch.values + errors
