"""Mixtures of experts in Megatron's layers, without fused kernels: who computes what of a token, and the experts.

Megatron sends tokens to the ranks that hold their experts and back. No token is dropped, and no loss of the routing's
own is added: the policy's and the value loss are all that is trained on.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor, nn


class Router(TopKRouter):
    """Megatron's, with routing weights in float32; its own product asks for Transformer Engine."""

    def gating(self, input: Tensor) -> Tensor:
        return F.linear(input.float(), self.weight.float())

    def _apply_expert_bias(self, *_: Any, **__: Any) -> None:
        """There is none. Megatron would compile a function to find that out, which takes a C++ compiler seconds."""


class Experts(nn.Module):
    """This rank's experts of a layer, each a gated feed-forward network, as transformers keeps them: in two tensors.

    tokens [N,H], those of each expert side by side as `tokens_per_expert` [E] counts them, and their routing weights
    `probs` [N] -> [N,H], and None for a bias. Tensor ranks do not split experts: each works on tokens of its own.
    """

    def __init__(self, num_local_experts: int, config: Any, **_: Any) -> None:
        super().__init__()
        width, inner, dtype = config.hidden_size, config.moe_ffn_hidden_size, config.params_dtype
        self.gate_up = nn.Parameter(torch.empty(num_local_experts, 2 * inner, width, dtype=dtype))
        self.down = nn.Parameter(torch.empty(num_local_experts, width, inner, dtype=dtype))
        for parameter in self.parameters():
            parameter.allreduce = False  # Megatron's mark: the ranks that hold the same experts sum its gradient
            parameter.tensor_model_parallel = True  # and each rank's share counts in the norm of the gradient

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
