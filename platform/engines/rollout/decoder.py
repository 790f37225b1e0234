"""The forward pass of generation. A pass has few tokens, so the number of operations determines its time.

Llama, Qwen2, Qwen3 and Mistral layers use one product for query, key and value, one for both halves of the MLP, and a
third of transformers' other operations. Other architectures run transformers' modules. Both read the model's weights;
on a CPU the matrices are packed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_platform.models.attention import Features, window_of
from rl_platform.models.language import LanguageModel
from rl_platform.models.packed import Attention

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


class JoinedLinear:
    """Linear layers of one input as one function; their outputs stand side by side.

    `packed`: the same product with a copy of the weights in a faster layout (accel/packed_linear.py), which `pack`
    renews after every change of the weights. Without it the layers compute one by one.
    """

    def __init__(self, *layers: nn.Linear) -> None:
        self.layers = layers
        self.packed: Callable[[Tensor], Tensor] | None = None

    def pack(self, packed: Callable[[Sequence[nn.Linear]], Callable[[Tensor], Tensor]]) -> None:
        """Replaces the copy by `packed(layers)`."""
        self.packed = None  # frees the old copy before the new one is made
        self.packed = packed(self.layers)

    def __call__(self, states: Tensor) -> Tensor:
        """[..., inputs] -> [..., sum of the outputs]."""
        if self.packed is not None:
            return self.packed(states)
        parts = [F.linear(states, layer.weight, layer.bias) for layer in self.layers]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


class TransformersDecoder:
    """Runs `model` with transformers' modules; its linear layers use packed weights once there are any."""

    def __init__(self, model: LanguageModel) -> None:
        self.model = model
        self.linears = []
        for module in model.modules():
            if type(module) is nn.Linear:
                self.linears.append(JoinedLinear(module))
                module.forward = self.linears[-1]  # type: ignore[method-assign,assignment]

    def hidden(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """tokens, positions [N] -> last hidden states [N,H]."""
        return self.model.hidden(tokens, positions, attention)

    def logits(self, states: Tensor) -> Tensor:
        """[N,H] -> [N,vocabulary]."""
        return self.model.logit_transform(self.model.head(states))


class FusedDecoder:
    """Computes the same as `TransformersDecoder` up to rounding, for the FAMILIES."""

    def __init__(self, model: LanguageModel) -> None:
        self.backbone: Any = model.backbone
        windows = [window_of(model.config, number) for number in range(len(self.backbone.layers))]
        self.layers = [
            _Layer(layer, number, window)
            for number, (layer, window) in enumerate(zip(self.backbone.layers, windows, strict=True))
        ]
        self.head = JoinedLinear(model.head)
        self.linears = [linear for layer in self.layers for linear in layer.linears] + [self.head]

    def hidden(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """As `TransformersDecoder.hidden`."""
        states = self.backbone.embed_tokens(tokens)
        cos, sin = (part[0, :, None] for part in self.backbone.rotary_emb(states, positions[None]))
        half = sin.shape[-1] // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
        for layer in self.layers:
            states = layer(states, cos, sin, attention)
        return _norm(self.backbone.norm)(states)

    def logits(self, states: Tensor) -> Tensor:
        """As `TransformersDecoder.logits`."""
        return self.head(states)


class _Layer:
    def __init__(self, layer: Any, number: int, window: int | None) -> None:
        self.features = None if window is None else Features(window)
        attention, mlp = layer.self_attn, layer.mlp
        self.number, self.scaling, self.head_dim = number, attention.scaling, attention.head_dim
        self.key_heads = attention.k_proj.out_features // self.head_dim
        self.query_heads = attention.q_proj.out_features // self.head_dim
        self.norm, self.mlp_norm = _norm(layer.input_layernorm), _norm(layer.post_attention_layernorm)
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        self.head_norms = [_norm(norm) for norm in norms if norm is not None]
        self.qkv = JoinedLinear(attention.q_proj, attention.k_proj, attention.v_proj)
        self.output = JoinedLinear(attention.o_proj)
        self.gate_up = JoinedLinear(mlp.gate_proj, mlp.up_proj)
        self.down = JoinedLinear(mlp.down_proj)
        self.linears = [self.qkv, self.output, self.gate_up, self.down]

    def __call__(self, states: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        """states [N,H] -> [N,H]; cos, sin [N,1,D], the first half of sin negated."""
        count = states.shape[0]
        heads = self.qkv(self.norm(states)).view(count, -1, self.head_dim)
        rotated = heads[:, : self.query_heads + self.key_heads]  # values have no position
        if self.head_norms:
            parts = rotated.split([self.query_heads, self.key_heads], dim=1)
            rotated = torch.cat([norm(part) for norm, part in zip(self.head_norms, parts, strict=True)], dim=1)
        # rotary embedding: x cos + (-x2, x1) sin
        rotated = torch.addcmul(rotated * cos, rotated.roll(self.head_dim // 2, -1), sin)
        query, key = rotated.split([self.query_heads, self.key_heads], dim=1)
        value = heads[:, self.query_heads + self.key_heads :]
        query, key, value = (part.transpose(0, 1)[None] for part in (query, key, value))
        seen = attention(self.number, query, key, value, self.scaling, self.features)
        states = states + self.output(seen.reshape(count, -1))
        gate, up = self.gate_up(self.mlp_norm(states)).chunk(2, dim=-1)
        return states + self.down(F.silu(gate) * up)


def _norm(module: Any) -> Callable[[Tensor], Tensor]:
    """A fused RMS norm. It reads the weight at each call, because updates may replace the parameter."""
    return lambda states: F.rms_norm(states, module.weight.shape, module.weight, module.variance_epsilon)


def decoder_for(model: LanguageModel) -> TransformersDecoder | FusedDecoder:
    """Returns the fastest decoder that supports the model's config."""
    config = model.config
    fused = config.model_type in FAMILIES and config.hidden_act == "silu"
    return FusedDecoder(model) if fused else TransformersDecoder(model)
