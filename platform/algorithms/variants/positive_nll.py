"""The positive-example loss of VAPO (Yue et al. 2025): `algorithm.positive_nll_coef`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rl_platform.algorithms.aggregation import Denominators
from rl_platform.config.schema.algorithm import PositiveNLLNorm

if TYPE_CHECKING:
    from jaxtyping import Float
    from torch import Tensor

    from rl_platform.algorithms.shapes import BoolB, BoolBT, FloatBT


def positive_nll(
    log_probs: FloatBT,
    correct: BoolB,
    mask: BoolBT | None,
    denominators: Denominators,
    norm: PositiveNLLNorm = "correct_tokens",
) -> Float[Tensor, ""]:
    """Returns the mean of -log_probs over all active positions of the `correct` [B] rows of the mini-batch, a scalar.

    Yue et al. 2025, eq. 10. Without a correct row it is 0 that still has a graph. `norm` all_tokens divides by the
    active positions of every row, so that the term weighs less where few rows are correct.
    """
    counted = correct[:, None] if mask is None else mask & correct[:, None]
    tokens = denominators.correct_tokens if norm == "correct_tokens" else denominators.tokens
    # L_NLL = -1 / sum_{i correct} |o_i| sum_{i correct} sum_t log pi
    return -torch.where(counted, log_probs, 0.0).sum() / max(tokens, 1.0)
