"""Decoder layers of the Llama family with bfloat16 products, differentiated by hand, for training on a CPU.

Factors of products are bfloat16, and so are activations between products. Inputs and outputs of compiled loops
(`row_kernels`) are rounded where the generator rounds them. The residual stream, sums, softmax and all gradients of
parameters are float32. Gradients are added to `parameter.grad` as soon as they are computed. Autograd differentiates
the attention only. Not covered: biases, adapters, sliding windows, recomputation.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_platform.accel.bfloat16_products import HALF, product, rounded
from rl_platform.accel.row_kernels import CompiledRows, gated_backward, norm_backward
from rl_platform.models.autograd_context import AutogradContext
from rl_platform.models.decoder_layers import DecoderLayer, RMSNormModule
from rl_platform.models.language import row_blocks
from rl_platform.models.packed import Attention

ROWS = CompiledRows()
Rotation = tuple[Tensor, Tensor]
"""cos and sin [N,1,D] of the positions, the first half of sin negated."""


class HalfWeights:
    """Matrices of equal width, one below the other, which each call copies to bfloat16.

    The forward and the backward pass make their own copies, so that only the copies in use take memory.
    """

    def __init__(self, *parameters: Tensor) -> None:
        self.parameters = parameters

    def __call__(self) -> Tensor:
        """Returns a new copy [rows,width]."""
        sizes = [len(parameter) for parameter in self.parameters]
        copy = torch.empty(sum(sizes), self.parameters[0].shape[1], dtype=HALF)
        for part, parameter in zip(copy.split(sizes), self.parameters, strict=True):
            part.copy_(parameter.detach())
        return copy

    def add_gradient(self, of_outputs: Tensor, inputs: Tensor) -> None:
        """of_outputs [N,rows], inputs [N,width], both bfloat16."""
        parts = of_outputs.split([len(parameter) for parameter in self.parameters], dim=1)
        for part, parameter in zip(parts, self.parameters, strict=True):
            fresh = parameter.grad is None
            if fresh:
                parameter.grad = torch.empty_like(parameter)
            product(part.t(), inputs, parameter.grad, add=not fresh)


class Norm:
    """RMS norm with its weight rounded to bfloat16, as the generator has it."""

    def __init__(self, module: RMSNormModule) -> None:
        self.parameter, self.variance_epsilon = module.weight, module.variance_epsilon

    @property
    def weight(self) -> Tensor:
        return self.parameter.detach().to(HALF)

    def forward(self, states: Tensor) -> Tensor:
        """states [N,H] float32 -> [N,H] bfloat16."""
        return ROWS.norm(states, self)

    def backward(self, gradient: Tensor, of_outputs: Tensor, states: Tensor) -> Tensor:
        """Adds the gradient of `states` [N,H] to `gradient` in place, returns it, and adds that of the weight.

        Overwrites `of_outputs` [N,H] float32.
        """
        _add(self.parameter, norm_backward(gradient, of_outputs, states, self.weight, self.variance_epsilon))
        return gradient


def _add(parameter: Tensor, gradient: Tensor) -> None:
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad += gradient


@dataclass
class _Saved:
    """The input of a layer's backward pass, which computes norms, gates and attention again, with equal bits.

    states, middle [N,H]: the residual stream before both halves. heads [N,heads,D], attended [N,width]: bfloat16.
    """

    states: Tensor
    rotation: Rotation
    attention: Attention
    heads: Tensor
    attended: Tensor
    middle: Tensor
    gates: Tensor


class HalfLayer:
    """A decoder layer; `layer` is one of transformers' Llama."""

    def __init__(self, layer: DecoderLayer) -> None:
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
        joined = rounded(self.norm.forward(states), self.qkv().t()).unflatten(1, (-1, self.head_dim))
        heads = ROWS.rotate(joined, self.heads[0] + self.heads[1], *rotation)
        attended = self._attended(heads, attention).to(HALF)
        middle = product(attended, self.out().t(), states.clone(), add=True)
        gates = rounded(self.middle_norm.forward(middle), self.gate_up().t())
        result = product(ROWS.gated(gates), self.down().t(), middle.clone(), add=True)
        return result, _Saved(states, rotation, attention, heads, attended, middle, gates) if training else None

    def _attended(self, heads: Tensor, attention: Attention) -> Tensor:
        """Computes attention: heads [N,heads,D] bfloat16 -> [N,width] float32."""
        query, key, value = (part.transpose(0, 1)[None] for part in heads.float().split(self.heads, dim=1))
        return attention(self.index, query, key, value, self.scaling, None).flatten(1)

    def backward(self, gradient: Tensor, saved: _Saved) -> Tensor:
        """Gradient [N,H] float32 of the result -> of `states`; adds those of the parameters."""
        half = gradient.to(HALF)
        self.down.add_gradient(half, ROWS.gated(saved.gates))
        of_gates = gated_backward(rounded(half, self.down()), saved.gates)
        self.gate_up.add_gradient(of_gates, self.middle_norm.forward(saved.middle))
        of_normed = product(of_gates, self.gate_up(), torch.empty_like(gradient))
        gradient = self.middle_norm.backward(gradient.clone(), of_normed, saved.middle)

        half = gradient.to(HALF)
        self.out.add_gradient(half, saved.attended)
        of_attended = product(half, self.out(), torch.empty(saved.attended.shape))
        heads = saved.heads.requires_grad_()
        with torch.enable_grad():
            attended = self._attended(heads, saved.attention)
        (of_heads,) = torch.autograd.grad(attended, heads, of_attended)
        cos, sin = saved.rotation
        of_joined = ROWS.rotate(of_heads, self.heads[0] + self.heads[1], cos, -sin).flatten(1)
        self.qkv.add_gradient(of_joined, self.norm.forward(saved.states))
        of_normed = product(of_joined, self.qkv(), torch.empty_like(gradient))
        return self.norm.backward(gradient, of_normed, saved.states)


class _LayerContext(AutogradContext):
    layer: HalfLayer
    saved: _Saved | None


class Layer(torch.autograd.Function):
    """`HalfLayer` as a step of autograd."""

    @staticmethod
    def forward(
        ctx: _LayerContext,
        states: Tensor,
        layer: HalfLayer,
        attention: Attention,
        rotation: Rotation,
        training: bool,
    ) -> Tensor:
        result, ctx.saved = layer.forward(states, attention, rotation, training=training)
        ctx.layer = layer
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: _LayerContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        saved, ctx.saved = ctx.saved, None  # frees the activations of a layer after their use
        assert saved is not None
        return ctx.layer.backward(gradient, saved), None, None, None, None


class _FinalNormContext(AutogradContext):
    norm: Norm


class FinalNorm(torch.autograd.Function):
    """The last norm of a model: bfloat16 states -> their norm in float32, with its gradient."""

    @staticmethod
    def forward(ctx: _FinalNormContext, states: Tensor, norm: Norm) -> Tensor:
        ctx.norm = norm
        ctx.save_for_backward(states)
        return norm.forward(states).float()

    @staticmethod
    @once_differentiable
    def backward(ctx: _FinalNormContext, gradient: Tensor) -> tuple[Tensor | None, ...]:
        (states,) = ctx.saved_tensors
        return ctx.norm.backward(torch.zeros_like(states), gradient.clone(), states), None


class _HeadContext(AutogradContext):
    head: HalfWeights
    temperature: float


class HeadLogProbs(torch.autograd.Function):
    """Log-probs [K] and entropies [K] of `token_log_probs`, with plain logits in float32 from bfloat16 factors."""

    @staticmethod
    def forward(
        ctx: _HeadContext,
        states: Tensor,
        targets: Tensor,
        head: HalfWeights,
        temperature: float,
        entropy: bool,
        training: bool,
    ) -> tuple[Tensor, Tensor]:
        half, weight = states.to(HALF), head()
        logits = product(half, weight.t(), torch.empty(len(states), len(weight)), exact=True)
        if temperature != 1.0:
            logits /= temperature
        norm = torch.empty(len(logits))
        entropies = torch.zeros_like(norm)
        log_probs = logits.gather(1, targets[:, None]).squeeze(1)
        # a few rows at a time: temporaries of all logits would raise the peak memory of a step
        blocks = map(row_blocks, (logits, norm, entropies))
        for block, block_norm, block_entropies in zip(*blocks, strict=True):
            torch.logsumexp(block, dim=1, out=block_norm)
            if training or entropy:
                probs = torch.sub(block, block_norm[:, None]).exp_()
                if entropy:  # H = logsumexp(z) - sum_v softmax(z)_v z_v
                    torch.sub(block_norm, torch.linalg.vecdot(probs, block), out=block_entropies)
                block.copy_(probs)
        log_probs -= norm
        if not training:
            return log_probs, entropies
        ctx.head, ctx.temperature = head, temperature
        ctx.save_for_backward(half, targets, logits)  # which now hold the probabilities
        ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: _HeadContext, of_log_probs: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        half, targets, probs = ctx.saved_tensors
        # d log p_t / dz_v = [v = t] - p_v
        factor = of_log_probs[:, None] / ctx.temperature
        gradient = probs.mul_(-factor).scatter_add_(1, targets[:, None], factor).to(HALF)
        probs.untyped_storage().resize_(0)  # autograd would keep it while the head's gradient is computed
        of_states = product(gradient, ctx.head(), torch.empty(half.shape))
        ctx.head.add_gradient(gradient, half)
        return of_states, *(None,) * 5
