"""The length-adaptive lambda of VAPO (Yue et al. 2025), for the advantages of `gae.decoupled_gae`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl_platform.algorithms.shapes import BoolBT, FloatB


def length_adaptive_lambda(mask: BoolBT, alpha: float) -> FloatB:
    """Returns lambda [B] = clip(1 - 1 / (alpha l), 0, 1), where l counts the active positions of a row of `mask` [B,T].

    It is 0 for l <= 1 / alpha: the outcome reward then reaches the advantage of the last position only.
    """
    return (1.0 - 1.0 / (alpha * mask.sum(dim=1)).clamp(min=1.0)).clamp(0.0, 1.0)
