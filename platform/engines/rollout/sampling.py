"""Drawing tokens: temperature, top-k, top-p, and one stream of random numbers per request."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_platform.records import SamplingParams


def uniforms(seed: int, count: int) -> Tensor:
    """The random numbers of one request, float64 in [0,1): a function of its seed alone."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sample(logits: Tensor, uniform: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """logits [n,V], uniform [n] -> tokens [n], log-probs [n] under the temperature-scaled, unfiltered distribution.

    A token is where the cumulative distribution passes the uniform number. Greedy decoding reports log-probs at
    temperature 1.
    """
    scaled = logits.float() if sampling.temperature in (0.0, 1.0) else logits.float() / sampling.temperature
    log_probs = torch.log_softmax(scaled, dim=-1)
    if sampling.temperature == 0:
        tokens = log_probs.argmax(dim=-1)
    else:
        cumulative = _filtered(log_probs.exp(), sampling).cumsum(dim=-1, dtype=torch.float64)
        thresholds = uniform.to(cumulative.device)[:, None] * cumulative[:, -1:]
        tokens = torch.searchsorted(cumulative, thresholds, right=True).squeeze(1).clamp(max=logits.shape[1] - 1)
    return tokens, log_probs.gather(1, tokens[:, None]).squeeze(1)


def _filtered(probs: Tensor, sampling: SamplingParams) -> Tensor:
    """Probabilities with everything outside the top-k and the top-p nucleus set to 0; not renormalised."""
    if sampling.top_k and sampling.top_k < probs.shape[1]:
        kept = probs.topk(sampling.top_k, dim=-1)
        probs = torch.zeros_like(probs).scatter(1, kept.indices, kept.values)
    if sampling.top_p < 1:
        ordered, order = probs.sort(dim=-1, descending=True)
        mass = ordered.cumsum(dim=-1)
        beyond = mass - ordered >= sampling.top_p * mass[:, -1:]  # the mass before this token suffices already
        probs = torch.zeros_like(probs).scatter(1, order, ordered.masked_fill(beyond, 0.0))
    return probs
