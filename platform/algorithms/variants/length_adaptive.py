"""The length-adaptive lambda of VAPO (Yue et al. 2025), for the advantages of `gae.decoupled_gae`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rl_platform.algorithms.shapes import BoolBT, FloatB


def length_adaptive_lambda(mask: BoolBT, alpha: float) -> FloatB:
    """Returns [B]: clip(1 - 1 / (alpha l), 0, 1) with l active positions in a row of `mask` [B,T] (VAPO, 2025).

    0 for l <= 1 / alpha: of such a response only the last position sees an outcome reward.
    """
    return (1.0 - 1.0 / (alpha * mask.sum(dim=1)).clamp(min=1.0)).clamp(0.0, 1.0)
