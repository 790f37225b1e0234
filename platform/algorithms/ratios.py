"""Probability ratios of two policies, from the difference of the log-probs that they give to a sample."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

LOG_RATIO_LIMIT = 20.0  # exp of a larger log-ratio would overflow or dominate every sum


def ratio_of(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Returns rho = exp(log_ratio), with the exponent limited to +-20."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def k3(log_ratio: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Returns rho - 1 - log rho >= 0 of each sample, with log rho at most 20.

    Its mean over samples of q is KL(q || p) if rho = p / q, with less variance than the mean of -log rho. Schulman,
    "Approximating KL divergence", 2020.
    """
    # expm1 keeps the digits that exp(x) - 1 loses near x = 0
    log_ratio = log_ratio.clamp(max=LOG_RATIO_LIMIT)
    return torch.expm1(log_ratio) - log_ratio
