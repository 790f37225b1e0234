"""Samples of actions for rows that may be part of a larger batch.

`among` is (index of the first row, number of rows) in that batch, or None for the whole batch. The numbers of all its
rows are drawn and those of other rows dropped. A row's sample therefore does not depend on the split of the batch.
`deterministic` returns the most likely value and draws nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

Among = tuple[int, int] | None


def normals(like: Tensor, generator: torch.Generator | None, deterministic: bool, among: Among) -> Tensor:
    """Returns standard normal numbers in the shape of `like` [N,...]; zeros if deterministic."""
    if deterministic:
        return torch.zeros_like(like)
    return _of_batch(like, among).normal_(generator=generator)[_rows(like, among)]


def choices(log_probs: Tensor, generator: torch.Generator | None, deterministic: bool, among: Among) -> Tensor:
    """Returns indices [N,...] int64, one sample of each distribution log_probs [N,...,choices]."""
    if deterministic:
        return log_probs.argmax(-1)
    # exponential race: argmax_i p_i / E_i with E_i ~ Exp(1) is distributed as p
    races = _of_batch(log_probs, among).exponential_(generator=generator)[_rows(log_probs, among)]
    return (log_probs - races.log()).argmax(-1)


def _of_batch(like: Tensor, among: Among) -> Tensor:
    """Uninitialised memory [total,...], one row for each row of the larger batch."""
    return torch.empty_like(like) if among is None else like.new_empty(among[1], *like.shape[1:])


def _rows(like: Tensor, among: Among) -> slice:
    """Returns the position of the rows in the larger batch."""
    first = 0 if among is None else among[0]
    return slice(first, first + like.shape[0])
