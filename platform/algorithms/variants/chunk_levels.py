"""Quantities of action chunks, summed and placed at the levels of `ActionLevels`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_platform.algorithms.action_levels import ActionLevels
from rl_platform.config.schema.algorithm import ActionLevel

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Shaped


class ChunkLevels(ActionLevels):
    """Levels with the quantities of chunks. `executed` [...,K] bool: the actions that count; the others add nothing."""

    def of_components(
        self, x: Float[Tensor, "rows actions components"], executed: Bool[Tensor, "rows actions"]
    ) -> Float[Tensor, "rows positions"]:
        """Returns sums [M,P] of the log-probs or entropies x [M,K,D] of components, at the level of log-probs."""
        x = torch.where(executed[..., None], x, 0.0)
        return _summed(x.flatten(1), self.num_positions)

    def placed_rewards(self, rewards: Float[Tensor, "*rows actions"]) -> Float[Tensor, "*rows positions"]:
        """Returns the rewards [...,K] of actions (0 if not executed) as [...,P], summed without discount."""
        return self._placed(_summed(rewards, self.num_values))

    def placed_values(self, values: Float[Tensor, "*rows values"]) -> Float[Tensor, "*rows positions"]:
        """Returns the values [...,R] as [...,P], 0 at the other positions; differentiable."""
        return self._placed(values)

    def mask(self, executed: Bool[Tensor, "*rows actions"]) -> Bool[Tensor, "*rows positions"]:
        """Returns [...,P] bool: positions with an executed action."""
        return self._active(executed, self.log_probs)

    def value_mask(self, executed: Bool[Tensor, "*rows actions"]) -> Bool[Tensor, "*rows positions"] | None:
        """Returns [...,P] bool: positions of rewards and values of executed actions; None: those of `mask`."""
        return None if self.num_values == self.num_positions else self._placed(self._active(executed, self.rewards))

    def entropy_units(self, executed: Bool[Tensor, "*rows actions"]) -> Float[Tensor, "*rows positions"] | None:
        """Returns [...,P]: the number of executed chunks, actions or components whose entropy a position holds.

        The level of the entropy decides which of the three. None: one at each position of `mask`.
        """
        units = self._active(executed, self.entropy).float()
        if units.shape[-1] == self.num_positions:
            return None
        if units.shape[-1] > self.num_positions:
            return _summed(units, self.num_positions)
        return self._placed(units)

    def _active(self, executed: Bool[Tensor, "*rows actions"], level: ActionLevel) -> Bool[Tensor, "*rows units"]:
        if level == "chunk_level":
            return executed.any(dim=-1, keepdim=True)
        return executed if level == "action_level" else executed.repeat_interleave(self.num_components, dim=-1)

    def _placed(self, x: Shaped[Tensor, "*rows units"]) -> Shaped[Tensor, "*rows positions"]:
        """[...,n] -> [...,P], each at the first of its P / n positions."""
        return F.pad(x[..., None], (0, self.num_positions // x.shape[-1] - 1)).flatten(-2)


def _summed(x: Float[Tensor, "*rows units"], count: int) -> Float[Tensor, "*rows sums"]:
    """[...,n] -> [...,count], the sums of n / count neighbours."""
    return x.reshape(*x.shape[:-1], count, -1).sum(-1)
