"""The policy loss: the loss of the actor at each position, by the name of `algorithm.policy_loss`.

PPO's clipped surrogate is here; `variants/policy_loss_kinds.py` has the others. Every function takes (log_probs,
old_log_probs, advantages, mask, algorithm): tensors [B,T], and a bool `mask` or None, which stands for all positions.
It returns a loss per position [B,T] and its metrics. Gradient flows to `log_probs` only; positions outside the mask may
hold anything: loss and gradient are 0 there. Aggregation to one number is in aggregation.py.
"""

from __future__ import annotations

import math
from functools import cache
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, FunctionCtx, once_differentiable

from rl_platform.algorithms.aggregation import Denominators, select
from rl_platform.algorithms.metrics import Metrics, active_positions, over
from rl_platform.config.schema.algorithm import POLICY_LOSSES, Algorithm, PositiveNLLNorm
from rl_platform.extras import required
from rl_platform.user_code import Extension

if TYPE_CHECKING:
    from jaxtyping import Float, Int

    from rl_platform.algorithms.shapes import BoolB, BoolBT, FloatBT

LOG_RATIO_LIMIT = 20.0
SMALLEST_RATIO, LARGEST_RATIO = math.exp(-LOG_RATIO_LIMIT), math.exp(LOG_RATIO_LIMIT)


@runtime_checkable
class PolicyLoss(Protocol):
    """A policy loss, of either task."""

    def __call__(
        self, log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor | None, algorithm: Algorithm, /
    ) -> tuple[Tensor, Metrics]:
        """Returns the loss of each position [B,T] and metrics.

        Called for each micro-batch with tensors [B,T] that are 0 outside the mask, of which `log_probs` has a gradient.
        mask [B,T] bool; None: every position counts. `algorithm`: the section of the config.
        """


LOSS = Extension(
    "policy loss",
    "algorithm.policy_loss",
    PolicyLoss,
    "function(log_probs, old_log_probs, advantages, mask, algorithm) -> (loss [B,T], Metrics)",
)


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
    if name not in POLICY_LOSSES:
        return _user_policy_loss(name)
    with required("rl_platform.algorithms.variants", "algorithm.policy_loss"):
        from rl_platform.algorithms.variants.policy_loss_kinds import KINDS
    return KINDS[name]


def _user_policy_loss(name: str) -> PolicyLoss:
    """Returns the user's function, with inputs that are 0 outside the mask, so that its gradient is finite there."""
    function = LOSS.load(name)

    def loss(
        log_probs: FloatBT, old_log_probs: FloatBT, advantages: FloatBT, mask: BoolBT | None, algorithm: Algorithm
    ) -> tuple[FloatBT, Metrics]:
        tensors = (select(x, mask) for x in (log_probs, old_log_probs, advantages))
        with LOSS.running(name):
            result = function(*tensors, mask, algorithm)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Metrics)):
            raise LOSS.misfit(name, f"returned {type(result).__name__}")
        if not isinstance(result[0], Tensor) or result[0].shape != log_probs.shape:
            shape = list(result[0].shape) if isinstance(result[0], Tensor) else type(result[0]).__name__
            raise LOSS.misfit(name, f"the loss it returned is {shape}, not one number per position")
        return select(result[0], mask), result[1]

    return loss


def positive_nll(
    log_probs: FloatBT,
    correct: BoolB,
    mask: BoolBT | None,
    denominators: Denominators,
    norm: PositiveNLLNorm = "correct_tokens",
) -> Float[Tensor, ""]:
    """Returns the mean of -log_probs over all active positions of the `correct` [B] rows of the mini-batch, a scalar.

    The positive-example loss of VAPO (Yue et al. 2025, eq. 10). No correct row: 0 that still has a graph. `norm`
    all_tokens divides by the active positions of every row, so that the term weighs less where few rows are correct.
    """
    counted = correct[:, None] if mask is None else mask & correct[:, None]
    tokens = denominators.correct_tokens if norm == "correct_tokens" else denominators.tokens
    # L_NLL = -1 / sum_{i correct} |o_i| sum_{i correct} sum_t log pi
    return -torch.where(counted, log_probs, 0.0).sum() / max(tokens, 1.0)


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
    """Counts flags [B,T], which are False outside the mask and never both True."""
    above, below = torch.count_nonzero(high), torch.count_nonzero(low)
    return {"actor/clip_frac": above + below, "actor/clip_frac_high": above, "actor/clip_frac_low": below}


def ratio_metrics(
    log_ratio: FloatBT, ratio: FloatBT, clipped: dict[str, Int[Tensor, ""]], mask: BoolBT | None
) -> Metrics:
    """`log_ratio` is 0 outside `mask`; `clipped`: numbers of positions."""
    ratio = ratio.clamp(SMALLEST_RATIO, LARGEST_RATIO)
    active = select(ratio, mask)
    count = active_positions(ratio, mask)
    sums = {"actor/ratio_mean": active.sum(), "actor/approx_kl": -log_ratio.sum()}  # mean(log pi_old - log pi)
    return Metrics(
        means=over(count, sums) | over(count, clipped) if clipped else over(count, sums),
        minima={"actor/ratio_min": (ratio if mask is None else torch.where(mask, ratio, math.inf)).amin()},
        maxima={"actor/ratio_max": active.amax()},  # ratios are positive, so zeros outside the mask do not matter
    )
