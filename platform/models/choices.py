"""Actions of one or several independent choices: a categorical distribution over each, from one row of logits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rl_platform.models.draws import Among, choices


def log_distributions(logits: Tensor, counts: Sequence[int]) -> Tensor:
    """Logits [...,sum(counts)] of D choices -> log-probabilities [...,D,max(counts)]. Their probability is 0 beyond a
    choice's count, where they are finite, so that p log p is 0."""
    largest = max(counts)
    if min(counts) == largest:
        rows: Tensor = logits.unflatten(-1, (len(counts), largest))
        return rows.log_softmax(-1)
    firsts = [sum(counts[:position]) for position in range(len(counts))]
    places = [
        [first + number % count for number in range(largest)] for first, count in zip(firsts, counts, strict=True)
    ]
    missing = [[number >= count for number in range(largest)] for count in counts]
    spread = logits[..., torch.tensor(places, device=logits.device)]
    least = torch.finfo(logits.dtype).min
    return spread.masked_fill(torch.tensor(missing, device=logits.device), least).log_softmax(-1)


def chosen(
    log_probs: Tensor, generator: torch.Generator | None, deterministic: bool, among: Among
) -> tuple[Tensor, Tensor]:
    """Returns one sample of each distribution [N,...,D,K]: choices [N,...,D] int64 and their log-probs [N,...,D]."""
    drawn = choices(log_probs, generator, deterministic, among)
    return drawn, of_choices(log_probs, drawn)


def of_choices(log_probs: Tensor, drawn: Tensor) -> Tensor:
    """Returns the log-probs [...,D] of choices [...,D] under distributions [...,D,K]."""
    return log_probs.gather(-1, drawn[..., None]).squeeze(-1)


def entropies(log_probs: Tensor) -> Tensor:
    """Returns the entropies [...,D] of distributions [...,D,K]."""
    # H = -sum_k p_k log p_k
    return -(log_probs.exp() * log_probs).sum(-1)
