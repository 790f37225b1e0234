"""Models as training engines see them: `RolloutBatch` in, `ModelOutputs` [B,T] out. One class per kind of model."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rl_platform.algorithms.action_levels import ActionLevels
from rl_platform.algorithms.losses import ModelOutputs
from rl_platform.models.chunk_policy import ChunkPolicy
from rl_platform.models.full_kl import full_kl_of_states
from rl_platform.models.language import Entropy, LanguageModel
from rl_platform.models.packed import PackedTokens, pack
from rl_platform.models.policy import ActorCriticPolicy
from rl_platform.records import RolloutBatch


class TokenPolicy(nn.Module):
    """Log-probabilities of the sampled tokens under a language model, at the rollout's temperature.

    `entropy_gradient` False: entropies are for the log only and cost no memory for a backward. `keep_states`: the
    hidden states are outputs too. A batch with `reference_states` is also compared to the reference over the whole
    vocabulary; `reference_head` [vocabulary, H], the reference's output matrix, is no part of this model's state.
    """

    def __init__(
        self, model: LanguageModel, temperature: float, *, entropy_gradient: bool = False, keep_states: bool = False
    ) -> None:
        super().__init__()
        self.entropy_gradient, self.keep_states = entropy_gradient, keep_states
        self.model = model
        self.hidden_size: int = model.config.hidden_size
        self.temperature = temperature
        self.reference_head: Tensor | None = None

    def forward(self, batch: RolloutBatch, *, entropy: bool = False) -> ModelOutputs:
        packed, rows, columns = _packed(batch)
        targets = batch.inputs["tokens"][rows, columns]
        wanted: Entropy = "none" if not entropy else "gradient" if self.entropy_gradient else "value"
        states = self.model.states_before(packed, rows, columns)
        log_probs, entropies = self.model.log_probs(states, targets, self.temperature, wanted)
        full_kl = None
        if batch.reference_states is not None:
            assert self.reference_head is not None
            reference_states = batch.reference_states[rows, columns]
            full_kl = full_kl_of_states(
                states, self.model.head.weight, reference_states, self.reference_head, self.temperature
            )
        return ModelOutputs(
            log_probs=_scatter(log_probs, batch, rows, columns),
            entropy=None if entropies is None else _scatter(entropies, batch, rows, columns),
            full_kl=None if full_kl is None else _scatter(full_kl, batch, rows, columns),
            states=_scatter(states, batch, rows, columns) if self.keep_states else None,
        )


class TokenValues(nn.Module):
    """Values of the states before the sampled tokens, from a language model with a scalar head."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model
        self.hidden_size: int = model.config.hidden_size

    def forward(self, batch: RolloutBatch, *, entropy: bool = False) -> ModelOutputs:
        packed, rows, columns = _packed(batch)
        return ModelOutputs(values=_scatter(self.model.values(packed, rows, columns), batch, rows, columns))


class EmbodiedActorCritic(nn.Module):
    """Log-probabilities, entropies and values of actions from one policy with a shared backbone."""

    def __init__(self, model: ActorCriticPolicy) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: RolloutBatch, *, entropy: bool = False) -> ModelOutputs:
        shape = batch.action_mask.shape
        observations, actions = (batch.inputs[name].flatten(0, 1) for name in ("observations", "actions"))
        log_probs, entropies, values = self.model.evaluate(observations, actions)
        return ModelOutputs(log_probs.view(shape), entropies.view(shape) if entropy else None, values.view(shape))


class ChunkActorCritic(nn.Module):
    """The same of chunks of actions, at their levels: rows hold one choice each, or several one after another."""

    def __init__(self, model: ChunkPolicy, levels: ActionLevels) -> None:
        super().__init__()
        self.model, self.levels = model, levels

    def forward(self, batch: RolloutBatch, *, entropy: bool = False) -> ModelOutputs:
        shape, levels = batch.action_mask.shape, self.levels
        names = ("observations", "actions", "executed")
        observations, actions, executed = (batch.inputs[name].flatten(0, 1) for name in names)
        log_probs, entropies, values = self.model.evaluate(observations, actions)
        return ModelOutputs(
            levels.of_components(log_probs, executed).view(shape),
            levels.of_components(entropies, executed).view(shape) if entropy else None,
            levels.placed_values(values).view(shape),
        )


def _packed(batch: RolloutBatch) -> tuple[PackedTokens, Tensor, Tensor]:
    """The batch's sequences side by side, and (rows, columns) [K] of its action positions."""
    rows, columns = batch.action_mask.nonzero(as_tuple=True)
    tokens, lengths = batch.inputs["tokens"], batch.inputs["lengths"].tolist()
    return pack([tokens[row, :length] for row, length in enumerate(lengths)]), rows, columns


def _scatter(values: Tensor, batch: RolloutBatch, rows: Tensor, columns: Tensor) -> Tensor:
    """[K,...] -> [B,T,...] with zeros elsewhere, differentiable."""
    out = torch.zeros((*batch.action_mask.shape, *values.shape[1:]), dtype=values.dtype, device=values.device)
    return out.index_put((rows, columns), values)
