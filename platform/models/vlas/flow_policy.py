"""Policies that denoise chunks of actions by flow matching: a vision-language model reads, an action expert denoises.

The networks are pi0 (`pi0_network.py`) and SmolVLA (`smolvla_network.py`). The prefix of image and instruction is
computed once per observation, and its keys and values are used in every denoising step. PPO trains the Gaussian steps
of the denoising (`denoising.py`), whose chains are the actions of the rollout batch. Observations are images, or
numbers, which are the robot's state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rl_platform.algorithms.action_levels import ActionLevels
from rl_platform.config.schema.models import Flow
from rl_platform.envs.embodied.spaces import EnvSpaces
from rl_platform.models.draws import Among, choices, normals
from rl_platform.models.policies.chunk_policy import ChunkActorCritic
from rl_platform.models.policies.vla import tasks_of_rows
from rl_platform.models.vlas.denoising import Denoising, bounded_std, entropy, log_density
from rl_platform.models.vlas.inputs import ActionRange, Instructions, StateScale
from rl_platform.models.vlas.prefix import Prefix

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

CRITIC_WIDTH = 256


class FlowNetwork(Protocol):
    """The parts of a network that `FlowPolicy` uses; it is a module of transformers.

    config has chunk_size H, max_action_dim A, max_state_dim S and num_inference_steps. backbone: the vision-language
    model; decoder: its language model, to which adapters are added.
    """

    config: PreTrainedConfig
    action_out_proj: nn.Module
    expert_hidden_size: int

    @property
    def backbone(self) -> nn.Module: ...

    @property
    def decoder(self) -> nn.Module: ...

    def get_input_embeddings(self) -> nn.Module: ...

    def drop_unread(self, images: bool) -> None:
        """Removes parameters that get no gradient after the instructions are embedded."""
        ...

    def images(self, observations: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Images [B,D] uint8 -> [B,C,3,H,W], as the network reads them."""
        ...

    def prefix(self, instructions: Instructions, tasks: Tensor, images: Tensor | None, state: Tensor) -> Prefix:
        """Computes what all denoising steps read: tasks [B] int64, images [B,C,3,H,W], state [B,S]."""
        ...

    def expert(self, x: Tensor, time: Tensor, prefix: Prefix) -> Tensor:
        """Noisy actions [B,H,A] at the times [B] -> hidden states [B,H,W]. It may append to the prefix's cache."""
        ...


class FlowPolicy(nn.Module):
    """A Gaussian policy over denoising chains of H actions of A numbers; the environment executes K of D numbers.

    An action of the policy is a row of numbers. It holds the first recorded step, the S + 1 points [H,A] of the chain
    around the S recorded steps, and the denoised actions [K,D]. Denoised actions inside the bounds lie between -1 and
    1. Noise is drawn for the K x D numbers that are executed. All others follow Euler's steps, so the log-prob counts
    every number that was drawn after x_T. The value head reads the mean of the prefix's last hidden states, and the
    state; it starts at zero.
    """

    def __init__(
        self,
        network: FlowNetwork,
        instructions: Sequence[Sequence[int]],
        spaces: EnvSpaces,
        flow: Flow,
        levels: ActionLevels,
        action_range: ActionRange,
        state_scale: StateScale | None = None,
    ) -> None:
        super().__init__()
        config = network.config
        self.network, self.spaces, self.single = network, spaces, levels.single
        self.action_space = spaces.action
        self.denoising = Denoising(flow, flow.denoising_steps or config.num_inference_steps)
        self.horizon, self.width = config.chunk_size, config.max_action_dim
        self.executes = levels.num_actions, spaces.action.size
        self.instructions = Instructions(instructions, network.get_input_embeddings())
        network.drop_unread(spaces.images)
        read = config.vlm_config.text_config.hidden_size + config.max_state_dim
        self.value_head = nn.Sequential(
            nn.Linear(read, CRITIC_WIDTH), nn.Tanh(), nn.Linear(CRITIC_WIDTH, levels.num_values)
        )
        nn.init.zeros_(self.value_head[-1].weight)
        nn.init.zeros_(self.value_head[-1].bias)
        self.std_head = None
        if flow.method == "flow_noise":
            self.std_head = nn.Linear(network.expert_hidden_size, self.width)
            nn.init.zeros_(self.std_head.weight)
            nn.init.zeros_(self.std_head.bias)
        self.action_range, self.state_scale = action_range, state_scale
        inside = torch.zeros(self.horizon, self.width, dtype=torch.bool)
        inside[: self.executes[0], : self.executes[1]] = True
        self.register_buffer("inside", inside, persistent=False)

    def actor_critic(self, levels: ActionLevels) -> ChunkActorCritic:
        """Returns the policy as training engines call it."""
        return ChunkActorCritic(self, levels)

    @property
    def language_config(self) -> PreTrainedConfig:
        return self.network.config

    @property
    def instruction_tokens(self) -> list[list[int]]:
        return self.instructions.tokens

    @property
    def lengths(self) -> list[int]:
        return self.instructions.lengths

    @property
    def adapted(self) -> nn.Module:
        """The part that adapters are added to."""
        return self.network.decoder

    @torch.no_grad()
    def act(
        self,
        observations: Tensor,
        generator: torch.Generator | None = None,
        deterministic: bool = False,
        among: Among = None,
        tasks: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Denoises chunks: observations [N,D'] -> rows [N,L], and log_probs [N,K,D], or [N] of single actions.

        deterministic: x_T is drawn, no step draws noise, and log_probs are 0. noise: x_T [N,H,A], which is not drawn
        then.
        """
        prefix, steps = self._prefix(observations, tasks), self.denoising
        rows, device = observations.shape[0], observations.device
        x = noise
        if x is None:
            x = normals(prefix.state.new_empty(rows, self.horizon, self.width), generator, False, among)
        drawn = normals(x.new_empty(rows, steps.recorded, *self.executes), generator, deterministic, among)
        one = steps.flow.stochastic_steps == "one"
        first = torch.zeros(rows, dtype=torch.int64, device=device)
        if one and not deterministic:
            first = choices(x.new_zeros(rows, steps.noisy), generator, False, among)
        chain = x.new_zeros(rows, steps.recorded + 1, self.horizon, self.width)
        log_probs = x.new_zeros(rows, *self.executes)
        for step in range(steps.steps):
            numbers = torch.full_like(first, step)
            velocity, learned = self._velocity(x, numbers, prefix)
            after = steps.euler(x, velocity)
            if not deterministic and step < steps.noisy:
                place = 0 if one else step
                here = first == step if one else torch.ones_like(first, dtype=torch.bool)
                mean, std = steps.gaussian(x, velocity, numbers, learned)
                noisy = torch.where(self.inside, mean + std * F.pad(drawn[:, place], self._padding()), after)
                after = torch.where(here[:, None, None], noisy, after)
                chain[here, place], chain[here, place + 1] = x[here], after[here]
                log_probs += self._executed_part(log_density(noisy, mean, std)) * here[:, None, None]
            x = after
        parts = (first[:, None].to(x.dtype), chain.flatten(1), self._executed_part(x).flatten(1))
        return torch.cat(parts, dim=1), log_probs.sum((1, 2)) if self.single else log_probs

    def evaluate(
        self, observations: Tensor, actions: Tensor, tasks: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Evaluates rows of `act`, with gradients: observations [B,D'], rows [B,L] -> log_probs, entropies [B,K,D],
        values [B,R]. Log-probs and entropies are sums over the recorded steps."""
        prefix, steps = self._prefix(observations, tasks), self.denoising
        first, points = actions[:, 0].long(), steps.recorded + 1
        chain = actions[:, 1 : 1 + points * self.inside.numel()].unflatten(1, (points, self.horizon, self.width))
        log_probs = entropies = torch.zeros((), device=actions.device)
        for place in range(steps.recorded):
            x, numbers = chain[:, place], first + place
            velocity, learned = self._velocity(x, numbers, prefix)
            mean, std = steps.gaussian(x, velocity, numbers, learned)
            log_probs = log_probs + self._executed_part(log_density(chain[:, place + 1], mean, std))
            entropies = entropies + self._executed_part(entropy(std))
        with torch.autocast(actions.device.type, enabled=False):
            values = self.value_head(torch.cat([prefix.hidden, prefix.state.float()], dim=1))
        return log_probs, entropies, values

    def executed(self, actions: Tensor) -> Tensor:
        """Rows [N,L] -> actions of the environment [N,K,D], or [N,D] of single ones."""
        count = math.prod(self.executes)
        denoised = self.action_range(actions[:, -count:].unflatten(1, self.executes))
        return denoised[:, 0] if self.single else denoised

    def _prefix(self, observations: Tensor, tasks: Tensor | None) -> Prefix:
        network, size = self.network, self.network.config.max_state_dim
        tasks = tasks_of_rows(tasks, len(self.lengths), observations)
        if self.spaces.images:
            images = network.images(observations, self.spaces.observation_shape)
            return network.prefix(self.instructions, tasks, images, images.new_zeros(images.shape[0], size))
        state = observations if self.state_scale is None else self.state_scale(observations)
        return network.prefix(self.instructions, tasks, None, F.pad(state, (0, size - state.shape[1])))

    def _velocity(self, x: Tensor, steps: Tensor, prefix: Prefix) -> tuple[Tensor, Tensor | None]:
        """v(x, t) [B,H,A] float32 at the steps [B] int64, and the deviations of flow_noise [B,H,A]."""
        states = self.network.expert(x, self.denoising.times(x.device)[steps], prefix)
        for layer in prefix.cache.layers:  # the step's own keys and values
            layer.crop(prefix.mask.shape[1] - layer.get_seq_length())
        with torch.autocast(x.device.type, enabled=False):
            learned = None if self.std_head is None else bounded_std(self.std_head(states.float()))
            return self.network.action_out_proj(states.float()), learned

    def _executed_part(self, x: Tensor) -> Tensor:
        """[B,H,A] -> [B,K,D]."""
        return x[:, : self.executes[0], : self.executes[1]]

    def _padding(self) -> tuple[int, int, int, int]:
        """From [K,D] to [H,A]."""
        actions, numbers = self.executes
        return 0, self.width - numbers, 0, self.horizon - actions
