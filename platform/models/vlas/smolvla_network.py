"""SmolVLA as a network of `FlowPolicy`: the first layers of SmolVLM2 and an action expert that attends to them.

The architecture is that of Shukor et al., "SmolVLA" (2025), in LeRobot's code: images, instruction and one token of the
robot's state are the prefix. Layers of the expert alternate between self-attention over prefix and actions, and
cross-attention to projected keys and values of the prefix. Not covered: LeRobot's folders, see `lerobot_folder.py`.
"""

from __future__ import annotations

import math

import torch
from huggingface_hub.dataclasses import strict
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AutoConfig,
    DynamicCache,
    LlamaConfig,
    LlamaModel,
    PreTrainedConfig,
    PreTrainedModel,
    SmolVLMConfig,
    SmolVLMModel,
)
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaAttention, apply_rotary_pos_emb, eager_attention_forward

from rl_platform.models.vlas.inputs import Instructions, camera_images
from rl_platform.models.vlas.prefix import Prefix, masked_mean
from rl_platform.placement.estimates.smolvla_options import SMOLVLM2_OPTIONS, crosses, expert_sizes

ROPE = {"rope_type": "default", "rope_theta": 10_000.0}  # LeRobot's, whatever the language model was trained with


@strict
class SmolVLAConfig(PreTrainedConfig):
    """The network's options, as those of transformers' pi0; LeRobot's names where there is no counterpart.

    vlm_config: of SmolVLM, with the layers that are used. image_size: width and height that images are resized to.
    """

    model_type = "smolvla"
    sub_configs = {"vlm_config": SmolVLMConfig}  # noqa: RUF012  as transformers declares it

    vlm_config: dict | PreTrainedConfig | None = None
    chunk_size: int = 50
    max_state_dim: int = 32
    max_action_dim: int = 32
    num_inference_steps: int = 10
    attention_mode: str = "cross_attn"
    self_attn_every_n_layers: int = 2
    expert_width_multiplier: float = 0.75
    min_period: float = 4e-3
    max_period: float = 4.0
    image_size: list[int] | tuple[int, int] = (512, 512)
    tokenizer_max_length: int = 48

    def __post_init__(self, **kwargs):
        if not isinstance(self.vlm_config, PreTrainedConfig):
            self.vlm_config = SmolVLMConfig(**(self.vlm_config or SMOLVLM2_OPTIONS))
        self.vlm_config.text_config.rope_parameters = dict(ROPE)
        super().__post_init__(**kwargs)

    def expert_config(self) -> LlamaConfig:
        """Returns the expert's: narrower than the language model, with its heads and layers."""
        text = self.vlm_config.text_config
        hidden, intermediate = expert_sizes(vars(self), text.hidden_size)
        return LlamaConfig(
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=text.num_hidden_layers,
            num_attention_heads=text.num_attention_heads,
            num_key_value_heads=text.num_key_value_heads,
            head_dim=text.head_dim,
            rms_norm_eps=text.rms_norm_eps,
            hidden_act=text.hidden_act,
            attention_bias=text.attention_bias,
            mlp_bias=text.mlp_bias,
            rope_parameters=dict(ROPE),
            vocab_size=1,  # it reads no tokens
            pad_token_id=None,
        )


class CrossAttention(LlamaAttention):
    """Attention of actions to the prefix, whose keys (after rotation) and values are projected first."""

    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        width = config.num_key_value_heads * self.head_dim
        self.k_proj, self.v_proj = (nn.Linear(width, width, bias=config.attention_bias) for _ in range(2))
        self.is_causal = False

    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs):
        shape, prefix = hidden_states.shape[:-1], past_key_values.layers[self.layer_idx]
        queries = self.q_proj(hidden_states).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        queries = apply_rotary_pos_emb(queries, queries, *position_embeddings)[0]
        keys, values = (
            project(part.transpose(1, 2).flatten(2)).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project, part in ((self.k_proj, prefix.keys), (self.v_proj, prefix.values))
        )
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        output, weights = attend(self, queries, keys, values, attention_mask, dropout=0.0, scaling=self.scaling)
        return self.o_proj(output.reshape(*shape, -1)), weights


class SmolVLANetwork(PreTrainedModel):
    """SmolVLA without the head of its language model. Names of parameters are LeRobot's behind a prefix."""

    config: SmolVLAConfig
    _supports_sdpa = True

    def __init__(self, config: SmolVLAConfig) -> None:
        super().__init__(config)
        expert = config.expert_config()
        hidden, width = config.vlm_config.text_config.hidden_size, expert.hidden_size
        self.vlm = SmolVLMModel(config.vlm_config)
        self.lm_expert = LlamaModel(expert)
        self.lm_expert.embed_tokens = None
        for place, layer in enumerate(self.lm_expert.layers):
            if crosses(vars(config), place):
                layer.self_attn = CrossAttention(self.lm_expert.config, place)
        self.state_proj = nn.Linear(config.max_state_dim, hidden)
        self.action_in_proj = nn.Linear(config.max_action_dim, width)
        self.action_out_proj = nn.Linear(width, config.max_action_dim)
        self.action_time_mlp_in = nn.Linear(2 * width, width)
        self.action_time_mlp_out = nn.Linear(width, width)
        self.expert_hidden_size = width
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.vlm.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module | None) -> None:
        self.vlm.set_input_embeddings(value)

    @property
    def backbone(self) -> nn.Module:
        return self.vlm

    @property
    def decoder(self) -> nn.Module:
        return self.vlm.text_model

    def drop_unread(self, images: bool) -> None:
        """Removes the embedding of tokens, and without images the vision tower: parameters that get no gradient."""
        self.set_input_embeddings(None)
        if not images:
            self.vlm.vision_model = self.vlm.connector = None

    def images(self, observations: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Images [B,D] uint8 -> [B,C,3,H,W], the cameras of each observation, with black at the left and at the top."""
        width, height = self.config.image_size
        return camera_images(observations, shape, (height, width), keep_ratio=True)

    def prefix(self, instructions: Instructions, tasks: Tensor, images: Tensor | None, state: Tensor) -> Prefix:
        """Reads images [B,C,3,H,W], the instructions `tasks` [B] and the state [B,S]. See `FlowNetwork`."""
        words, word_mask = instructions(tasks)
        scale = math.sqrt(words.shape[-1])
        parts = [words * scale, self.state_proj(state)[:, None]]
        masks = [word_mask, word_mask.new_ones(word_mask.shape[0], 1)]
        if images is not None:
            features = self.vlm.connector(self.vlm.vision_model(pixel_values=images.flatten(0, 1)).last_hidden_state)
            features = features.reshape(images.shape[0], -1, features.shape[-1]) * scale
            parts, masks = [features, *parts], [word_mask.new_ones(features.shape[:2]), *masks]
        embedded, mask = torch.cat([part.to(words.dtype) for part in parts], dim=1), torch.cat(masks, dim=1)
        # images and instruction see each other, the state sees all
        blocks = F.pad(torch.zeros_like(mask[:, 1:]), (0, 1), value=1)
        text, cache = self.vlm.text_model, DynamicCache()
        seen = create_causal_mask(text.config, embedded, mask, past_key_values=cache, block_sequence_ids=blocks)
        output = text(
            inputs_embeds=embedded,
            attention_mask=seen,
            position_ids=mask.cumsum(-1) - 1,
            past_key_values=cache,
            use_cache=True,
        )
        return Prefix(cache, mask, state, masked_mean(output.last_hidden_state, mask))

    def expert(self, x: Tensor, time: Tensor, prefix: Prefix) -> Tensor:
        """Noisy actions [B,H,A] at the times [B] -> hidden states [B,H,W] of the action expert."""
        expert, count = self.lm_expert, x.shape[1]
        actions = self.action_in_proj(x)
        times = self._times(time).to(actions.dtype)[:, None].expand_as(actions)
        hidden = self.action_time_mlp_out(F.silu(self.action_time_mlp_in(torch.cat([actions, times], dim=2))))
        mask = F.pad(prefix.mask, (0, count), value=1)
        behind = expert.rotary_emb(hidden, (mask.cumsum(-1) - 1)[:, -count:])
        alone = expert.rotary_emb(hidden, torch.arange(count, device=x.device)[None])
        causal = create_causal_mask(expert.config, hidden, mask, past_key_values=prefix.cache)
        read = prefix.mask[..., None].to(hidden.dtype)
        across = create_bidirectional_mask(expert.config, hidden, prefix.mask, encoder_hidden_states=read)
        for place, layer in enumerate(expert.layers):
            separate = crosses(vars(self.config), place)
            hidden = layer(
                hidden,
                attention_mask=across if separate else causal,
                position_embeddings=alone if separate else behind,
                past_key_values=prefix.cache,
            )
        return expert.norm(hidden)

    def _times(self, time: Tensor) -> Tensor:
        """Times [B] -> sines and cosines [B,W] float64 of periods from min_period to max_period."""
        config = self.config
        steps = torch.linspace(0, 1, self.expert_hidden_size // 2, dtype=torch.float64, device=time.device)
        periods = config.min_period * (config.max_period / config.min_period) ** steps
        angles = 2 * math.pi * time[:, None].double() / periods
        return torch.cat([angles.sin(), angles.cos()], dim=1)


AutoConfig.register(SmolVLAConfig.model_type, SmolVLAConfig, exist_ok=True)
