"""The policy loss: the loss of the actor at each position, by the name of `algorithm.policy_loss`.

PPO's clipped surrogate is here; variants/ has the others, and those of users. Every function takes (log_probs,
old_log_probs, advantages, mask, algorithm): tensors [B,T], and a bool `mask` or None, which stands for all positions.
It returns a loss per position [B,T] and its metrics. Gradient flows to `log_probs` only; positions outside the mask may
hold anything: loss and gradient are 0 there. Aggregation to one number is in aggregation.py.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, FunctionCtx, once_differentiable

from rl_platform.algorithms.aggregation import select
from rl_platform.algorithms.metrics import Metrics, active_positions, over
from rl_platform.algorithms.ratios import LOG_RATIO_LIMIT
from rl_platform.config.schema.algorithm import POLICY_LOSSES, Algorithm
from rl_platform.extras import required

if TYPE_CHECKING:
    from jaxtyping import Int

    from rl_platform.algorithms.shapes import BoolBT, FloatBT
    from rl_platform.algorithms.variants.user_policy_loss import PolicyLoss

SMALLEST_RATIO, LARGEST_RATIO = math.exp(-LOG_RATIO_LIMIT), math.exp(LOG_RATIO_LIMIT)


def ppo_clip(
    log_probs: FloatBT, old_log_probs: FloatBT, advantages: FloatBT, mask: BoolBT | None, algorithm: Algorithm
) -> tuple[FloatBT, Metrics]:
    """Returns the `clipped_surrogate` of the ratio of every position, and metrics."""
    log_ratio = select(log_probs.detach() - old_log_probs, mask)
    loss, gradient, metrics = clipped_surrogate(log_ratio, advantages, mask, algorithm)
    return with_gradient(log_probs, loss, gradient), metrics


@cache
def policy_loss_function(name: str) -> PolicyLoss:
    """Returns the function of `algorithm.policy_loss`: a built-in one, or the user's own, written as module:function.

    Raises ConfigError for a function that cannot be imported.
    """
    if name == "ppo_clip":
        return ppo_clip
    with required("rl_platform.algorithms.variants", "algorithm.policy_loss"):
        from rl_platform.algorithms.variants.policy_loss_kinds import KINDS
        from rl_platform.algorithms.variants.user_policy_loss import load_policy_loss
    return KINDS[name] if name in POLICY_LOSSES else load_policy_loss(name)


@torch.no_grad()
def clipped_surrogate(
    log_ratio: FloatBT, advantages: FloatBT, mask: BoolBT | None, algorithm: Algorithm
) -> tuple[FloatBT, FloatBT, Metrics]:
    """Returns the clipped surrogate with asymmetric and dual clip, per position [B,T]: the loss, its derivative with
    respect to `log_ratio`, metrics. `log_ratio` is 0 outside `mask`, and so are both; `mask` None: all positions.

    max(-A rho, -A clip(rho, 1 - clip_ratio_low, 1 + clip_ratio_high)), and at most -A clip_ratio_c where A < 0, with
    rho = exp(log_ratio), the exponent limited to +-20. PPO (Schulman et al. 2017), asymmetric clip (DAPO), dual clip
    (Ye et al. 2020). The derivative is computed here because autograd's takes as long as the loss: -A rho where rho is
    not clipped, else 0.
    """
    low, high, dual_clip = algorithm.clip_ratio_low, algorithm.clip_ratio_high, algorithm.clip_ratio_c
    cost = select(-advantages, mask)
    losing = cost > 0  # A < 0
    ratio = log_ratio.exp()
    # L = max(-A rho, -A clip(rho, 1 - eps_low, 1 + eps_high)), and min(L, -A c) where A < 0. Equal to -A rho with
    # rho bounded above by 1 + eps_high where A >= 0, and inside [1 - eps_low, c] where A < 0.
    bounded = torch.where(
        losing,
        ratio.clamp(max(1.0 - low, SMALLEST_RATIO), min(dual_clip or LARGEST_RATIO, LARGEST_RATIO)),
        ratio.clamp(SMALLEST_RATIO, min(1.0 + high, LARGEST_RATIO)),
    )
    loss = cost * bounded
    above, below = ratio > bounded, ratio < bounded
    # dL / d log rho = -A rho where rho is not clipped, else 0
    gradient = torch.where(above | below, 0.0, loss)
    clipped = clip_counts(above & (cost < 0), below & losing)
    if dual_clip is not None:
        clipped["actor/dual_clip_frac"] = torch.count_nonzero(above & losing)
    return loss, gradient, ratio_metrics(log_ratio, ratio, clipped, mask)


def with_gradient(variable: FloatBT, loss: FloatBT, gradient: FloatBT) -> FloatBT:
    """Returns `loss` as a function of `variable` with the elementwise derivative `gradient`; all of one shape."""
    result: Tensor = _KnownGradient.apply(variable, loss, gradient)  # type: ignore[no-untyped-call]
    return result


class _KnownGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, variable: FloatBT, loss: FloatBT, gradient: FloatBT) -> FloatBT:
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: BackwardCFunction, *incoming: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return incoming[0] * gradient, None, None


def clip_counts(high: BoolBT, low: BoolBT) -> dict[str, Int[Tensor, ""]]:
    """Returns how many positions are clipped above (`high`) and below (`low`).

    Both [B,T] bool; they are False outside the mask and never both True.
    """
    above, below = torch.count_nonzero(high), torch.count_nonzero(low)
    return {"actor/clip_frac": above + below, "actor/clip_frac_high": above, "actor/clip_frac_low": below}


def ratio_metrics(
    log_ratio: FloatBT, ratio: FloatBT, clipped: dict[str, Int[Tensor, ""]], mask: BoolBT | None
) -> Metrics:
    """Returns mean, minimum and maximum of `ratio` [B,T], the mean of -log_ratio, and the shares of clipped positions.

    `log_ratio` [B,T] is 0 outside `mask`; `clipped`: name -> number of positions.
    """
    ratio = ratio.clamp(SMALLEST_RATIO, LARGEST_RATIO)
    active = select(ratio, mask)
    count = active_positions(ratio, mask)
    sums = {"actor/ratio_mean": active.sum(), "actor/approx_kl": -log_ratio.sum()}  # mean(log pi_old - log pi)
    return Metrics(
        means=over(count, sums) | over(count, clipped) if clipped else over(count, sums),
        minima={"actor/ratio_min": (ratio if mask is None else torch.where(mask, ratio, math.inf)).amin()},
        maxima={"actor/ratio_max": active.amax()},  # ratios are positive, so zeros outside the mask do not matter
    )
