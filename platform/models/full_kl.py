"""KL over the whole vocabulary between two language models, from their hidden states, a chunk of positions at a time.

The reference hands over hidden states and its output matrix rather than logits: [positions, vocabulary] numbers of a
batch would not fit anywhere, and log-probs of sampled tokens are not enough.
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
    """KL(pi || pi_ref) [K] float32 with gradient to `states` [K,H] and `weight` [V,H]; both logits / `temperature`.

    `reference_states` [K,G] and `reference_weight` [V,G] may be of another width. At most TOKENS_PER_CHUNK rows of
    logits exist at the same time; in training they are computed again for the backward.
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
