"""Masked statistics over action positions: mean, variance, whitening, explained variance.

Every reduction is two-pass (first the mean, then the centred squares) with float64 sums: the one-pass form
E[x^2] - E[x]^2 turns negative for close values. Positions outside the mask may hold anything, NaN included.
Statistics per group of samples and reductions across processes are not here: callers pass the whole rollout batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int

    from rl_platform.algorithms.shapes import BoolBT, FloatBT

WHITEN_EPSILON = 1e-8  # added to the variance, as NeMo-RL and verl do
SMALLEST_VARIANCE = 1e-8  # below it the returns are constant and explained variance has no meaning


def masked_sum(x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Returns the sum of `x` where the bool `mask` of the same shape is set, as float64 scalar."""
    return torch.where(mask, x, 0.0).sum(dtype=torch.float64)


def masked_mean(x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Returns the mean of `x` where `mask` is set; 0 if it is set nowhere. Scalar of the dtype of `x`."""
    return _mean(x, mask, mask.sum())


def masked_var(x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, ""]:
    """Returns the variance of `x` where `mask` is set, sum((x - mean)^2) / (n - 1); 0 for fewer than two positions.

    Scalar of the dtype of `x`.
    """
    count = mask.sum()
    return _variance(x - _mean(x, mask, count), mask, count)


def _mean(x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], count: Int[Tensor, ""]) -> Float[Tensor, ""]:
    return (masked_sum(x, mask) / count.clamp(min=1)).to(x.dtype)


def _variance(
    centred: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"], count: Int[Tensor, ""]
) -> Float[Tensor, ""]:
    # var = 1/(n-1) sum_i (x_i - mean)^2
    result = masked_sum(centred.square(), mask) / (count - 1).clamp(min=1)
    return torch.where(count < 2, 0.0, result).to(centred.dtype)


def whiten(x: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Returns (x - mean) / sqrt(var + 1e-8) over the positions of `mask`, 0 on the others."""
    count = mask.sum()
    centred = x - _mean(x, mask, count)
    return torch.where(mask, centred * torch.rsqrt(_variance(centred, mask, count) + WHITEN_EPSILON), 0.0)


def whiten_rows(x: FloatBT, mask: BoolBT) -> FloatBT:
    """Whitens by mean and unbiased variance of the means of the rows: a long row counts as much as a short one.

    `x` [B,T] is meant to be the same at every active position of a row; rows without any take no part.
    """
    lengths = mask.sum(dim=1)
    rows = (torch.where(mask, x, 0.0).sum(dim=1, dtype=torch.float64) / lengths.clamp(min=1)).to(x.dtype)
    counted = lengths > 0
    scale = torch.rsqrt(masked_var(rows, counted) + WHITEN_EPSILON)
    return torch.where(mask, (x - masked_mean(rows, counted)) * scale, 0.0)


def explained_variance(
    returns: Float[Tensor, "*shape"], values: Float[Tensor, "*shape"], mask: Bool[Tensor, "*shape"]
) -> tuple[float, bool]:
    """Returns 1 - Var(returns - values) / Var(returns) over `mask`, and whether it is valid.

    (0.0, False) when the returns hardly vary: the quotient has no meaning near a variance of 0.
    """
    active = active_numbers(mask)
    whole = variance(active(returns), unbiased=False)
    if whole < SMALLEST_VARIANCE:
        return 0.0, False
    # EV = 1 - Var(R - V) / Var(R)
    return 1.0 - variance(active(returns - values), unbiased=False) / whole, True


def active_numbers(mask: Bool[Tensor, ...]) -> Callable[[Tensor], Tensor]:
    """Returns a function from a tensor to its numbers where `mask` is set, in one dimension."""
    return torch.flatten if bool(mask.all()) else lambda x: x[mask]


def variance(numbers: Float[Tensor, " n"], unbiased: bool = True) -> float:
    """Returns the variance of [N]; 0 for fewer than two."""
    return float(numbers.double().var(correction=int(unbiased))) if len(numbers) > 1 else 0.0
