"""Random numbers for rows that may be part of a larger choice.

`among`: (first, total) of the rows in that choice; they get the numbers that they would get in it. None: they are all
of it. `deterministic`: no random numbers, what is most likely instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

Among = tuple[int, int] | None


def normals(like: Tensor, generator: torch.Generator | None, deterministic: bool, among: Among) -> Tensor:
    """Standard normal, of the shape of `like` [N,...]; zeros if deterministic."""
    if deterministic:
        return torch.zeros_like(like)
    return _room(like, among).normal_(generator=generator)[_place(like, among)]


def choices(log_probs: Tensor, generator: torch.Generator | None, deterministic: bool, among: Among) -> Tensor:
    """Indices [N,...] int64, one for each distribution log_probs [N,...,choices]."""
    if deterministic:
        return log_probs.argmax(-1)
    # exponential races: argmax of p / Exp(1) is distributed as p
    races = _room(log_probs, among).exponential_(generator=generator)[_place(log_probs, among)]
    return (log_probs - races.log()).argmax(-1)


def _room(like: Tensor, among: Among) -> Tensor:
    """Uninitialised: one row for each row of the whole choice."""
    return torch.empty_like(like) if among is None else like.new_empty(among[1], *like.shape[1:])


def _place(like: Tensor, among: Among) -> slice:
    """Where the rows are in the whole choice."""
    first = 0 if among is None else among[0]
    return slice(first, first + len(like))
