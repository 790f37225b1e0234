"""Router and experts of mixture-of-experts layers in Megatron, without fused kernels.

Megatron sends tokens to the ranks of their experts and back. No token is dropped.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from rl_platform.engines.training.megatron.input import PackedInput
    from rl_platform.engines.training.megatron.mixture import Mixture


class Router(nn.Module):
    """Routes tokens as transformers does, with logits in float32.

    hidden states [N,1,H] -> weights [N,E], 0 for experts that are not selected, and selected [N,E] bool. Megatron's own
    router computes other groups, and needs Transformer Engine for its matrix product.
    """

    def __init__(self, mixture: Mixture, config: TransformerConfig, **_: object) -> None:
        super().__init__()
        self.mixture = mixture
        self.weight = nn.Parameter(torch.empty(mixture.experts, config.hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel
        # A buffer: its size decides ties of experts, and no gradient reaches it.
        self.register_buffer("correction", torch.zeros(mixture.experts) if mixture.correction else None)

        self.layer_number = 0
        self.packed: PackedInput | None = None  # the tokens of the next call

    def set_layer_number(self, layer_number: int) -> None:
        self.layer_number = layer_number

    def forward(self, hidden: Tensor, _padding: object = None) -> tuple[Tensor, Tensor]:
        logits = F.linear(hidden.flatten(0, 1).float(), self.weight.float())
        scores = self.mixture.scores(logits)
        routes = self.mixture.routes(scores, self.correction)
        if self.packed is not None and self.packed.routes is not None:
            given = self.packed.routes[:, self.layer_number - 1]
            routes = torch.where(given >= 0, given, routes)
        weights = torch.zeros_like(scores).scatter(1, routes, self.mixture.weights(logits, scores, routes))
        selected = torch.zeros_like(scores, dtype=torch.bool).scatter(1, routes, True)
        if self.packed is not None and self.packed.balance is not None:
            weights = self.packed.balance.attached(self.layer_number, weights, scores, selected, self.mixture.active)
        return weights, selected


def give_tokens_to_router(layer: nn.Module) -> None:
    """Lets each call of a Megatron layer, also a recomputed one, set `Router.packed`. Ignores layers without router."""
    if hasattr(layer.mlp, "router"):
        layer.register_forward_pre_hook(_give_tokens, with_kwargs=True)


def _give_tokens(layer: TransformerLayer, _: object, options: dict[str, PackedInput]) -> None:
    layer.mlp.router.packed = options["packed_seq_params"]


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
