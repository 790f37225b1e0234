"""Actions as tokens of a vision-language model: bins at the end of the vocabulary, by OpenVLA's conventions.

The prompt is images and instruction, followed by one placeholder token per number of the chunk. The hidden states of
the placeholders give all numbers of a chunk in one pass, so rollout and training compute the same function
(OpenVLA-OFT, Kim et al., "Fine-Tuning Vision-Language-Action Models", 2025). Bins and tokens are those of Kim et al.,
"OpenVLA" (2024). Not covered: OpenVLA's own network, whose code is not in transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rl_platform.algorithms.action_levels import ActionLevels
from rl_platform.envs.embodied.spaces import EnvSpaces
from rl_platform.models.choices import entropies, of_choices
from rl_platform.models.draws import Among, choices
from rl_platform.models.policies.chunk_policy import ChunkActorCritic
from rl_platform.models.policies.vla import tasks_of_rows
from rl_platform.models.vlas.inputs import ActionRange
from rl_platform.models.vlas.vision_inputs import VisionInputs

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


class ActionTokenPolicy(nn.Module):
    """Categorical policy over K x D components of `bins` bins, independent given the observation.

    Bin i is token V - 1 - i of a vocabulary of V tokens without padding. Its number is the middle between the points i
    and i + 1 of `bins` points from -1 to 1. The last bin has the number of the bin before it. The value head reads the
    hidden state of the prompt's last token; it starts at zero.

    instructions: token ids [L] of each task, without those of images.
    """

    def __init__(
        self,
        network: PreTrainedModel,
        instructions: Sequence[Sequence[int]],
        spaces: EnvSpaces,
        bins: int,
        levels: ActionLevels,
        action_range: ActionRange,
    ) -> None:
        super().__init__()
        config = network.config
        text = config.get_text_config()
        self.network, self.bins, self.single = network, bins, levels.single
        self.action_space, self.executes = spaces.action, (levels.num_actions, spaces.action.size)
        self.vision = VisionInputs(config, spaces.observation_shape)
        self.vocabulary = unpadded_vocabulary(config)
        self.instruction_tokens = [list(each) for each in instructions]
        components = levels.num_actions * spaces.action.size
        # other tokens than those of images, which PaliGemma has at the end of its vocabulary too
        free = [token for bin in range(bins) if (token := self.vocabulary - 1 - bin) != config.image_token_id]
        placeholders = [free[number % len(free)] for number in range(components)]
        prompts = [[*self.vision.tokens, *instruction] for instruction in self.instruction_tokens]
        longest = max(map(len, prompts))
        # padded on the left, so that placeholders and the prompt's last token are at the same positions in all rows
        rows = [[0] * (longest - len(prompt)) + prompt + placeholders for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * (len(prompt) + components) for prompt in prompts]
        self.register_buffer("tokens", torch.tensor(rows), persistent=False)
        self.register_buffer("mask", torch.tensor(mask), persistent=False)
        self.softcap: float | None = getattr(text, "final_logit_softcapping", None)
        self.value_head = nn.Linear(text.hidden_size, levels.num_values)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        self.action_range = action_range

    @property
    def language_config(self) -> PretrainedConfig:
        return self.network.config

    @property
    def lengths(self) -> list[int]:
        return [len(each) for each in self.instruction_tokens]

    @property
    def adapted(self) -> nn.Module:
        """The part that adapters are added to."""
        return text_model(self.network)

    def actor_critic(self, levels: ActionLevels) -> nn.Module:
        """Returns the policy as training engines call it."""
        return ChunkActorCritic(self, levels)

    def forward(self, observations: Tensor, tasks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Images [B,D'] uint8 -> log-probs of bins [B,K,D,bins] and values [B,R], both float32."""
        tasks = tasks_of_rows(tasks, len(self.instruction_tokens), observations)
        tokens, mask = self.tokens[tasks], self.mask[tasks]
        given = {"input_ids": tokens, "attention_mask": mask, "use_cache": False, **self.vision(observations)}
        match self.vision.config.model_type:
            case "paligemma":  # its positions begin at 1, and all tokens of the prompt attend to each other
                given |= {"position_ids": mask.cumsum(-1), "token_type_ids": torch.zeros_like(mask)}
            case "qwen2_5_vl":  # it computes positions in two dimensions
                given |= {"mm_token_type_ids": (tokens == self.vision.config.image_token_id).int()}
            case _:
                given |= {"position_ids": (mask.cumsum(-1) - 1).clamp(min=0)}
        count = self.executes[0] * self.executes[1]
        states = self.network.model(**given).last_hidden_state[:, -count - 1 :]
        head = self.network.get_output_embeddings().weight[self.vocabulary - self.bins : self.vocabulary]
        with torch.autocast(states.device.type, enabled=False):
            logits = F.linear(states[:, 1:].float(), head.float().flip(0))
            if self.softcap is not None:
                logits = self.softcap * torch.tanh(logits / self.softcap)
            values = self.value_head(states[:, 0].float())
        return logits.log_softmax(-1).unflatten(1, self.executes), values

    @torch.no_grad()
    def act(
        self,
        observations: Tensor,
        generator: torch.Generator | None = None,
        deterministic: bool = False,
        among: Among = None,
        tasks: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Samples chunks: observations [N,D'] uint8 -> bins [N,K,D] int64 and log_probs [N,K,D], or [N,D] and [N] of
        single actions."""
        log_probs, _ = self(observations, tasks)
        bins = choices(log_probs, generator, deterministic, among)
        chosen = of_choices(log_probs, bins)
        return (bins[:, 0], chosen.sum((1, 2))) if self.single else (bins, chosen)

    def evaluate(
        self, observations: Tensor, actions: Tensor, tasks: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Evaluates bins of `act`, with gradients: observations [B,D'] -> log_probs, entropies
        [B,K,D], values [B,R]."""
        log_probs, values = self(observations, tasks)
        return of_choices(log_probs, actions.reshape(log_probs.shape[:-1])), entropies(log_probs), values

    def executed(self, actions: Tensor) -> Tensor:
        """bins [N,...,D] -> actions of the environment [N,...,D] float32."""
        numbers = self.bins - 1
        return self.action_range(-1 + (2 * actions.clamp(max=numbers - 1) + 1) / numbers)


def unpadded_vocabulary(config: PretrainedConfig) -> int:
    """Returns the number of tokens without those that fill the matrix up, as OpenVLA counts them."""
    vocabulary: int = config.get_text_config().vocab_size - getattr(config, "pad_to_multiple_of", 0)
    return vocabulary


def text_model(network: PreTrainedModel) -> nn.Module:
    """Returns the language model of a vision-language model."""
    model = network.model
    return model.text_model if hasattr(model, "text_model") else model.language_model


def vision_parts(model: nn.Module) -> list[nn.Module]:
    """Returns the vision tower of a vision-language model without its head; the projection behind it is not
    included."""
    parts = (getattr(model, name, None) for name in ("vision_tower", "vision_model", "visual"))
    return [part for part in parts if part is not None]
