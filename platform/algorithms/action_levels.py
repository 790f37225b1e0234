"""Levels of an action chunk: the positions of its rewards, values, log-probs and entropies, and their denominators.

A row is one choice of an embodied policy: a chunk of K actions of D components each, executed one after another until
an episode ends. It has one position per log-prob: P = 1, K or K D, in the order of execution. The reward or value of a
whole chunk or action is at its first position. A mask marks these positions; they are the time steps of GAE, which
skips the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from rl_platform.algorithms.aggregation import Denominators
from rl_platform.config.schema.algorithm import ActionLevel, Algorithm, RewardLevel
from rl_platform.records import RolloutBatch

if TYPE_CHECKING:
    from rl_platform.algorithms.shapes import FloatBT


@dataclass(frozen=True)
class ActionLevels:
    """The shape of a chunk, and whether each quantity has one number per chunk, per action or per component.

    num_actions: K, of a chunk. num_components: D, of an action; 1 for a discrete one.
    """

    num_actions: int
    num_components: int
    rewards: RewardLevel = "chunk_level"
    log_probs: ActionLevel = "chunk_level"
    entropy: ActionLevel = "chunk_level"

    @classmethod
    def of(cls, algorithm: Algorithm, num_actions: int, num_components: int) -> ActionLevels:
        """Returns the levels that `algorithm` selects."""
        return cls(num_actions, num_components, algorithm.reward_type, algorithm.logprob_type, algorithm.entropy_type)

    @property
    def single(self) -> bool:
        """Whether each quantity has one number per row, so that nothing is summed, spread or masked."""
        return self.num_actions == self.num_positions == self._count(self.entropy) == 1

    @property
    def num_positions(self) -> int:
        """P, the positions of a row."""
        return self._count(self.log_probs)

    @property
    def num_values(self) -> int:
        """R, the number of rewards and of values of a row; at most P."""
        return self._count(self.rewards)

    def _count(self, level: ActionLevel) -> int:
        counts = {"chunk_level": 1, "action_level": self.num_actions}
        return counts.get(level, self.num_actions * self.num_components)


def to_log_prob_level(advantages: FloatBT, batch: RolloutBatch) -> FloatBT:
    """Returns [B,T]: the advantage of a chunk or action, repeated at all its positions; 0 outside `batch.mask`."""
    if batch.value_mask is None:
        return advantages
    # source_t: the last position with a value at or before t, which is the first of t's chunk or action
    places = torch.arange(advantages.shape[1], device=advantages.device)
    source = torch.where(batch.value_mask, places, 0).cummax(dim=1).values
    return torch.where(batch.mask, advantages.gather(1, source), 0.0)


def denominators_of(batch: RolloutBatch, horizon: float, *, nominal: bool = False) -> Denominators:
    """Returns `Denominators.of` a whole mini-batch, and those of values and entropy where their levels differ."""
    denominators = Denominators.of(batch.mask, horizon, batch.correct, nominal=nominal)
    if batch.value_mask is not None:
        denominators = replace(denominators, values=Denominators.of(batch.value_positions, horizon, nominal=nominal))
    if batch.entropy_units is not None:
        units = float((batch.entropy_units * batch.sample_mask[:, None]).sum())
        denominators = replace(denominators, entropy=replace(denominators, tokens=units))
    return denominators
