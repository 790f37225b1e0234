"""Policies on vision-language models as training engines call them: log-probs, entropies and values of a batch."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from rl_platform.algorithms.action_levels import ActionLevels
from rl_platform.algorithms.losses import ModelOutputs
from rl_platform.records import RolloutBatch


class ChunkPolicyModel(Protocol):
    """A policy over chunks of K actions of D components, with R values."""

    def evaluate(
        self, observations: Tensor, actions: Tensor, tasks: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """observations [B,D'], actions [B,...] of `act` -> log_probs, entropies [B,K,D], values [B,R]."""
        ...


class ChunkActionsActorCritic(nn.Module):
    """As `EmbodiedActorCritic`, of chunks at the levels of their actions, with the instruction of each row."""

    def __init__(self, model: ChunkPolicyModel, levels: ActionLevels) -> None:
        super().__init__()
        self.model, self.levels = model, levels

    def forward(self, batch: RolloutBatch, *, entropy: bool = False) -> ModelOutputs:
        shape, levels, inputs = batch.action_mask.shape, self.levels, batch.inputs
        observations, actions = (inputs[name].flatten(0, 1) for name in ("observations", "actions"))
        tasks = inputs["tasks"].flatten(0, 1) if "tasks" in inputs else None
        log_probs, entropies, values = self.model.evaluate(observations, actions, tasks)
        executed = inputs.get("executed", torch.ones(*shape, 1, dtype=torch.bool, device=actions.device)).flatten(0, 1)
        return ModelOutputs(
            levels.of_components(log_probs, executed).view(shape),
            levels.of_components(entropies, executed).view(shape) if entropy else None,
            levels.placed_values(values).view(shape),
        )
