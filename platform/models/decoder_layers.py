"""The parts of transformers' decoder layers that other code reads: of Llama and of families with the same attributes.

Each family has classes of its own, so these are protocols. Not covered: mixtures of experts, latent attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from torch import Tensor, nn


class RMSNormModule(Protocol):
    """An RMS norm (Zhang and Sennrich, 2019)."""

    variance_epsilon: float

    @property
    def weight(self) -> Tensor: ...


class SelfAttention(Protocol):
    """Families with norms of query and key heads have `q_norm` and `k_norm` too."""

    layer_idx: int
    head_dim: int
    scaling: float
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Linear

    def __call__(self, hidden_states: Tensor, **options: object) -> tuple[Tensor, Tensor | None]: ...


class FeedForward(Protocol):
    """A gated MLP (Shazeer, 2020): down_proj(act_fn(gate_proj(x)) * up_proj(x))."""

    act_fn: Callable[[Tensor], Tensor]
    gate_proj: nn.Linear
    up_proj: nn.Linear
    down_proj: nn.Linear

    def __call__(self, states: Tensor, /) -> Tensor: ...


class DecoderLayer(Protocol):
    self_attn: SelfAttention
    mlp: FeedForward
    input_layernorm: RMSNormModule
    post_attention_layernorm: RMSNormModule
