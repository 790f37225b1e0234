"""Modules for Megatron's local layer specification: packed sequences on any device, without fused kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_platform.models.attention import Features

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig

    from rl_platform.engines.training.megatron.input import PackedInput


class RMSNorm(nn.RMSNorm):
    """RMS norm. Its `sequence_parallel` mark makes Megatron sum the gradients of ranks that split the tokens."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=torch.get_default_device())
        self.weight.sequence_parallel = config.sequence_parallel


class PackedCoreAttention(nn.Module):
    """Causal attention of packed sequences by `packed_seq_params.attention`, a `PackedAttention`.

    query [N,heads,D], key and value [N,key heads,D] -> [N,heads*D], with zeros for the last `packed_seq_params.padding`
    tokens, which belong to no sequence. windows: of each layer of the model, see `Features`; empty: of none.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *_: object,
        softmax_scale: float | None = None,
        windows: Sequence[int | None] = (),
        **__: object,
    ) -> None:
        super().__init__()
        window = windows[layer_number - 1] if windows else None
        self.features = None if window is None else Features(window)
        self.scaling = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: object, packed_seq_params: PackedInput, **__: object
    ) -> Tensor:
        padding = packed_seq_params.padding
        real = len(query) - padding
        flat = [tensor[:real].transpose(0, 1)[None] for tensor in (query, key, value)]
        out = packed_seq_params.attention(0, *flat, self.scaling, self.features).flatten(1)
        return F.pad(out, (0, 0, 0, padding)) if padding else out


class PackedRotary(nn.Module):
    """Rotary angles [N,1,1,D] of packed tokens at their positions; `frequencies` [D/2] of the model.

    It replaces Megatron's embedding of positions 0..S-1 and gets the packed sequences in place of a length.
    """

    def __init__(self, frequencies: Tensor) -> None:
        super().__init__()
        self.register_buffer("frequencies", frequencies, persistent=False)

    def get_rotary_seq_len(self, *arguments: object) -> object:
        return arguments[-1]

    def forward(self, packed: PackedInput, **_: object) -> Tensor:
        angles = torch.outer(packed.positions.to(self.frequencies.dtype), self.frequencies)
        return torch.cat([angles, angles], dim=-1)[:, None, None]
