"""Multi-head latent attention (DeepSeek-V2/V3, Moonlight) in Megatron, without Transformer Engine.

Megatron's module with the packed attention of `local_layers`. The projections to the latent vectors are narrow, so each
tensor rank holds all of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import multi_latent_attention
from torch import Tensor, nn

from rl_platform.engines.training.megatron.local_layers import PackedRotary, RMSNorm

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    from rl_platform.engines.training.megatron.input import PackedInput


# The layers below are not Transformer Engine's. Megatron tests for that, and the test needs Transformer Engine.
multi_latent_attention.HAVE_TE = False


class LatentAttention(multi_latent_attention.MLASelfAttention):
    """`rotary`: the rotary embedding and `scaling` the factor of attention scores, both of the transformers model."""

    def __init__(self, config: MLATransformerConfig, *args: Any, rotary: Any, scaling: float, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.rotary_pos_emb = LatentRotary(rotary.inv_freq, rotary.attention_scaling)
        self.core_attention.scaling = scaling
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = DownProjection(config, config.q_lora_rank)
        self.linear_kv_down_proj = DownProjection(config, config.kv_lora_rank + config.qk_pos_emb_head_dim)


class LatentRotary(PackedRotary):
    """As `PackedRotary`; also returns the factor of cosines and sines."""

    def __init__(self, frequencies: Tensor, factor: float) -> None:
        super().__init__(frequencies)
        self.factor = factor

    def forward(self, packed: PackedInput, **_: object) -> tuple[Tensor, float]:
        return super().forward(packed), self.factor


class LatentNorm(RMSNorm):
    """The norm of a latent vector. Its epsilon is the default of transformers, whatever the model's other norms use."""

    def __init__(self, config: MLATransformerConfig, hidden_size: int, eps: float = 0.0) -> None:
        super().__init__(config, hidden_size, 1e-6)


class DownProjection(nn.Module):
    """[N,1,H] of this rank's tokens -> [N,1,width]. Tensor ranks have sequence parallelism, see `supported`."""

    def __init__(self, config: MLATransformerConfig, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, config.hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, hidden: Tensor) -> tuple[Tensor, None]:
        return F.linear(hidden, self.weight), None
