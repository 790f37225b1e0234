"""PPO losses: clipped value loss, and the sums of policy, value, entropy, KL and likelihood terms that engines call.

`value_loss` returns one number per position, as the functions of policy_losses.py do; `actor_loss`, `critic_loss` and
`actor_critic_loss` add the terms up for a micro-batch, with denominators of its whole mini-batch. Embodied and
reasoning runs call the same functions. Positions outside the mask may hold anything: they change neither losses nor
gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from rl_platform.algorithms.aggregation import Denominators, aggregate, select
from rl_platform.algorithms.kl import kl_loss_estimate
from rl_platform.algorithms.metrics import Metrics, active_positions, over
from rl_platform.algorithms.policy_losses import policy_loss_function
from rl_platform.algorithms.ratios import k3
from rl_platform.config.schema.algorithm import Algorithm
from rl_platform.extras import required
from rl_platform.records import RolloutBatch

if TYPE_CHECKING:
    from jaxtyping import Float

    from rl_platform.algorithms.shapes import BoolBT, FloatBT


@dataclass(frozen=True)
class ModelOutputs:
    """Outputs of a training forward for a micro-batch, each [B,T] with gradient; None: not computed.

    log_probs: of the chosen action or token; entropy: of the distribution it came from; values: of the state before;
    full_kl: of that distribution to the reference's; squared_probs: sum of its squares. states [B,T,H]: hidden states
    of a reference, for the full KL.
    """

    log_probs: FloatBT | None = None
    entropy: FloatBT | None = None
    values: FloatBT | None = None
    full_kl: FloatBT | None = None
    states: Float[Tensor, "batch seq hidden"] | None = None
    squared_probs: FloatBT | None = None


@torch.no_grad()
def drift_metrics(log_probs: FloatBT, old_log_probs: FloatBT, mask: BoolBT | None) -> Metrics:
    """Returns `actor/approx_kl_k3`, the mean `k3` of pi / pi_old over active positions.

    An estimate of KL(pi_old || pi): how far the policy has moved since the rollout.
    """
    drift = k3(select(log_probs - old_log_probs, mask))
    return Metrics(means=over(active_positions(drift, mask), {"actor/approx_kl_k3": drift.sum()}))


def value_loss(
    values: FloatBT,
    old_values: FloatBT,
    returns: FloatBT,
    mask: BoolBT | None,
    clip: float | None = None,
    huber_delta: float | None = None,
) -> tuple[FloatBT, Metrics]:
    """Returns max(phi(V - R), phi(V_clipped - R)) per position [B,T], 0 outside `mask`, and metrics.

    V_clipped = V_old + clip(V - V_old, -clip, clip), as in OpenAI's baselines `ppo2`. phi(e) = e^2 / 2; with
    `huber_delta` (Huber 1964) phi(e) = delta (|e| - delta / 2) where |e| > delta. `clip` None: phi(V - R). `mask` None:
    all positions. `old_values` are those of the advantage estimator. Gradient flows to `values` only.
    """
    values, returns = select(values, mask), select(returns, mask)
    error = values - returns
    count = active_positions(values, mask)
    means = over(count, {"critic/predicted_values_mean": values.detach().sum()})
    if clip is not None:
        with torch.no_grad():
            old_values = select(old_values, mask)
            # V_clipped = clip(V, V_old - eps, V_old + eps)
            clipped_values = values.clamp(old_values - clip, old_values + clip)
            clipped_error = clipped_values - returns
            # max(phi(V - R), phi(V_clipped - R)): phi grows with |e|, so the larger |e| has the larger loss
            clipped = clipped_error.abs() > error.abs()
            flags = {"critic/clip_frac": clipped, "critic/out_of_range_frac": clipped_values != values}
            means |= over(count, {name: torch.count_nonzero(flag) for name, flag in flags.items()})
        error = torch.where(clipped, clipped_error, error)
    if huber_delta is None:  # phi(e) = e^2 / 2
        loss = 0.5 * error.square()
    else:  # phi(e) = e^2 / 2 where |e| <= delta, else delta (|e| - delta / 2)
        loss = F.huber_loss(error, torch.zeros_like(error), reduction="none", delta=huber_delta)
    return loss, Metrics(means=means)


def actor_loss(
    outputs: ModelOutputs, batch: RolloutBatch, denominators: Denominators, algorithm: Algorithm
) -> tuple[Float[Tensor, ""], Metrics]:
    """Returns a micro-batch's part of the mini-batch's loss, as a scalar with gradient, and metrics.

    The loss is policy loss - entropy_bonus * entropy + kl_loss_coef * KL + positive_nll_coef * NLL of correct rows.

    `batch` needs advantages; log_probs unless `old_log_probs` is current; reference_log_probs with `use_kl_loss`;
    correct with a `positive_nll_coef`; covariant with clip_cov and kl_cov. Its loss_weights, if any, multiply the
    policy loss of every position and nothing else. `outputs` needs log_probs; entropy with an `entropy_bonus`; full_kl
    with `kl_loss_type: full`.
    """
    mask = None if denominators.full else batch.mask  # None: every position is active
    assert outputs.log_probs is not None
    per_token, metrics = _policy_term(outputs, batch, mask, algorithm)
    loss = aggregate(per_token, mask, denominators, algorithm.loss_agg_func, zero_outside=True)
    terms = {"actor/pg_loss": loss}
    if outputs.entropy is not None:
        bonus = algorithm.entropy_bonus
        entropy = aggregate(
            outputs.entropy if bonus else outputs.entropy.detach(),
            mask,
            denominators.entropy or denominators,
            algorithm.loss_agg_func,
            None if batch.entropy_units is None else batch.entropy_units.sum(dim=1),
        )
        terms["actor/entropy"] = entropy
        loss = loss - bonus * entropy if bonus else loss  # L - c_H H(pi)
    if algorithm.use_kl_loss:
        kl = _kl_term(outputs, batch, mask, algorithm)
        terms["actor/kl_loss"] = aggregate(kl, mask, denominators, algorithm.loss_agg_func)
        loss = loss + algorithm.kl_loss_coef * terms["actor/kl_loss"]  # + beta KL(pi || pi_ref)
    if algorithm.positive_nll_coef:
        with required("rl_platform.algorithms.variants", "algorithm.positive_nll_coef"):
            from rl_platform.algorithms.variants.positive_nll import positive_nll
        assert batch.correct is not None
        nll = positive_nll(outputs.log_probs, batch.correct, mask, denominators, algorithm.positive_nll_norm)
        terms["actor/positive_nll"] = nll
        loss = loss + algorithm.positive_nll_coef * terms["actor/positive_nll"]  # + mu L_NLL (VAPO, eq. 10)
    terms["actor/loss"] = loss
    return loss, metrics.merge(_loss_metrics(terms, per_token, mask, denominators))


def critic_loss(
    outputs: ModelOutputs, batch: RolloutBatch, denominators: Denominators, algorithm: Algorithm
) -> tuple[Float[Tensor, ""], Metrics]:
    """Returns value_loss_scale * value loss of a micro-batch, as a scalar with gradient, and metrics.

    `batch` needs values and returns, `outputs` needs values.
    """
    mask = None if denominators.full else batch.mask  # None: every position is active
    assert outputs.values is not None
    assert batch.values is not None
    assert batch.returns is not None
    if denominators.values is not None:
        mask, denominators = batch.value_positions, denominators.values
    per_token, metrics = value_loss(
        outputs.values, batch.values, batch.returns, mask, algorithm.value_clip, algorithm.huber_delta
    )
    loss = algorithm.value_loss_scale * aggregate(
        per_token, mask, denominators, algorithm.loss_agg_func, zero_outside=True
    )
    return loss, metrics.merge(_loss_metrics({"critic/loss": loss}, per_token, mask, denominators))


def actor_critic_loss(
    outputs: ModelOutputs, batch: RolloutBatch, denominators: Denominators, algorithm: Algorithm
) -> tuple[Float[Tensor, ""], Metrics]:
    """Returns `actor_loss` + `critic_loss`, for a model with policy and value heads and one backward pass."""
    actor, actor_metrics = actor_loss(outputs, batch, denominators, algorithm)
    critic, critic_metrics = critic_loss(outputs, batch, denominators, algorithm)
    return actor + critic, actor_metrics.merge(critic_metrics)


def _policy_term(
    outputs: ModelOutputs, batch: RolloutBatch, mask: BoolBT | None, algorithm: Algorithm
) -> tuple[FloatBT, Metrics]:
    """Returns the policy loss per position [B,T], 0 outside `mask`, and its metrics."""
    assert outputs.log_probs is not None
    assert batch.advantages is not None
    log_probs = outputs.log_probs
    old_log_probs = _old_log_probs(outputs, batch, algorithm)
    policy_loss = policy_loss_function(algorithm.policy_loss)
    per_token, metrics = policy_loss(log_probs, old_log_probs, batch.advantages, mask, algorithm)
    if batch.covariant is not None:
        from rl_platform.algorithms.variants.policy_loss_kinds import at_covariant

        covariant = batch.covariant & batch.mask  # a row may be masked out for a rank without work
        per_token = at_covariant(per_token, log_probs, old_log_probs, covariant, algorithm)
    if batch.loss_weights is not None:
        per_token = per_token * select(batch.loss_weights, mask)
    if algorithm.target_kl is not None:
        metrics = metrics.merge(drift_metrics(log_probs, old_log_probs, mask))
    return per_token, metrics


def _old_log_probs(outputs: ModelOutputs, batch: RolloutBatch, algorithm: Algorithm) -> FloatBT:
    """Returns log pi_old [B,T]. `current` requires that no step has changed the model since the rollout."""
    if algorithm.old_log_probs == "current":
        assert outputs.log_probs is not None
        return outputs.log_probs.detach()
    assert batch.log_probs is not None
    return batch.log_probs


def _kl_term(outputs: ModelOutputs, batch: RolloutBatch, mask: BoolBT | None, algorithm: Algorithm) -> FloatBT:
    """Returns the KL per position [B,T], 0 outside `mask`."""
    if algorithm.kl_loss_type == "full":
        assert outputs.full_kl is not None
        return select(outputs.full_kl, mask)
    assert outputs.log_probs is not None
    assert batch.reference_log_probs is not None
    return kl_loss_estimate(
        outputs.log_probs,
        _old_log_probs(outputs, batch, algorithm),
        batch.reference_log_probs,
        mask,
        algorithm.kl_loss_type,
        algorithm.kl_loss_grad,
        algorithm.kl_loss_output_clip,
    )


def _loss_metrics(
    terms: dict[str, Float[Tensor, ""]], like: FloatBT, mask: BoolBT | None, denominators: Denominators
) -> Metrics:
    """Returns `terms`, parts of mini-batch losses, as metrics whose mean is that of the whole mini-batch losses.

    The count of a part is its share of the mini-batch's active positions, so the counts of a mini-batch add up to 1.
    """
    share = active_positions(like, mask) / max(denominators.tokens, 1.0)
    return Metrics(means=over(share, {name: term.detach() for name, term in terms.items()}))
