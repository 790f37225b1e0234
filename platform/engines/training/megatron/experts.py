"""Router and experts of mixture-of-experts layers in Megatron, without fused kernels.

Megatron sends tokens to the ranks of their experts and back. No token is dropped and there is no auxiliary routing
loss.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig


class Router(TopKRouter):
    """Megatron's router with logits in float32. Its own matrix product needs Transformer Engine."""

    def gating(self, input: Tensor) -> Tensor:
        return F.linear(input.float(), self.weight.float())

    def _apply_expert_bias(self, *_: object, **__: object) -> None:
        """Does nothing. Megatron would compile a function for it, which takes seconds."""


class Experts(nn.Module):
    """This rank's experts of a layer: gated feed-forward networks, stored in two tensors as in transformers.

    tokens [N,H], sorted by expert with counts `tokens_per_expert` [E], and routing weights `probs` [N] -> [N,H], and
    None for a bias. Tensor-parallel ranks do not split experts; each processes its own tokens.
    """

    def __init__(self, num_local_experts: int, config: TransformerConfig, **_: object) -> None:
        super().__init__()
        width, inner, dtype = config.hidden_size, config.moe_ffn_hidden_size, config.params_dtype
        self.gate_up = nn.Parameter(torch.empty(num_local_experts, 2 * inner, width, dtype=dtype))
        self.down = nn.Parameter(torch.empty(num_local_experts, width, inner, dtype=dtype))
        for parameter in self.parameters():
            parameter.allreduce = False  # Megatron then sums the gradient over ranks with the same experts
            parameter.tensor_model_parallel = True  # and counts each rank's part in the gradient norm

    def forward(self, tokens: Tensor, tokens_per_expert: Tensor, probs: Tensor) -> tuple[Tensor, None]:
        counts = tokens_per_expert.tolist()
        outputs = []
        for gate_up, down, part, weight in zip(
            self.gate_up, self.down, tokens.split(counts), probs.split(counts), strict=True
        ):
            gate, up = F.linear(part, gate_up).chunk(2, dim=-1)
            inner = F.silu(gate) * up * weight[:, None]
            outputs.append(F.linear(inner.to(tokens.dtype), down))
        return torch.cat(outputs), None
