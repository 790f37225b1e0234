"""Drawing tokens: temperature, top-k, top-p, and one stream of random numbers per request."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rl_platform.records import SamplingParams

BLOCK = 64  # tokens


def uniforms(seed: int, count: int) -> Tensor:
    """The random numbers of one request, float64 in [0,1): a function of its seed alone."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def sample(logits: Tensor, uniform: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """logits [n,V], uniform [n] -> tokens [n], log-probs [n] under the temperature-scaled, unfiltered distribution.

    A token is where the cumulative distribution passes the uniform number. Greedy decoding reports log-probs at
    temperature 1.
    """
    scaled = logits.float() if sampling.temperature in (0.0, 1.0) else logits.float() / sampling.temperature
    probs = torch.softmax(scaled, dim=-1)
    if sampling.temperature == 0:
        tokens = scaled.argmax(dim=-1)
    else:
        tokens = _drawn(_filtered(probs, sampling), uniform.to(probs.device))
    return tokens, probs.gather(1, tokens[:, None]).squeeze(1).log()  # not so unlikely as to be 0: it was drawn


def _drawn(probs: Tensor, uniform: Tensor) -> Tensor:
    """probs [n,V], not normalised -> tokens [n]: first the block of tokens, then the token in it.

    Summing up blocks touches every probability once and keeps nothing of the vocabulary's size.
    """
    blocks = F.pad(probs, (0, -probs.shape[1] % BLOCK)).view(len(probs), -1, BLOCK)
    totals = blocks.sum(dim=-1, dtype=torch.float64).cumsum(dim=-1)
    place, rest = _passed(totals, uniform * totals[:, -1])
    inside = blocks[torch.arange(len(probs), device=probs.device), place].double().cumsum(dim=-1)
    return (place * BLOCK + _passed(inside, rest)[0]).clamp(max=probs.shape[1] - 1)  # of NaN: any token, see `_passed`


def _passed(cumulative: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """cumulative [n,K], threshold [n] -> first place above the threshold [n], what is left of the threshold there [n].

    Never one without a share of its own, even where rounding has the threshold reach the end. The last one where
    numbers are NaN: the log-prob tells of them, and the trainer says which model has diverged.
    """
    below_end = torch.minimum(threshold, torch.nextafter(cumulative[:, -1], torch.zeros_like(threshold)))
    place = torch.searchsorted(cumulative, below_end[:, None], right=True).clamp(max=cumulative.shape[1] - 1)
    before = torch.where(place > 0, cumulative.gather(1, (place - 1).clamp(min=0)), 0.0)
    return place.squeeze(1), below_end - before.squeeze(1)


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
