"""The forward pass of generation. A pass has few tokens, so the number of operations determines its time.

Llama, Qwen2, Qwen3 and Mistral layers use one product for query, key and value, one for both halves of the MLP, and a
third of transformers' other operations. Other architectures run transformers' modules. Both read the model's weights;
on a CPU the matrices are packed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rl_platform import acceleration
from rl_platform.models.attention import Features, window_of
from rl_platform.models.decoder_layers import DecoderLayer, RMSNormModule
from rl_platform.models.language import LanguageModel
from rl_platform.models.packed import Attention

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")


class JoinedLinear:
    """Linear layers of one input as one function; their outputs stand side by side.

    `packed`: the same product with a copy of the weights in a faster layout (accel/packed_linear.py). It must be None
    or made again after every change of the weights. Without it the layers compute one by one.
    """

    def __init__(self, *layers: nn.Linear) -> None:
        self.layers = layers
        self.packed: Callable[[Tensor], Tensor] | None = None

    def pack(self, packed: Callable[..., Callable[[Tensor], Tensor]], dtype: torch.dtype) -> None:
        """Sets the copy to `packed(layers, dtype)`; dtype: of the inputs."""
        self.packed = packed(self.layers, dtype)

    def __call__(self, states: Tensor) -> Tensor:
        """Returns the outputs of all layers [N, sum of outputs] for states [N,inputs], without gradients.

        A single layer takes any leading dimensions.
        """
        if self.packed is not None:
            return self.packed(states)
        if len(self.layers) == 1:
            return F.linear(states, self.layers[0].weight, self.layers[0].bias)
        sizes = [layer.out_features for layer in self.layers]
        outputs = states.new_empty(*states.shape[:-1], sum(sizes))
        for layer, part in zip(self.layers, outputs.split(sizes, dim=-1), strict=True):
            if layer.bias is None:
                torch.mm(states, layer.weight.T, out=part)
            else:
                torch.addmm(layer.bias, states, layer.weight.T, out=part)
        return outputs


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


class RowOperations:
    """The operations between the matrix products. accel/row_kernels.py has the same for bfloat16 on a CPU."""

    def residual(self, embedded: Tensor) -> Tensor:
        """Returns the start of the residual stream [N,H], in its type; may return `embedded` [N,H] itself."""
        return embedded

    def norm(self, states: Tensor, module: RMSNormModule, more: Tensor | None = None) -> Tensor:
        """Adds `more` [N,H] to `states` [N,H] in place and returns the RMS norm of the sum [N,H].

        Reads the weight of `module` at each call, because updates may replace the parameter.
        """
        if more is not None:
            states += more
        return F.rms_norm(states, module.weight.shape, module.weight, module.variance_epsilon)

    def rotate(self, heads: Tensor, count: int, cos: Tensor, sin: Tensor) -> Tensor:
        """heads [N,heads,D] -> [N,>=count,D]: the first `count` with the rotary embedding; may overwrite `heads`.

        cos, sin [N,1,D], the first half of sin negated.
        """
        heads = heads[:, :count]
        # x cos + (-x2, x1) sin
        return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), sin)

    def gated(self, gate_up: Tensor) -> Tensor:
        """[N,2I] -> [N,I]: silu(first half) times second half."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up


PLAIN_ROWS = RowOperations()


class FusedDecoder:
    """Computes the same as `TransformersDecoder` up to rounding, for the FAMILIES. head: replaces the model's."""

    def __init__(
        self, model: LanguageModel, rows: RowOperations | None = None, head: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self.backbone = model.backbone
        self.rows = rows or PLAIN_ROWS
        windows = [window_of(model.config, number) for number in range(len(self.backbone.layers))]
        self.layers = [
            _Layer(layer, number, window, self.rows)
            for number, (layer, window) in enumerate(zip(self.backbone.layers, windows, strict=True))
        ]
        self.linears = [linear for layer in self.layers for linear in layer.linears]
        self.head = head or JoinedLinear(model.head)
        if isinstance(self.head, JoinedLinear):
            self.linears.append(self.head)

    def use(self, rows: RowOperations) -> None:
        """Computes the operations between the matrix products with `rows` from now on."""
        self.rows = rows
        for layer in self.layers:
            layer.rows = rows

    def hidden(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """As `TransformersDecoder.hidden`."""
        states = self.rows.residual(self.backbone.embed_tokens(tokens))
        cos, sin = (part[0, :, None] for part in self.backbone.rotary_emb(states, positions[None]))
        half = sin.shape[-1] // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
        more = None
        for layer in self.layers:
            more = layer(states, more, cos, sin, attention)
        return self.rows.norm(states, self.backbone.norm, more)

    def logits(self, states: Tensor) -> Tensor:
        """As `TransformersDecoder.logits`."""
        return self.head(states)


class _Layer:
    def __init__(self, layer: DecoderLayer, number: int, window: int | None, rows: RowOperations) -> None:
        self.features = None if window is None else Features(window)
        self.rows = rows
        attention, mlp = layer.self_attn, layer.mlp
        self.number, self.scaling, self.head_dim = number, attention.scaling, attention.head_dim
        self.key_heads = attention.k_proj.out_features // self.head_dim
        self.query_heads = attention.q_proj.out_features // self.head_dim
        self.norm, self.mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        self.head_norms = [norm for norm in norms if norm is not None]
        self.qkv = JoinedLinear(attention.q_proj, attention.k_proj, attention.v_proj)
        self.output = JoinedLinear(attention.o_proj)
        self.gate_up = JoinedLinear(mlp.gate_proj, mlp.up_proj)
        self.down = JoinedLinear(mlp.down_proj)
        self.linears = [self.qkv, self.output, self.gate_up, self.down]

    def __call__(self, states: Tensor, more: Tensor | None, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        """Adds `more`, the last layer's result, and attention to `states` [N,H] in place; returns the MLP's [N,H].

        cos, sin [N,1,D], the first half of sin negated.
        """
        count, rotated = states.shape[0], self.query_heads + self.key_heads  # values have no position
        heads = self.qkv(self.rows.norm(states, self.norm, more)).view(count, -1, self.head_dim)
        value = heads[:, rotated:]
        if self.head_norms:
            parts = heads[:, :rotated].split([self.query_heads, self.key_heads], dim=1)
            normed = [PLAIN_ROWS.norm(part, norm) for norm, part in zip(self.head_norms, parts, strict=True)]
            heads = torch.cat(normed, dim=1)
        placed = self.rows.rotate(heads, rotated, cos, sin)
        query, key = placed[:, : self.query_heads], placed[:, self.query_heads : rotated]
        query, key, value = (part.transpose(0, 1)[None] for part in (query, key, value))
        seen = attention(self.number, query, key, value, self.scaling, self.features)
        normed_states = self.rows.norm(states, self.mlp_norm, self.output(seen.reshape(count, -1)))
        return self.down(self.rows.gated(self.gate_up(normed_states)))


def decoder_for(model: LanguageModel, device: torch.device, dtype: torch.dtype) -> TransformersDecoder | FusedDecoder:
    """Returns the fastest decoder that supports the model's config; device and dtype: of its weights."""
    config = model.config
    fused = config.model_type in FAMILIES and config.hidden_act == "silu"
    if not fused:
        return TransformersDecoder(model)
    head = acceleration.find("float32_head", model.head, device, dtype)
    return FusedDecoder(model, acceleration.find("row_operations", device, dtype), head)
