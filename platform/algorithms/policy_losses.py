"""Policy losses: the loss of the actor at each position, by the name of `algorithm.policy_loss`.

Every function takes (log_probs, old_log_probs, advantages, mask, algorithm), tensors [B,T], `mask` bool or None where
every position counts, and gives a loss per position [B,T] with its metrics. Gradient flows to `log_probs` only;
positions outside the mask may hold anything: loss and gradient are 0 there. Aggregation to one number is in
aggregation.py.
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
from rl_platform.config.schema.algorithm import Algorithm, PositiveNLLNorm
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
        self,
        log_probs: Tensor,
        old_log_probs: Tensor,
        advantages: Tensor,
        mask: Tensor | None,
        algorithm: Algorithm,
        /,
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
    """`clipped_surrogate` of the ratio of every position."""
    log_ratio = select(log_probs.detach() - old_log_probs, mask)
    loss, gradient, metrics = clipped_surrogate(log_ratio, advantages, mask, algorithm)
    return _with_gradient(log_probs, loss, gradient), metrics


def gspo(
    log_probs: FloatBT, old_log_probs: FloatBT, advantages: FloatBT, mask: BoolBT | None, algorithm: Algorithm
) -> tuple[FloatBT, Metrics]:
    """`clipped_surrogate` with one ratio per row, exp(mean over its active positions of log_probs - old_log_probs).

    The sequence ratio of GSPO (Zheng et al. 2025), the same at every position of the row: rows must be whole.
    """
    # s_i = exp(1/|o_i| sum_t log(pi / pi_old))
    row_means = _row_means(select(log_probs - old_log_probs, mask), mask)
    loss, gradient, metrics = clipped_surrogate(select(row_means.detach(), mask), advantages, mask, algorithm)
    return _with_gradient(row_means, loss, gradient), metrics


def gspo_token(
    log_probs: FloatBT, old_log_probs: FloatBT, advantages: FloatBT, mask: BoolBT | None, algorithm: Algorithm
) -> tuple[FloatBT, Metrics]:
    """`gspo` whose gradient at a position is that of its own log-prob: advantages may differ inside a row.

    GSPO-token (Zheng et al. 2025, eq. 13), the form that verl calls gspo. Equal to `gspo` where all positions of a row
    have one advantage and `loss_agg_func` is seq-mean-token-mean.
    """
    # s_it = stop(s_i) pi / stop(pi)
    row_means = _row_means(select(log_probs.detach() - old_log_probs, mask), mask)
    loss, gradient, metrics = clipped_surrogate(select(row_means, mask), advantages, mask, algorithm)
    return _with_gradient(log_probs, loss, gradient), metrics


def gmpo(
    log_probs: FloatBT, old_log_probs: FloatBT, advantages: FloatBT, mask: BoolBT | None, algorithm: Algorithm
) -> tuple[FloatBT, Metrics]:
    """-A exp(mean over the row's active positions of log rho, each clipped on the side to which A moves it).

    Geometric-mean policy optimization (Zhao et al. 2025, arXiv 2507.20673): log rho of a position is at most
    `clip_ratio_high` where A >= 0 and at least -`clip_ratio_low` where A < 0. Rows must be whole.
    """
    log_ratio = select(log_probs - old_log_probs, mask)
    losing = select(-advantages, mask) > 0  # A < 0
    # min(log rho, eps_high) where A >= 0, max(log rho, -eps_low) where A < 0
    low, high = log_ratio.clamp(min=-algorithm.clip_ratio_low), log_ratio.clamp(max=algorithm.clip_ratio_high)
    bounded = torch.where(losing, low, high)
    row_means = _row_means(bounded, mask)
    with torch.no_grad():
        # L_it = -A_it (prod_s rho_is)^(1/|o_i|), its own derivative with respect to the exponent
        means = select(row_means, mask).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        loss = select(-advantages, mask) * means.exp()
        clipped = _clip_counts((log_ratio > bounded) & ~losing, (log_ratio < bounded) & losing)
        metrics = _metrics(means, means.exp(), clipped, mask)
    return _with_gradient(row_means, loss, loss), metrics


def sapo(
    log_probs: FloatBT, old_log_probs: FloatBT, advantages: FloatBT, mask: BoolBT | None, algorithm: Algorithm
) -> tuple[FloatBT, Metrics]:
    """-A (4 / tau) sigmoid(tau (rho - 1)), tau = `sapo_tau_pos` where A > 0, else `sapo_tau_neg`: a gate, not a clip.

    Soft adaptive policy optimization (Gao et al. 2025, arXiv 2511.20347). The gradient is that of -A log pi while
    rho is 1, and falls off smoothly on both sides.
    """
    with torch.no_grad():
        log_ratio = select(log_probs - old_log_probs, mask)
        ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        cost = select(-advantages, mask)
        tau = torch.where(cost < 0, algorithm.sapo_tau_pos, algorithm.sapo_tau_neg)
        gate = torch.sigmoid(tau * (ratio - 1.0))
        loss = cost * 4.0 / tau * gate
        # dL / d log rho = -A 4 sigmoid (1 - sigmoid) rho
        gradient = cost * 4.0 * gate * (1.0 - gate) * ratio
        metrics = _metrics(log_ratio, ratio, {}, mask)
    return _with_gradient(log_probs, loss, gradient), metrics


def cispo(
    log_probs: FloatBT, old_log_probs: FloatBT, advantages: FloatBT, mask: BoolBT | None, algorithm: Algorithm
) -> tuple[FloatBT, Metrics]:
    """-stop(clip(rho, 1 - clip_ratio_low, 1 + clip_ratio_high)) A log_probs: clipping bounds a weight.

    No position loses its gradient. MiniMax-M1 (2025). `actor/clip_frac` counts positions whose weight is bounded,
    whatever the sign of A.
    """
    with torch.no_grad():
        log_ratio = select(log_probs - old_log_probs, mask)
        ratio = log_ratio.exp()
        # rho^ = clip(rho, 1 - eps_low, 1 + eps_high)
        bounded = ratio.clamp(1.0 - algorithm.clip_ratio_low, min(1.0 + algorithm.clip_ratio_high, LARGEST_RATIO))
        clipped = _clip_counts(ratio > bounded, ratio < bounded)
        metrics = _metrics(log_ratio, ratio, clipped, mask)
        weight = select(-advantages, mask) * bounded
    return weight * select(log_probs, mask), metrics  # -stop(rho^) A log pi


def ratio_only(
    log_probs: FloatBT, old_log_probs: FloatBT, advantages: FloatBT, mask: BoolBT | None, algorithm: Algorithm
) -> tuple[FloatBT, Metrics]:
    """-A rho, without a clip."""
    with torch.no_grad():
        log_ratio = select(log_probs - old_log_probs, mask)
        ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        loss = select(-advantages, mask) * ratio  # -A rho, its own derivative with respect to log rho
        metrics = _metrics(log_ratio, ratio, {}, mask)
    return _with_gradient(log_probs, loss, loss), metrics


def at_covariant(
    loss: FloatBT, log_probs: FloatBT, old_log_probs: FloatBT, covariant: BoolBT, algorithm: Algorithm
) -> FloatBT:
    """The `loss` [B,T] of clip_cov or kl_cov with the positions of large covariance [B,T] treated apart.

    clip_cov: they have neither loss nor gradient. kl_cov: kl_coef |log rho| is added. Cui et al. 2025.
    """
    if algorithm.policy_loss == "clip_cov":
        return loss.masked_fill(covariant, 0.0)
    # L_t + beta |log pi - log pi_old|
    return loss + algorithm.covariance.kl_coef * select(log_probs - old_log_probs, covariant).abs()


def reinforce(
    log_probs: FloatBT, old_log_probs: FloatBT, advantages: FloatBT, mask: BoolBT | None, algorithm: Algorithm
) -> tuple[FloatBT, Metrics]:
    """-A log_probs (Williams 1992). The old log-probs serve the metrics only."""
    with torch.no_grad():
        log_ratio = select(log_probs - old_log_probs, mask)
        metrics = _metrics(log_ratio, log_ratio.exp(), {}, mask)
    return select(-advantages, mask) * select(log_probs, mask), metrics  # -A log pi


def dppo_tv(
    log_probs: FloatBT, old_log_probs: FloatBT, advantages: FloatBT, mask: BoolBT | None, algorithm: Algorithm
) -> tuple[FloatBT, Metrics]:
    """`_divergence_masked` with the total variation |pi - pi_old| of the token: DPPO-Binary-TV."""
    new, old = (select(x.detach(), mask).exp() for x in (log_probs, old_log_probs))
    return _divergence_masked(log_probs, old_log_probs, advantages, mask, algorithm, (new - old).abs())


def dppo_kl(
    log_probs: FloatBT, old_log_probs: FloatBT, advantages: FloatBT, mask: BoolBT | None, algorithm: Algorithm
) -> tuple[FloatBT, Metrics]:
    """`_divergence_masked` with the KL(pi_old || pi) of "this token or another one": DPPO-Binary-KL."""
    new, old = (select(x.detach(), mask) for x in (log_probs, old_log_probs))
    p, q = new.exp(), old.exp()
    others_new, others_old = ((1.0 - x).clamp(min=1e-8) for x in (p, q))
    # D = q log(q / p) + (1 - q) log((1 - q) / (1 - p)), q = pi_old, p = pi
    divergence = q * (old - new) + others_old * (others_old.log() - others_new.log())
    return _divergence_masked(log_probs, old_log_probs, advantages, mask, algorithm, divergence)


KINDS: dict[str, PolicyLoss] = {
    "ppo_clip": ppo_clip,
    "reinforce": reinforce,
    "gspo": gspo,
    "gspo_token": gspo_token,
    "gmpo": gmpo,
    "sapo": sapo,
    "cispo": cispo,
    "clip_cov": ppo_clip,
    "kl_cov": ratio_only,
    "dppo_tv": dppo_tv,
    "dppo_kl": dppo_kl,
}


@cache
def policy_loss_function(name: str) -> PolicyLoss:
    """Returns the function of `algorithm.policy_loss`: one of `KINDS`, or the user's own, written as module:function.

    Raises ConfigError for a function that cannot be imported.
    """
    return KINDS[name] if name in KINDS else _user_policy_loss(name)


def _user_policy_loss(name: str) -> PolicyLoss:
    """The user's function. Its inputs are 0 outside the mask, so that its gradient is finite there."""
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
    """-log_probs [B,T] of the `correct` [B] rows over all active positions of correct rows of the mini-batch; scalar.

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
    """Clipped surrogate with asymmetric and dual clip, per position [B,T]: the loss, its derivative with respect to
    `log_ratio`, metrics. `log_ratio` is 0 outside `mask`, and so are both; `mask` None: all positions.

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
    clipped = _clip_counts(above & (cost < 0), below & losing)
    if dual_clip is not None:
        clipped["actor/dual_clip_frac"] = torch.count_nonzero(above & losing)
    return loss, gradient, _metrics(log_ratio, ratio, clipped, mask)


@torch.no_grad()
def _without_divergent(
    log_ratio: FloatBT, advantages: FloatBT, mask: BoolBT | None, algorithm: Algorithm, divergence: FloatBT
) -> tuple[FloatBT, Metrics]:
    """-M A rho per position [B,T], which is its own derivative with respect to `log_ratio`; metrics."""
    cost = select(-advantages, mask)
    ratio = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
    # M = 0 where A > 0, rho > 1, D > clip_ratio_high, or A < 0, rho < 1, D > clip_ratio_low; else 1
    above = (cost < 0) & (log_ratio > 0) & (divergence > algorithm.clip_ratio_high)
    below = (cost > 0) & (log_ratio < 0) & (divergence > algorithm.clip_ratio_low)
    loss = (cost * ratio).masked_fill(above | below, 0.0)
    return loss, _metrics(log_ratio, ratio, _clip_counts(above, below), mask)


def _row_means(log_ratio: FloatBT, mask: BoolBT | None) -> FloatBT:
    """The mean over the active positions of a row [B,T], at each of its positions. `log_ratio` is 0 elsewhere."""
    lengths = log_ratio.shape[1] if mask is None else mask.sum(dim=1, keepdim=True).clamp(min=1)
    return (log_ratio.sum(dim=1, keepdim=True) / lengths).expand_as(log_ratio)


def _divergence_masked(
    log_probs: FloatBT,
    old_log_probs: FloatBT,
    advantages: FloatBT,
    mask: BoolBT | None,
    algorithm: Algorithm,
    divergence: FloatBT,
) -> tuple[FloatBT, Metrics]:
    """-A rho; 0 where the step leads away from pi_old and `divergence` [B,T] is above its threshold.

    Divergence PPO (Qi et al. 2026, arXiv 2602.04879) with its binary approximations. `clip_ratio_high` is the threshold
    for A > 0, `clip_ratio_low` for A < 0. Without the truncation of rho that verl adds.
    """
    log_ratio = select(log_probs.detach() - old_log_probs, mask)
    loss, metrics = _without_divergent(log_ratio, advantages, mask, algorithm, divergence)
    return _with_gradient(log_probs, loss, loss), metrics


def _with_gradient(variable: FloatBT, loss: FloatBT, gradient: FloatBT) -> FloatBT:
    """`loss` as a function of `variable`, with `gradient` as its elementwise derivative; all of one shape."""
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


def _clip_counts(high: BoolBT, low: BoolBT) -> dict[str, Int[Tensor, ""]]:
    """Of flags [B,T] that are False outside the mask, and never both True."""
    above, below = torch.count_nonzero(high), torch.count_nonzero(low)
    return {"actor/clip_frac": above + below, "actor/clip_frac_high": above, "actor/clip_frac_low": below}


def _metrics(log_ratio: FloatBT, ratio: FloatBT, clipped: dict[str, Int[Tensor, ""]], mask: BoolBT | None) -> Metrics:
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
