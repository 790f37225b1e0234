"""KL divergence over the whole vocabulary between two language models, from their hidden states.

The reference sends hidden states and its output matrix instead of logits, because logits [positions, vocabulary] of a
whole batch do not fit into memory.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from rl_platform.algorithms.kl import full_kl
from rl_platform.models.language import TOKENS_PER_CHUNK


def full_kl_of_states(
    states: Tensor, weight: Tensor, reference_states: Tensor, reference_weight: Tensor, temperature: float
) -> Tensor:
    """Returns KL(pi || pi_ref) [K] float32, differentiable in `states` [K,H] and `weight` [V,H].

    The logits of both models are divided by `temperature`. `reference_states` [K,G] and `reference_weight` [V,G] may
    have another width. At most TOKENS_PER_CHUNK rows of logits exist at a time; the backward pass recomputes them.
    """
    recompute = torch.is_grad_enabled() and len(states) > TOKENS_PER_CHUNK
    parts = []
    for own, reference in zip(states.split(TOKENS_PER_CHUNK), reference_states.split(TOKENS_PER_CHUNK), strict=True):
        arguments = (own, weight, reference, reference_weight, temperature)
        parts.append(checkpoint(_chunk, *arguments, use_reentrant=False) if recompute else _chunk(*arguments))
    return torch.cat(parts)


def _chunk(
    states: Tensor, weight: Tensor, reference_states: Tensor, reference_weight: Tensor, temperature: float
) -> Tensor:
    logits, reference_logits = F.linear(states, weight), F.linear(reference_states, reference_weight)
    return full_kl(logits.float() / temperature, reference_logits.float() / temperature)
