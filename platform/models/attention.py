"""Attention with what some families add to the causal softmax: windows, capped scores, sinks.

`attend` computes a block of queries; which tokens they see is up to the callers' masks (`packed`, and the paged caches
of the rollout engine).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Features:
    """The additions of a layer to causal attention.

    window: a position attends to itself and to the `window` - 1 positions before it. softcap c: a score s becomes
    c tanh(s / c) (Gemma 2). sinks [Hq]: a score per head that takes part in the softmax and has no value (GPT-OSS).
    """

    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


PLAIN = Features()


def window_of(config: PretrainedConfig, layer: int) -> int | None:
    """Returns the window of a layer."""
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and kinds[layer] != "sliding_attention":
        return None
    return getattr(config, "sliding_window", None) or None  # Qwen2-MoE writes 0 for none


def is_plain(config: PretrainedConfig, longest: int) -> bool:
    """Returns whether all layers compute plain causal attention for sequences of at most `longest` tokens."""
    windows = (window_of(config, layer) for layer in range(config.num_hidden_layers))
    capped = getattr(config, "attn_logit_softcapping", None) is not None
    return not capped and config.model_type != "gpt_oss" and all(not window or window >= longest for window in windows)


def cached_heads(config: PretrainedConfig) -> tuple[int, int]:
    """Returns the number of key and value heads, and the larger of their widths."""
    heads = config.num_attention_heads
    if getattr(config, "kv_lora_rank", None):  # multi-head latent attention, whose keys and values differ in width
        return heads, max(config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim)
    width = getattr(config, "head_dim", None) or config.hidden_size // heads
    return getattr(config, "num_key_value_heads", None) or heads, width


def causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Returns a mask [queries, keys] bool, True where the last `queries` of `keys` positions attend."""
    mask = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(keys - queries)
    return mask if window is None else mask.triu(keys - queries - window + 1)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """query [...,Q,D], key [...,K,D], value [...,K,V] -> [...,Q,V].

    `mask` [Q,K] bool: True where a query attends; None: causal, Q = K. `sinks` [...,1,1]. Capped scores and sinks
    compute the scores of a layer explicitly; the backward pass computes them again and stores none.
    """
    if softcap is None and sinks is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None, scale=scaling)
    if mask is None:
        mask = causal_mask(query.shape[-2], key.shape[-2], None, query.device)
    arguments = (query, key, value, mask, scaling, softcap, sinks)
    if torch.is_grad_enabled():
        result: Tensor = checkpoint(_attend_explicitly, *arguments, use_reentrant=False)
        return result
    return _attend_explicitly(*arguments)


def _attend_explicitly(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    scores = (query @ key.transpose(-2, -1)).float() * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().expand(*scores.shape[:-1], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : mask.shape[-1]]
    return weights.to(value.dtype) @ value
