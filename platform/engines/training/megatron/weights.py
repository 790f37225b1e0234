"""Maps parameters of a Megatron model to Hugging Face tensors and splits them over ranks.

Used for parameters and for the moments of their optimizer. Covers Llama, Qwen2, Qwen3 and Qwen3-MoE.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PretrainedConfig

Sharing = Literal["replicated", "columns", "vocabulary", "qkv", "gate_up", "experts"]
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_OF_LAYER: dict[str, tuple[Sharing, tuple[str, ...]]] = {
    "input_layernorm.weight": ("replicated", ("input_layernorm.weight",)),
    "self_attention.linear_qkv.weight": ("qkv", tuple(f"self_attn.{name}_proj.weight" for name in "qkv")),
    "self_attention.linear_qkv.bias": ("qkv", tuple(f"self_attn.{name}_proj.bias" for name in "qkv")),
    "self_attention.q_layernorm.weight": ("replicated", ("self_attn.q_norm.weight",)),
    "self_attention.k_layernorm.weight": ("replicated", ("self_attn.k_norm.weight",)),
    "self_attention.linear_proj.weight": ("columns", ("self_attn.o_proj.weight",)),
    "pre_mlp_layernorm.weight": ("replicated", ("post_attention_layernorm.weight",)),
    # Transformer Engine's linear layers include the norm of their input.
    "self_attention.linear_qkv.layer_norm_weight": ("replicated", ("input_layernorm.weight",)),
    "mlp.linear_fc1.layer_norm_weight": ("replicated", ("post_attention_layernorm.weight",)),
    "mlp.linear_fc1.weight": ("gate_up", ("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    "mlp.linear_fc2.weight": ("columns", ("mlp.down_proj.weight",)),
    "mlp.router.weight": ("replicated", ("mlp.gate.weight",)),
    "mlp.experts.gate_up": ("experts", ("mlp.experts.gate_up_proj",)),
    "mlp.experts.down": ("experts", ("mlp.experts.down_proj",)),
}
_OF_MODEL: dict[str, tuple[Sharing, tuple[str, ...]]] = {
    "embedding.word_embeddings.weight": ("vocabulary", ("model.backbone.embed_tokens.weight",)),
    "decoder.final_layernorm.weight": ("replicated", ("model.backbone.norm.weight",)),
}


@dataclass(frozen=True)
class Source:
    """The names of the tensors that a Megatron parameter consists of, and how `size` ranks split it.

    The ranks are expert-parallel if `sharing` is "experts", else tensor-parallel.
    """

    names: tuple[str, ...]
    sharing: Sharing
    size: int
    key_heads: int
    head_size: int
    vocabulary: int

    def split(self, whole: Sequence[Tensor], rank: int) -> Tensor:
        """Returns the part of a rank, from the whole tensors."""
        size = self.size
        match self.sharing:
            case "replicated":
                return whole[0]
            case "columns":
                return whole[0].chunk(size, dim=1)[rank]
            case "vocabulary":
                missing = padded(self.vocabulary, size) - self.vocabulary
                return torch.cat([whole[0], whole[0].new_zeros(missing, whole[0].shape[1])]).chunk(size)[rank]
            case "gate_up":
                return torch.cat([tensor.chunk(size)[rank] for tensor in whole])
            case "qkv":  # for each key head its queries, its key and its value
                heads = [tensor.view(self.key_heads, -1, *tensor.shape[1:]) for tensor in whole]
                return torch.cat(heads, dim=1).flatten(0, 1).chunk(size)[rank]
            case "experts":  # whole experts
                return whole[0].chunk(size)[rank]

    def join(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Returns the whole tensors, from the parts of all ranks."""
        match self.sharing:
            case "replicated":
                return [parts[0]]
            case "columns":
                return [torch.cat([*parts], dim=1)]
            case "vocabulary":
                return [torch.cat([*parts])[: self.vocabulary]]
            case "gate_up":
                halves = [part.chunk(2) for part in parts]
                return [torch.cat([half[index] for half in halves]) for index in range(2)]
            case "qkv":
                both = torch.cat([*parts])
                heads = both.view(self.key_heads, -1, *both.shape[1:])
                sizes = [heads.shape[1] - 2 * self.head_size, self.head_size, self.head_size]
                return [part.flatten(0, 1) for part in heads.split(sizes, dim=1)]
            case "experts":
                return [torch.cat([*parts])]


def source_of(
    name: str, first_layer: int, config: PretrainedConfig, tensor_size: int, *, value_head: bool, expert_size: int = 1
) -> Source:
    """Returns the source of parameter `name` of a pipeline stage that begins with layer `first_layer` of the model.

    `config`: the transformers config. Names are those of the platform's models (`model.backbone...`).
    """
    layer = _LAYER.fullmatch(name)
    if layer is not None:
        sharing, names = _OF_LAYER[layer[2]]
        names = tuple(f"model.backbone.layers.{first_layer + int(layer[1])}.{part}" for part in names)
    elif name.startswith("output_layer."):
        sharing, names = "replicated" if value_head else "vocabulary", (f"model.head.{name.rpartition('.')[2]}",)
    else:
        sharing, names = _OF_MODEL[name]
    size = expert_size if sharing == "experts" else tensor_size
    return Source(names, sharing, size, config.num_key_value_heads, head_size(config), config.vocab_size)


def head_size(config: PretrainedConfig) -> int:
    """Returns the number of channels of an attention head, from a transformers config."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def padded(vocabulary: int, tensor_size: int) -> int:
    """Returns `vocabulary` rounded up to a multiple of `tensor_size`. Rows beyond the vocabulary are never read."""
    return -(-vocabulary // tensor_size) * tensor_size
