"""The embodied policy that samples a chunk of actions from one observation, with a log-prob per component."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from rl_platform.algorithms.action_levels import ActionLevels
from rl_platform.algorithms.losses import ModelOutputs
from rl_platform.algorithms.variants.chunk_levels import ChunkLevels
from rl_platform.envs.embodied.spaces import ActionSpace
from rl_platform.models.choices import chosen, entropies, log_distributions, of_choices
from rl_platform.models.draws import Among, normals
from rl_platform.models.policy import DEFAULTS, LOG_SQRT_2_PI, ActorCriticPolicy, PolicyConfig
from rl_platform.records import RolloutBatch


class ChunkPolicy(ActorCriticPolicy):
    """K actions of D components, independent given the observation, and R values.

    R = 1: the value of the state before the chunk; R = K: of the state before each action. Components are numbers or
    choices; D = 1 of a single choice. With K = R = 1 the parameters are those of `ActorCriticPolicy`.
    """

    def __init__(
        self, observation_shape: Sequence[int], action_space: ActionSpace, config: PolicyConfig = DEFAULTS
    ) -> None:
        wide = replace(action_space, size=config.num_actions * action_space.size)
        super().__init__(observation_shape, wide, config)
        self.num_actions, self.width, self.counts = config.num_actions, action_space.size, action_space.counts
        if config.num_values > 1:
            self.value_head = nn.Linear(self.value_head.in_features, config.num_values)
            nn.init.zeros_(self.value_head.weight)
            nn.init.zeros_(self.value_head.bias)

    def forward(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """observations [B,...] -> Gaussian means or logits [B,K,A], values [B,R]."""
        features = self._features(observations)
        return self._heads(features), self.value_head(features)

    @torch.no_grad()
    def act(
        self,
        observations: Tensor,
        generator: torch.Generator | None = None,
        deterministic: bool = False,
        among: Among = None,
    ) -> tuple[Tensor, Tensor]:
        """Samples chunks: observations [N,...] -> actions [N,K,A] float32 (not clipped), [N,K] or [N,K,D] int64,
        log_probs [N,K,D]."""
        features = self._features(observations)
        heads = self._heads(features)
        if self.action_space.kind == "continuous":
            noise = normals(heads, generator, deterministic, among)
            log_std = self._log_stds(features)
            actions = heads + log_std.exp() * noise
            return actions, self._component_log_probs(noise, log_std, actions)
        drawn, log_probs = chosen(log_distributions(heads, self.counts), generator, deterministic, among)
        return self._outward(drawn), log_probs

    def evaluate(self, observations: Tensor, actions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Evaluates actions of `act`, with gradients: observations [B,...] -> log_probs, entropies [B,K,D], values
        [B,R]."""
        features = self._features(observations)
        heads, values = self._heads(features), self.value_head(features)
        if self.action_space.kind == "continuous":
            log_std = self._log_stds(features)
            log_probs = self._component_log_probs((actions - heads) * (-log_std).exp(), log_std, actions)
            entropy = log_std + 0.5 + LOG_SQRT_2_PI
            if self.squash is not None:
                entropy = entropy + self.squash.mean_log_slope(heads, log_std)
            return log_probs, entropy.expand_as(log_probs), values
        log_probs = log_distributions(heads, self.counts)
        return of_choices(log_probs, actions.reshape(log_probs.shape[:-1])), entropies(log_probs), values

    def _heads(self, features: Tensor) -> Tensor:
        return self.policy_head(features).unflatten(-1, (self.num_actions, self.width))

    def _log_stds(self, features: Tensor) -> Tensor:
        """Log standard deviations: [K,A], or [B,K,A] if they depend on the state."""
        return self._log_std(features).unflatten(-1, (self.num_actions, self.width))

    def _component_log_probs(self, noise: Tensor, log_std: Tensor, actions: Tensor) -> Tensor:
        """noise [B,K,A] = (a - mu) / sigma -> log-prob [B,K,A] of each component, after squashing if there is any."""
        # log N(a; mu, sigma) = -noise^2 / 2 - log sigma - log sqrt(2 pi)
        log_probs = -0.5 * noise.square() - log_std - LOG_SQRT_2_PI
        return log_probs if self.squash is None else log_probs - self.squash.log_slope(actions)


class ChunkActorCritic(nn.Module):
    """As `EmbodiedActorCritic`, of action chunks at their levels: each row holds one chunk, or several in order.

    model: its `evaluate` maps observations [B,D'], actions [B,...] of `act` and, if the batch has them, the tasks [B]
    of the rows to log_probs and entropies [B,K,D], and values [B,R].
    """

    def __init__(self, model: nn.Module, levels: ActionLevels) -> None:
        super().__init__()
        self.model, self.levels = model, ChunkLevels(**vars(levels))

    def forward(self, batch: RolloutBatch, *, entropy: bool = False) -> ModelOutputs:
        shape, levels, inputs = batch.action_mask.shape, self.levels, batch.inputs
        rows = {name: inputs[name].flatten(0, 1) for name in ("observations", "actions", "tasks") if name in inputs}
        log_probs, entropies, values = self.model.evaluate(**rows)
        executed = inputs.get("executed", torch.ones(*shape, 1, dtype=torch.bool, device=values.device)).flatten(0, 1)
        return ModelOutputs(
            levels.of_components(log_probs, executed).view(shape),
            levels.of_components(entropies, executed).view(shape) if entropy else None,
            levels.placed_values(values).view(shape),
        )
