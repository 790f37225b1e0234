"""Decoder layers of the Llama family with bfloat16 products, differentiated by hand, for training on a CPU.

Factors of products are bfloat16, and so are activations between products. The residual stream, norms, rotary positions,
softmax and all gradients of parameters are float32. Gradients are added to `parameter.grad` as soon as they are
computed. Autograd differentiates the attention only. Not covered: biases, adapters, sliding windows, recomputation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from rl_platform.accel.bfloat16_products import HALF, product
from rl_platform.models.packed import Attention

Rotation = tuple[Tensor, Tensor]
"""cos and sin [N,1,D/2] of the positions."""


class HalfWeights:
    """bfloat16 copy of matrices of equal width, one below the other; copied again after the parameters changed."""

    def __init__(self, *parameters: nn.Parameter) -> None:
        self.parameters = parameters
        self._copy, self._versions = torch.empty(0, dtype=HALF), [-1]

    def __call__(self) -> Tensor:
        versions = [parameter._version for parameter in self.parameters]
        if versions != self._versions:
            rows = sum(len(parameter) for parameter in self.parameters)
            if not len(self._copy):
                self._copy = torch.empty(rows, self.parameters[0].shape[1], dtype=HALF)
            parts = self._copy.split([len(parameter) for parameter in self.parameters])
            for part, parameter in zip(parts, self.parameters, strict=True):
                part.copy_(parameter.detach())
            self._versions = versions
        return self._copy

    def add_gradient(self, of_outputs: Tensor, inputs: Tensor) -> None:
        """of_outputs [N,rows], inputs [N,width], both bfloat16."""
        parts = of_outputs.split([len(parameter) for parameter in self.parameters], dim=1)
        for part, parameter in zip(parts, self.parameters, strict=True):
            fresh = parameter.grad is None
            if fresh:
                parameter.grad = torch.empty_like(parameter)
            product(part.t(), inputs, parameter.grad, add=not fresh)


class Norm:
    """RMS norm: y = w x r with r = 1 / sqrt(mean(x^2) + eps)."""

    def __init__(self, module: Any) -> None:
        self.weight: nn.Parameter = module.weight
        self.eps: float = module.variance_epsilon

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """states [N,H] float32 -> y [N,H] float32 and r [N,1]."""
        root = torch.linalg.vector_norm(states, dim=1, keepdim=True)
        root = root.square_().div_(states.shape[1]).add_(self.eps).rsqrt_()
        return (states * root).mul_(self.weight.detach()), root

    def backward(self, of_outputs: Tensor, states: Tensor, root: Tensor) -> Tensor:
        """Returns the gradient of `states` [N,H] and adds that of the weight. Overwrites `of_outputs` [N,H] float32."""
        scaled = states * root
        _add(self.weight, torch.linalg.vecdot(of_outputs, scaled, dim=0))
        # dx = r (w dy - z mean(w dy z)) with z = x r
        inner = of_outputs.mul_(self.weight.detach())
        mean = torch.linalg.vecdot(inner, scaled, dim=1).div_(states.shape[1])
        return inner.addcmul_(scaled, mean[:, None], value=-1).mul_(root)


def _add(parameter: nn.Parameter, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient


def rotate(states: Tensor, rotation: Rotation, out: Tensor) -> Tensor:
    """Turns the pairs (i, i + D/2) of `states` [N,heads,D] by the angles of their positions."""
    cos, sin = rotation
    first, second = states.chunk(2, dim=-1)
    out_first, out_second = out.chunk(2, dim=-1)
    torch.mul(first, cos, out=out_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=out_second).addcmul_(first, sin)
    return out


@dataclass
class _Saved:
    """What the backward pass of a layer reads. states, middle [N,H]: the residual stream before both halves."""

    states: Tensor
    root: Tensor
    normalised: Tensor
    rotation: Rotation
    heads: Sequence[Tensor]
    attended: Tensor
    mixed: Tensor
    middle: Tensor
    middle_root: Tensor
    middle_normalised: Tensor
    gates: Tensor
    product: Tensor


class HalfLayer:
    """A decoder layer; `layer` is one of transformers' Llama."""

    def __init__(self, layer: Any) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.index, self.scaling, self.head_dim = attention.layer_idx, attention.scaling, attention.head_dim
        self.norm, self.middle_norm = Norm(layer.input_layernorm), Norm(layer.post_attention_layernorm)
        self.qkv = HalfWeights(*(getattr(attention, f"{name}_proj").weight for name in "qkv"))
        self.heads = [len(weight) // self.head_dim for weight in self.qkv.parameters]
        self.out = HalfWeights(attention.o_proj.weight)
        self.gate_up = HalfWeights(mlp.gate_proj.weight, mlp.up_proj.weight)
        self.down = HalfWeights(mlp.down_proj.weight)

    def forward(
        self, states: Tensor, attention: Attention, rotation: Rotation, *, training: bool
    ) -> tuple[Tensor, _Saved | None]:
        """states [N,H] float32 -> the same, after the layer."""
        normed, root = self.norm.forward(states)
        normalised = normed.to(HALF)
        joined = F.linear(normalised, self.qkv()).float().unflatten(1, (-1, self.head_dim))
        turned, value = joined.split([self.heads[0] + self.heads[1], self.heads[2]], dim=1)
        query, key = rotate(turned, rotation, torch.empty_like(turned)).split(self.heads[:2], dim=1)
        heads = [part.detach().requires_grad_(training) for part in (query, key, value)]
        with torch.set_grad_enabled(training):
            query, key, value = (part.transpose(0, 1)[None] for part in heads)
            attended = attention(self.index, query, key, value, self.scaling, None).flatten(1)
        mixed = attended.detach().to(HALF)
        middle = product(mixed, self.out().t(), states.clone(), add=True)
        normed, middle_root = self.middle_norm.forward(middle)
        middle_normalised = normed.to(HALF)
        gates = F.linear(middle_normalised, self.gate_up())
        gate, up = gates.chunk(2, dim=1)
        activated = F.silu(gate).mul_(up)
        result = product(activated, self.down().t(), middle.clone(), add=True)
        if not training:
            return result, None
        first = states, root, normalised, rotation, heads, attended, mixed
        return result, _Saved(*first, middle, middle_root, middle_normalised, gates, activated)

    def backward(self, gradient: Tensor, saved: _Saved) -> Tensor:
        """Gradient [N,H] float32 of the result -> of `states`; adds those of the parameters."""
        half = gradient.to(HALF)
        self.down.add_gradient(half, saved.product)
        of_gates = _silu_backward(half @ self.down(), saved.gates)
        self.gate_up.add_gradient(of_gates, saved.middle_normalised)
        of_normed = product(of_gates, self.gate_up(), torch.empty_like(gradient))
        gradient = self.middle_norm.backward(of_normed, saved.middle, saved.middle_root).add_(gradient)

        half = gradient.to(HALF)
        self.out.add_gradient(half, saved.mixed)
        of_attended = product(half, self.out(), torch.empty_like(saved.attended))
        of_heads = torch.autograd.grad(saved.attended, saved.heads, of_attended)
        joined = torch.empty(len(gradient), sum(self.heads), self.head_dim)
        cos, sin = saved.rotation
        of_query, of_key, of_value = joined.split(self.heads, dim=1)
        rotate(of_heads[0], (cos, -sin), of_query)
        rotate(of_heads[1], (cos, -sin), of_key)
        of_value.copy_(of_heads[2])
        of_joined = joined.flatten(1).to(HALF)
        self.qkv.add_gradient(of_joined, saved.normalised)
        of_normed = product(of_joined, self.qkv(), torch.empty_like(gradient))
        return self.norm.backward(of_normed, saved.states, saved.root).add_(gradient)


def _silu_backward(of_product: Tensor, gates: Tensor) -> Tensor:
    """Returns the gradients [N,2I] of gate and up; of_product [N,I] is that of silu(gate) * up."""
    gate, up = gates.chunk(2, dim=1)
    result = torch.empty_like(gates)
    of_gate, of_up = result.chunk(2, dim=1)
    torch.mul(of_product, F.silu(gate), out=of_up)
    torch.ops.aten.silu_backward(of_product.mul_(up), gate, grad_input=of_gate)
    return result


class Layer(torch.autograd.Function):
    """`HalfLayer` as a step of autograd."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, layer: HalfLayer, attention: Attention, rotation: Rotation, training: bool
    ) -> Tensor:
        result, ctx.saved = layer.forward(states, attention, rotation, training=training)
        ctx.layer = layer
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        saved, ctx.saved = ctx.saved, None  # frees the activations of a layer after their use
        return ctx.layer.backward(gradient, saved), None, None, None, None


class FinalNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, states: Tensor, norm: Norm) -> Tensor:
        result, root = norm.forward(states)
        ctx.norm = norm
        ctx.save_for_backward(states, root)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.norm.backward(gradient.clone(), *ctx.saved_tensors), None


class Embedding(torch.autograd.Function):
    """Rows of a matrix, whose gradient is added in place: no dense gradient of its own for tied matrices."""

    @staticmethod
    def forward(ctx: Any, weight: nn.Parameter, tokens: Tensor) -> Tensor:
        ctx.weight = weight
        ctx.save_for_backward(tokens)
        return weight.index_select(0, tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.weight.grad is None:
            ctx.weight.grad = torch.zeros_like(ctx.weight)
        ctx.weight.grad.index_add_(0, ctx.saved_tensors[0], gradient)
        return None, None


class HeadLogProbs(torch.autograd.Function):
    """Log-probs [K] and entropies [K] of `token_log_probs`, with plain logits in float32 from bfloat16 factors."""

    @staticmethod
    def forward(
        ctx: Any, states: Tensor, targets: Tensor, head: HalfWeights, temperature: float, entropy: bool, training: bool
    ) -> tuple[Tensor, Tensor]:
        half, weight = states.to(HALF), head()
        logits = product(half, weight.t(), torch.empty(len(states), len(weight)))
        if temperature != 1.0:
            logits /= temperature
        norm = torch.logsumexp(logits, dim=1)
        log_probs = logits.gather(1, targets[:, None]).squeeze(1) - norm
        entropies = torch.zeros_like(norm)
        if not (training or entropy):
            return log_probs, entropies
        probs = torch.sub(logits, norm[:, None]).exp_()
        if entropy:  # H = logsumexp(z) - sum_v softmax(z)_v z_v
            entropies = norm - torch.linalg.vecdot(probs, logits)
        ctx.head, ctx.temperature = head, temperature
        ctx.save_for_backward(half, targets, probs)
        ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_log_probs: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        half, targets, probs = ctx.saved_tensors
        # d log p_t / dz_v = [v = t] - p_v
        factor = of_log_probs[:, None] / ctx.temperature
        gradient = (probs * -factor).scatter_add_(1, targets[:, None], factor).to(HALF)
        ctx.head.add_gradient(gradient, half)
        return product(gradient, ctx.head(), torch.empty(half.shape)), *(None,) * 5
