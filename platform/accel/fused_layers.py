"""Decoder layers of the Llama family in half precision on a GPU, with few kernels between their matrix products.

Autocast keeps the residual stream in float32, and casts the inputs of each matrix product. Here a norm, a rotation or a
gate is one kernel that reads its input once and writes the cast result. Results differ from transformers' by the
rounding of the gate. Not covered: other families, float32, Megatron.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_platform.accel.fused_elementwise import fused, fuses
from rl_platform.accel.recomputed_tensors import FAMILIES
from rl_platform.models.attention import Features, window_of
from rl_platform.models.packed import Attention

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LARGE = 24 * 768  # layers times width of the smallest model that is fused


def covers(config: PretrainedConfig, device: torch.device) -> bool:
    """Returns whether the layers can be fused, and are large enough to repay the seconds of compilation."""
    large = config.num_hidden_layers * config.hidden_size >= LARGE
    return config.model_type in FAMILIES and config.hidden_act == "silu" and large and fuses(device)


def fuse_layers(backbone: Any, dtype: torch.dtype) -> None:
    """Replaces the forward methods of norms, attention and feed-forwards of a transformers model."""
    for number, layer in enumerate(backbone.layers):
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.forward = partial(_norm, norm, dtype)
        window = window_of(backbone.config, number)
        features = None if window is None else Features(window)
        layer.self_attn.forward = partial(_attention, layer.self_attn, dtype, features)
        layer.mlp.forward = partial(_feed_forward, layer.mlp)


def _norm(module: Any, dtype: torch.dtype, states: Tensor) -> Tensor:
    return _on(states.device).normed(states, module.weight, module.variance_epsilon, dtype)


def _feed_forward(module: Any, states: Tensor) -> Tensor:
    result: Tensor = module.down_proj(_on(states.device).gated(module.gate_proj(states), module.up_proj(states)))
    return result


def _attention(
    module: Any,
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
    if hasattr(module, "q_norm"):
        query, key = module.q_norm(query), module.k_norm(key)
    cos, sin = (table[0, :, None] for table in position_embeddings)
    query, key = (_on(cos.device).rotated(heads, cos, sin, dtype) for heads in (query, key))
    heads = (part.transpose(0, 1)[None] for part in (query, key, value))
    out = attention(module.layer_idx, *heads, module.scaling, features)
    return module.o_proj(out.flatten(1)[None]), None


@dataclass(frozen=True)
class _Functions:
    normed: Callable[[Tensor, Tensor, float, torch.dtype], Tensor]
    gated: Callable[[Tensor, Tensor], Tensor]
    rotated: Callable[[Tensor, Tensor, Tensor, torch.dtype], Tensor]


@cache
def _on(device: torch.device) -> _Functions:
    """Returns the functions for tensors of `device`."""
    return _Functions(fused(normed, device), fused(gated, device), fused(rotated, device))


def normed(states: Tensor, weight: Tensor, epsilon: float, dtype: torch.dtype) -> Tensor:
    """RMS norm (Zhang and Sennrich, 2019) of states [...,H] -> [...,H] in `dtype`."""
    wide = states.float()
    root = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (weight * (wide * root).to(states.dtype)).to(dtype)


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) times up (SwiGLU, Shazeer, 2020), computed in float32."""
    return (F.silu(gate.float()) * up.float()).to(up.dtype)


def rotated(heads: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype) -> Tensor:
    """Rotary embedding (Su et al., 2021) of heads [N,heads,D] by cos and sin [N,1,D] -> the same in `dtype`."""
    left, right = heads.float().chunk(2, dim=-1)
    return (heads * cos + torch.cat([-right, left], dim=-1) * sin).to(dtype)
