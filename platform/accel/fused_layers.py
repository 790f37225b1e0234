"""Decoder layers of the Llama family in half precision on a GPU, with few kernels between their matrix products.

Autocast keeps the residual stream in float32, and casts the inputs of each matrix product. Here a norm with the
addition before it, a rotation or a gate is one kernel, which reads its input once and writes the cast result. Results
differ from transformers' by the rounding of the gate. Not covered: other families, float32, Megatron.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_platform.accel.fused_elementwise import fused, fuses
from rl_platform.accel.recomputed_tensors import FAMILIES
from rl_platform.models.attention import Features, window_of
from rl_platform.models.decoder_layers import DecoderLayer, FeedForward, SelfAttention
from rl_platform.models.packed import Attention

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

LARGE = 24 * 768  # layers times width of the smallest model that is fused


def covers(config: PretrainedConfig, device: torch.device) -> bool:
    """Returns whether the layers can be fused, and are large enough to repay the seconds of compilation."""
    large = config.num_hidden_layers * config.hidden_size >= LARGE
    return config.model_type in FAMILIES and config.hidden_act == "silu" and large and fuses(device)


def fuse_layers(backbone: PreTrainedModel, dtype: torch.dtype) -> None:
    """Replaces the forward methods of layers, attention and feed-forwards of a transformers model."""
    for number, layer in enumerate(backbone.layers):
        layer.forward = partial(_layer, layer, dtype)
        window = window_of(backbone.config, number)
        features = None if window is None else Features(window)
        layer.self_attn.forward = partial(_attention, layer.self_attn, dtype, features)
        layer.mlp.forward = partial(_feed_forward, layer.mlp)


def _layer(layer: DecoderLayer, dtype: torch.dtype, hidden_states: Tensor, **options: object) -> Tensor:
    """hidden_states [1,N,H] -> [1,N,H], the residual stream. options: of `_attention`."""
    functions, first, second = _on(hidden_states.device), layer.input_layernorm, layer.post_attention_layernorm
    normed_states = functions.normed(hidden_states, first.weight, first.variance_epsilon, dtype)
    seen, _ = layer.self_attn(normed_states, **options)
    stream, normed_states = functions.added(hidden_states, seen, second.weight, second.variance_epsilon, dtype)
    return functions.summed(stream, layer.mlp(normed_states))


def _feed_forward(module: FeedForward, states: Tensor) -> Tensor:
    result: Tensor = module.down_proj(_on(states.device).gated(module.gate_proj(states), module.up_proj(states)))
    return result


def _attention(
    module: SelfAttention,
    dtype: torch.dtype,
    features: Features | None,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention: Attention,
    **_: object,
) -> tuple[Tensor, None]:
    """hidden_states [1,N,H], position_embeddings: cos and sin [1,N,D] -> [1,N,H]."""
    projections = module.q_proj, module.k_proj, module.v_proj
    query, key, value = (
        projection(hidden_states)[0].unflatten(-1, (-1, module.head_dim)) for projection in projections
    )
    if hasattr(module, "q_norm") and hasattr(module, "k_norm"):
        query, key = module.q_norm(query), module.k_norm(key)
    cos, sin = (table[0, :, None] for table in position_embeddings)
    query, key = (_on(cos.device).rotated(heads, cos, sin, dtype) for heads in (query, key))
    heads = (part.transpose(0, 1)[None] for part in (query, key, value))
    out = attention(module.layer_idx, *heads, module.scaling, features)
    return module.o_proj(out.flatten(1)[None]), None


@dataclass(frozen=True)
class _Functions:
    normed: Callable[[Tensor, Tensor, float, torch.dtype], Tensor]
    added: Callable[[Tensor, Tensor, Tensor, float, torch.dtype], tuple[Tensor, Tensor]]
    summed: Callable[[Tensor, Tensor], Tensor]
    gated: Callable[[Tensor, Tensor], Tensor]
    rotated: Callable[[Tensor, Tensor, Tensor, torch.dtype], Tensor]


@cache
def _on(device: torch.device) -> _Functions:
    """Returns the functions for tensors of `device`."""
    return _Functions(*(fused(function, device) for function in (normed, added, summed, gated, rotated)))


def normed(states: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    """RMS norm (Zhang and Sennrich, 2019) of states [...,H] -> [...,H] in `dtype`."""
    wide = states.float()
    root = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (weight * (wide * root).to(states.dtype)).to(dtype)


def added(stream: Tensor, more: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns the sum of stream and more [...,H], and its `normed`."""
    total = stream + more
    return total, normed(total, weight, epsilon, dtype)


def summed(stream: Tensor, more: Tensor) -> Tensor:
    """Returns the sum of two tensors of the same shape."""
    return stream + more


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) times up (SwiGLU, Shazeer, 2020), computed in float32."""
    return (F.silu(gate.float()) * up.float()).to(up.dtype)


def rotated(heads: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """Rotary embedding (Su et al., 2021) of heads [N,heads,D] by cos and sin [N,1,D] -> the same in `dtype`."""
    left, right = heads.float().chunk(2, dim=-1)
    return (heads * cos + torch.cat([-right, left], dim=-1) * sin).to(dtype)
