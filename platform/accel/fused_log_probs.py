"""Log-probs and entropies from hidden states, with a backward pass of its own: logits exist for one chunk at a time.

GPUs use it. Autograd would keep more copies of the logits, and a matrix of gradients for each chunk. As in Liger's
fused linear cross-entropy (Hsu et al., 2024), the logits of a chunk are freed after its use. Liger computes gradients
in the forward pass. Here the loss needs all log-probs first, so the backward pass computes the logits again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rl_platform.accel.fused_elementwise import fused, fuses
from rl_platform.models import language
from rl_platform.models.autograd_context import AutogradContext
from rl_platform.models.language import LogitTransform, Statistic

FUSED_TOKENS = 3072  # of a chunk: its logits and their gradient in half precision take no more than 1,024 in float32


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


class _FusedLogProbsContext(AutogradContext):
    options: tuple[float, Statistic, LogitTransform, torch.dtype]


class _FusedLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _FusedLogProbsContext,
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
        read = _on(states.device)[0]
        for chunk, wanted in _chunks(states, targets):
            logits = F.linear(chunk.to(dtype), matrix)
            parts.append(read(logits, wanted, temperature, transform, statistic != "none"))
        log_probs, entropies, norms = (torch.cat(column) for column in zip(*parts, strict=True))
        ctx.save_for_backward(states, weight, targets, norms, entropies)
        if statistic != "entropy_gradient":
            ctx.mark_non_differentiable(entropies)
        return log_probs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: _FusedLogProbsContext, of_log_probs: Tensor, of_entropies: Tensor) -> tuple[Tensor | None, ...]:
        states, weight, targets, norms, entropies = ctx.saved_tensors
        temperature, statistic, transform, dtype = ctx.options
        matrix, of_states = weight.to(dtype), []
        of_weight = torch.zeros_like(weight) if ctx.needs_input_grad[1] else None
        differentiate = _on(states.device)[1]
        for chunk, *rows in _chunks(states, targets, norms, of_log_probs, entropies, of_entropies):
            inputs = chunk.to(dtype)
            logits = F.linear(inputs, matrix)
            gradient = differentiate(logits, *rows, temperature, transform, statistic == "entropy_gradient")
            of_states.append((gradient @ matrix).to(states.dtype))
            if of_weight is not None:
                of_weight += gradient.T @ inputs
        return (torch.cat(of_states) if ctx.needs_input_grad[0] else None, of_weight, *(None,) * 5)


@cache
def _on(device: torch.device) -> tuple[Callable[..., tuple[Tensor, Tensor, Tensor]], Callable[..., Tensor]]:
    """Returns `statistics` and `gradient_of_logits` for tensors of `device`."""
    return fused(statistics, device), fused(gradient_of_logits, device)


def statistics(
    logits: Tensor, targets: Tensor, temperature: float, transform: LogitTransform, entropy: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs of the head [K,V], targets [K] -> log-probs, entropies and normalisers [K]; without `entropy` zeros."""
    scaled = transform(_widened(logits))
    if temperature != 1.0:
        scaled = scaled / temperature
    norms = torch.logsumexp(scaled, dim=-1)
    log_probs = scaled.gather(1, targets[:, None]).squeeze(1) - norms
    if not entropy:
        return log_probs, torch.zeros_like(norms), norms
    # H = logsumexp(z) - sum_v softmax(z)_v z_v
    return log_probs, norms - ((scaled - norms[:, None]).exp() * scaled).sum(dim=-1), norms


def gradient_of_logits(
    logits: Tensor,
    targets: Tensor,
    norms: Tensor,
    of_log_probs: Tensor,
    entropies: Tensor,
    of_entropies: Tensor,
    temperature: float,
    transform: LogitTransform,
    entropy: bool,
) -> Tensor:
    """Outputs of the head [K,V], results of `statistics` and their gradients [K] -> gradient [K,V] in the same type.

    entropy: entropies have a gradient.
    """
    capped = transform(_widened(logits))
    log_probs = (capped if temperature == 1.0 else capped / temperature) - norms[:, None]
    # d log p_t / dz_v = [v = t] - p_v, dH / dz_v = -p_v (log p_v + H)
    factor = of_log_probs[:, None]
    if entropy:
        factor = factor + of_entropies[:, None] * (log_probs + entropies[:, None])
    chosen = torch.arange(logits.shape[1], device=logits.device) == targets[:, None]
    gradient = torch.where(chosen, of_log_probs[:, None], 0.0) - log_probs.exp() * factor
    if transform.softcap is not None:
        # y = c tanh(s x / c): dy/dx = s (1 - (y / c)^2)
        gradient = gradient * (1 - (capped / transform.softcap).square())
    return (gradient * (transform.scale / temperature)).to(logits.dtype)


def _chunks(*rows: Tensor) -> Iterator[tuple[Tensor, ...]]:
    tokens = FUSED_TOKENS if fuses(rows[0].device) else language.TOKENS_PER_CHUNK
    return zip(*(tensor.split(tokens) for tensor in rows), strict=True)


def _widened(logits: Tensor) -> Tensor:
    """Converts half precision to float32."""
    return logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
