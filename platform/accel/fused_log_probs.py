"""Log-probs and entropies from hidden states, with a backward pass of its own: logits exist for one chunk at a time.

GPUs use it. Autograd would keep more copies of the logits, and a matrix of gradients for each chunk. As in Liger's
fused linear cross-entropy (Hsu et al., 2024), the logits of a chunk are freed after its use. Liger computes gradients
in the forward pass. Here the loss needs all log-probs first, so the backward pass computes the logits again.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_platform.models import language
from rl_platform.models.language import LogitTransform, Statistic, token_log_probs


def fused_log_probs(
    states: Tensor, targets: Tensor, weight: Tensor, temperature: float, statistic: Statistic, transform: LogitTransform
) -> tuple[Tensor, Tensor | None]:
    """Returns what `token_log_probs` returns, differentiable in `states` [K,H] and `weight` [V,H].

    statistic: none or an entropy.
    """
    kind = states.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else states.dtype
    log_probs, entropies = _FusedLogProbs.apply(states, weight, targets, temperature, statistic, transform, dtype)
    return log_probs, None if statistic == "none" else entropies


class _FusedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        states: Tensor,
        weight: Tensor,
        targets: Tensor,
        temperature: float,
        statistic: Statistic,
        transform: LogitTransform,
        dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        ctx.options = temperature, statistic, transform, dtype
        matrix, parts = weight.to(dtype), []
        for chunk, wanted in _chunks(states, targets):
            log_probs, entropies = token_log_probs(chunk.to(dtype), wanted, matrix, temperature, statistic, transform)
            parts.append((log_probs, torch.zeros_like(log_probs) if entropies is None else entropies))
        log_probs, entropies = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(states, weight, targets, entropies)
        if statistic != "entropy_gradient":
            ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_log_probs: Tensor, of_entropies: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, targets, entropies = ctx.saved_tensors
        temperature, statistic, transform, dtype = ctx.options
        matrix, of_states = weight.to(dtype), []
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        for chunk, wanted, weights, entropy, of_entropy in _chunks(
            states, targets, of_log_probs, entropies, of_entropies
        ):
            inputs = chunk.to(dtype)
            logits = transform(_widened(F.linear(inputs, matrix)))
            log_probs = torch.log_softmax(logits / temperature, dim=-1)
            # d log p_t / dz_v = [v = t] - p_v, dH / dz_v = -p_v (log p_v + H)
            factor = weights[:, None]
            if statistic == "entropy_gradient":
                factor = factor + of_entropy[:, None] * (log_probs + entropy[:, None])
            gradient = log_probs.exp_().mul_(factor).neg_()
            gradient.scatter_add_(1, wanted[:, None], weights[:, None])
            gradient /= temperature
            if transform.softcap is not None:
                # y = c tanh(s x / c): dy/dx = s (1 - (y / c)^2)
                gradient *= 1 - (logits / transform.softcap).square()
            gradient = (gradient * transform.scale).to(dtype)
            of_states.append((gradient @ matrix).to(states.dtype))
            if of_weight is not None:
                of_weight += gradient.T @ inputs
        return (torch.cat(of_states) if ctx.needs_input_grad[0] else None, of_weight, *(None,) * 5)


def _chunks(*rows: Tensor) -> Any:
    return zip(*(tensor.split(language.TOKENS_PER_CHUNK) for tensor in rows), strict=True)


def _widened(logits: Tensor) -> Tensor:
    """Converts half precision to float32."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
