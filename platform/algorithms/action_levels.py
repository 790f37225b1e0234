"""Levels of an action chunk: the positions of its rewards, values, log-probs and entropies, and their denominators.

A row is one choice of an embodied policy: a chunk of K actions of D components each, executed one after another until
an episode ends. Its positions are those of the log-probs, P = 1, K or K D of them in the order of execution. A number
of a whole chunk or action is at its first position, and a mask marks these positions. They alone are the time steps of
GAE, which skips the others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from rl_platform.algorithms.aggregation import Denominators
from rl_platform.config.schema.algorithm import ActionLevel, Algorithm, RewardLevel
from rl_platform.records import RolloutBatch

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Shaped

    from rl_platform.algorithms.shapes import FloatBT


@dataclass(frozen=True)
class ActionLevels:
    """K `num_actions` of a chunk, D `num_components` of an action (1 of a discrete one), and the level of each
    quantity: one number per chunk, action or component.

    `executed` [...,K] bool in the methods: the actions that count; others add nothing.
    """

    num_actions: int
    num_components: int
    rewards: RewardLevel = "chunk_level"
    log_probs: ActionLevel = "chunk_level"
    entropy: ActionLevel = "chunk_level"

    @classmethod
    def of(cls, algorithm: Algorithm, num_actions: int, num_components: int) -> ActionLevels:
        return cls(num_actions, num_components, algorithm.reward_type, algorithm.logprob_type, algorithm.entropy_type)

    @property
    def single(self) -> bool:
        """One number of each kind per choice, so that there is nothing to add up, spread or mask."""
        return self.num_actions == self.positions == self._count(self.entropy) == 1

    @property
    def positions(self) -> int:
        """P, per row."""
        return self._count(self.log_probs)

    @property
    def values(self) -> int:
        """R, the rewards and values per row; at most P."""
        return self._count(self.rewards)

    def of_components(
        self, x: Float[Tensor, "rows actions components"], executed: Bool[Tensor, "rows actions"]
    ) -> Float[Tensor, "rows positions"]:
        """Adds up log-probs or entropies x [M,K,D] of components -> [M,P] at the level of log-probs."""
        x = torch.where(executed[..., None], x, 0.0)
        return _added_up(x.flatten(1), self.positions)

    def placed_rewards(self, rewards: Float[Tensor, "*rows actions"]) -> Float[Tensor, "*rows positions"]:
        """Rewards [...,K] of actions, 0 of those not executed -> [...,P], without discount inside a position."""
        return self._placed(_added_up(rewards, self.values))

    def placed_values(self, values: Float[Tensor, "*rows values"]) -> Float[Tensor, "*rows positions"]:
        """Values [...,R] -> [...,P], 0 elsewhere, differentiable."""
        return self._placed(values)

    def mask(self, executed: Bool[Tensor, "*rows actions"]) -> Bool[Tensor, "*rows positions"]:
        """Returns [...,P] bool: positions with an executed action."""
        return self._active(executed, self.log_probs)

    def value_mask(self, executed: Bool[Tensor, "*rows actions"]) -> Bool[Tensor, "*rows positions"] | None:
        """Returns [...,P] bool: positions of executed rewards and their values; None: every position of `mask`."""
        return None if self.values == self.positions else self._placed(self._active(executed, self.rewards))

    def entropy_units(self, executed: Bool[Tensor, "*rows actions"]) -> Float[Tensor, "*rows positions"] | None:
        """Returns [...,P]: how many executed chunks, actions or components (the entropy's level) are counted at a
        position; None: one at each of `mask`."""
        units = self._active(executed, self.entropy).float()
        if units.shape[-1] == self.positions:
            return None
        if units.shape[-1] > self.positions:
            return _added_up(units, self.positions)
        return self._placed(units)

    def _count(self, level: ActionLevel) -> int:
        counts = {"chunk_level": 1, "action_level": self.num_actions}
        return counts.get(level, self.num_actions * self.num_components)

    def _active(self, executed: Bool[Tensor, "*rows actions"], level: ActionLevel) -> Bool[Tensor, "*rows units"]:
        if level == "chunk_level":
            return executed.any(dim=-1, keepdim=True)
        return executed if level == "action_level" else executed.repeat_interleave(self.num_components, dim=-1)

    def _placed(self, x: Shaped[Tensor, "*rows units"]) -> Shaped[Tensor, "*rows positions"]:
        """[...,n] -> [...,P], each at the first of its P / n positions."""
        return F.pad(x[..., None], (0, self.positions // x.shape[-1] - 1)).flatten(-2)


def _added_up(x: Float[Tensor, "*rows units"], count: int) -> Float[Tensor, "*rows sums"]:
    """[...,n] -> [...,count], the sums of n / count neighbours."""
    return x.reshape(*x.shape[:-1], count, -1).sum(-1)


def to_log_prob_level(advantages: FloatBT, batch: RolloutBatch) -> FloatBT:
    """Returns [B,T]: the advantage of a chunk or action at each of its positions, 0 outside `batch.mask`."""
    if batch.value_mask is None:
        return advantages
    # the first position of an executed chunk or action has the value: the last such position at or before each other
    places = torch.arange(advantages.shape[1], device=advantages.device)
    source = torch.where(batch.value_mask, places, 0).cummax(dim=1).values
    return torch.where(batch.mask, advantages.gather(1, source), 0.0)


def denominators_of(batch: RolloutBatch, horizon: float, *, nominal: bool = False) -> Denominators:
    """Returns `Denominators.of` a whole mini-batch, for policy and KL terms; with others for values and entropy where
    levels differ."""
    denominators = Denominators.of(batch.mask, horizon, batch.correct, nominal=nominal)
    if batch.value_mask is not None:
        denominators = replace(denominators, values=Denominators.of(batch.value_positions, horizon, nominal=nominal))
    if batch.entropy_units is not None:
        units = float((batch.entropy_units * batch.sample_mask[:, None]).sum())
        denominators = replace(denominators, entropy=replace(denominators, tokens=units))
    return denominators
