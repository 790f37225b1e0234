"""The recurrent embodied policy: a GRU between the backbone and the heads, for partial observation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from rl_platform.algorithms.losses import ModelOutputs
from rl_platform.envs.embodied.spaces import ActionSpace
from rl_platform.models.draws import Among
from rl_platform.models.policy import DEFAULTS, ActorCriticPolicy, PolicyConfig, perceptron
from rl_platform.records import RolloutBatch


class RecurrentPolicy(nn.Module):
    """features = backbone(observation), h = GRU(features, h), and the heads of an ActorCriticPolicy on h.

    h [N,H] is 0 where an episode begins; the caller stores it between observations. GRU: Cho et al., "Learning Phrase
    Representations using RNN Encoder-Decoder", 2014; its matrices start orthogonal, its biases at 0.
    """

    def __init__(
        self, observation_shape: Sequence[int], action_space: ActionSpace, config: PolicyConfig = DEFAULTS
    ) -> None:
        super().__init__()
        self.action_space, self.recurrent_size = action_space, config.recurrent_size
        self.observation_size = math.prod(observation_shape)
        self.backbone = perceptron(self.observation_size, config.hidden_sizes, config.activation)
        width = config.hidden_sizes[-1] if config.hidden_sizes else self.observation_size
        self.cell = nn.GRUCell(width, self.recurrent_size)
        for name, parameter in self.cell.named_parameters():
            if name.startswith("bias"):
                nn.init.zeros_(parameter)
                continue
            for gate in parameter.chunk(3):  # the blocks of the reset, update and new gates
                nn.init.orthogonal_(gate.data)
        self.heads = ActorCriticPolicy((self.recurrent_size,), action_space, replace(config, hidden_sizes=()))
        self.executed = self.heads.executed

    @torch.no_grad()
    def act(
        self,
        observations: Tensor,
        hidden_states: Tensor,
        generator: torch.Generator | None = None,
        deterministic: bool = False,
        among: Among = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Samples actions as `ActorCriticPolicy.act`, from hidden states [N,H]; also returns the next ones [N,H]."""
        hidden_states = self.cell(self._features(observations), hidden_states)
        return *self.heads.act(hidden_states, generator, deterministic, among), hidden_states

    def evaluate(
        self, observations: Tensor, actions: Tensor, hidden_states: Tensor, episode_starts: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Evaluates given actions of B sequences of L steps. Gradients flow back to a sequence's first step.

        Returns log_probs, entropy and values [B,L], and the hidden states [B,L,H] after each step. observations:
        [B,L,D]. actions: [B,L,A] float32 or [B,L] int64. hidden_states: [B,H] before the first step. episode_starts:
        [B,L] bool, steps that begin an episode.
        """
        shape = episode_starts.shape
        features = self._features(observations.flatten(0, 1)).unflatten(0, shape)
        states = self._states(features, hidden_states, ~episode_starts)
        outputs = self.heads.evaluate(states.flatten(0, 1), actions.flatten(0, 1))
        log_probs, entropy, values = (output.view(shape) for output in outputs)
        return log_probs, entropy, values, states

    def _features(self, observations: Tensor) -> Tensor:
        features: Tensor = self.backbone(observations.reshape(observations.shape[0], self.observation_size))
        return features

    def _states(self, features: Tensor, state: Tensor, continues: Tensor) -> Tensor:
        """Hidden states [B,L,H]. The state is 0 before each step whose `continues` [B,L] is False."""
        states = []
        for step, mask in zip(features.unbind(1), continues.to(state.dtype).unbind(1), strict=True):
            state = self.cell(step, state * mask[:, None])
            states.append(state)
        return torch.stack(states, dim=1)


class RecurrentActorCritic(nn.Module):
    """As `EmbodiedActorCritic`, of a recurrent policy: each row holds S sequences of T / S steps.

    A sequence begins with the rollout's hidden state, "hidden_states" [B,S,H], and is reset at its "episode_starts"
    [B,T]. With `keep_states` the outputs include the hidden states [B,T,H] after each step.
    """

    def __init__(self, model: RecurrentPolicy) -> None:
        super().__init__()
        self.model, self.keep_states = model, False

    def forward(self, batch: RolloutBatch, *, entropy: bool = False) -> ModelOutputs:
        shape, first = batch.action_mask.shape, batch.inputs["hidden_states"]
        sequences = first.shape[:2].numel()
        names = ("observations", "actions", "episode_starts")
        observations, actions, starts = (_cut(batch.inputs[name], sequences) for name in names)
        log_probs, entropies, values, states = self.model.evaluate(observations, actions, first.flatten(0, 1), starts)
        return ModelOutputs(
            log_probs.view(shape),
            entropies.view(shape) if entropy else None,
            values.view(shape),
            states=states.view(*shape, -1) if self.keep_states else None,
        )


def _cut(tensor: Tensor, sequences: int) -> Tensor:
    """[B,T,...] -> [sequences,L,...]: rows are cut into equal runs of steps."""
    return tensor.reshape(sequences, -1, *tensor.shape[2:])
