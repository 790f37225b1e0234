"""Samples tokens: temperature, top-k, top-p, and one stream of random numbers per request."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_platform import acceleration
from rl_platform.records import SamplingParams

BLOCK = 64  # tokens
FIXED_POINT = 2.0**52  # units in a probability of 1: sums are exact in int64 and in float64


def uniforms(seed: int, count: int) -> Tensor:
    """Returns the random numbers of one request, [count] float64 in [0,1). They depend on its seed only."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sampler(
    device: torch.device, dtype: torch.dtype, sampling: SamplingParams
) -> Callable[[Tensor, Tensor, SamplingParams], tuple[Tensor, Tensor]]:
    """Returns `sample`, or its compiled equivalent, for the logits of a model whose weights have this type."""
    return acceleration.find("sampling_function", device, dtype, sampling) or sample


def sample(logits: Tensor, uniform: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """Returns sampled tokens [n] and their log-probs [n] for logits [n,V] and random numbers `uniform` [n] in [0,1).

    The log-probs are those of the temperature-scaled distribution, before top-k and top-p.

    Inverse transform sampling: a token is the first whose cumulative probability exceeds the uniform number. Greedy
    decoding reports log-probs at temperature 1.
    """
    scaled = logits if sampling.temperature in (0.0, 1.0) else logits.float() / sampling.temperature
    probs = torch.softmax(scaled, dim=-1, dtype=torch.float32)  # a GPU converts half precision in the same kernel
    if sampling.temperature == 0:
        tokens = scaled.argmax(dim=-1)
    else:
        tokens = _drawn(_filtered(probs, sampling), uniform.to(probs.device))
    return tokens, probs.gather(1, tokens[:, None]).squeeze(1).log()  # a sampled token has a probability above 0


def _drawn(probs: Tensor, uniform: Tensor) -> Tensor:
    """Returns tokens [n] drawn from unnormalised probs [n,V]: selects first a block of tokens, then a token in it.

    Block sums read every probability once and store no cumulative sum [n,V].
    """
    missing = -probs.shape[1] % BLOCK
    blocks = (F.pad(probs, (0, missing)) if missing else probs).view(len(probs), -1, BLOCK)  # `pad` always copies
    totals = _cumulative(blocks.sum(dim=-1, dtype=torch.float64))
    place, rest = _passed(totals, uniform * totals[:, -1])
    inside = _cumulative(blocks[torch.arange(len(probs), device=probs.device), place].double())
    return (place * BLOCK + _passed(inside, rest)[0]).clamp(max=probs.shape[1] - 1)  # NaN: any token, see `_passed`


def _cumulative(probs: Tensor) -> Tensor:
    """Returns the cumulative sums [n,K] of probabilities [n,K], whose rows sum to at most 1.

    With `runner.deterministic` GPUs add integers, because CUDA's cumulative sum of floats does not repeat its result.
    """
    if probs.is_cuda and torch.are_deterministic_algorithms_enabled():
        return _fixed_point_sums(probs)
    return probs.cumsum(dim=-1)


def _fixed_point_sums(probs: Tensor) -> Tensor:
    return (probs.double() * FIXED_POINT).round().long().cumsum(dim=-1).double() / FIXED_POINT


def _passed(cumulative: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the first index [n] at which `cumulative` [n,K] exceeds `threshold` [n], and the rest of it [n].

    The rest is the threshold minus the sum before that index.

    An entry of probability 0 is never selected, even if rounding raises the threshold to the total. NaN selects the
    last entry: its log-prob is NaN too, and the trainer reports the model that diverged.
    """
    below_end = torch.minimum(threshold, torch.nextafter(cumulative[:, -1], torch.zeros_like(threshold)))
    place = torch.searchsorted(cumulative, below_end[:, None], right=True).clamp(max=cumulative.shape[1] - 1)
    before = torch.where(place > 0, cumulative.gather(1, (place - 1).clamp(min=0)), 0.0)
    return place.squeeze(1), below_end - before.squeeze(1)


def _filtered(probs: Tensor, sampling: SamplingParams) -> Tensor:
    """Sets probabilities outside the top-k and the top-p nucleus to 0, without renormalising.

    The operations are in place, because these tensors are the largest of a decoding step.
    """
    if sampling.top_k and sampling.top_k < probs.shape[1]:
        values, indices = probs.topk(sampling.top_k, dim=-1)
        probs = torch.zeros_like(probs).scatter_(1, indices, values)
        del values, indices  # up to three times the size of probs
    if sampling.top_p < 1:
        ordered, order = probs.sort(dim=-1, descending=True)
        mass = _cumulative(ordered)
        limit = sampling.top_p * mass[:, -1:]
        ordered.masked_fill_(mass.sub_(ordered) >= limit, 0.0)  # earlier tokens already have the mass
        probs = torch.zeros_like(probs).scatter_(1, order, ordered)
    return probs
