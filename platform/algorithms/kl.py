"""KL divergence to the reference policy: per-token estimators and the controller of the coefficient.

With d = log pi - log pi_ref of a sampled token (Schulman, "Approximating KL divergence"):
k1 = d, abs = |d|, k2 = d^2 / 2, k3 = exp(-d) - 1 + d. Differentiated directly and averaged over samples, k1 has
gradient zero and k3 that of KL(ref || pi); k2 has the gradient of KL(pi || ref), and so do the straight-through forms
with a '+' and the score-function form of `kl_loss_estimate`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_platform.algorithms.aggregation import select
from rl_platform.algorithms.ratios import k3, ratio_of
from rl_platform.config.schema.algorithm import KLControl, KLGradient, KLLossEstimator
from rl_platform.errors import CheckpointError

if TYPE_CHECKING:
    from jaxtyping import Bool, Float

    from rl_platform.algorithms.shapes import BoolBT, FloatBT

ADAPTIVE_LIMIT = 0.2  # the relative error the adaptive controller reacts to at most


def kl_estimate(
    log_probs: Float[Tensor, "*shape"],
    reference_log_probs: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"] | None,
    estimator: KLLossEstimator,
    output_clip: float | None = None,
) -> Float[Tensor, "*shape"]:
    """Returns the KL estimate of each element, with gradient to `log_probs`, 0 outside `mask` bool (None: all
    positions).

    An estimator with a '+' has the value of the one without and the gradient of k2.

    `output_clip` bounds k3 from above. The gradient is zero beyond the bound. That is right for rewards and metrics and
    wrong for a loss: it would no longer hold back the tokens that drifted most.
    """
    difference = select(log_probs - reference_log_probs, mask)
    match estimator:
        case "k1" | "kl" | "k1+" | "kl+":  # d
            estimate = difference
        case "abs" | "abs+":  # |d|
            estimate = difference.abs()
        case "k2" | "mse":  # d^2 / 2
            estimate = 0.5 * difference.square()
        case "k3" | "low_var_kl" | "k3+" | "low_var_kl+":  # exp(-d) - 1 + d
            estimate = k3(-difference)
            estimate = estimate if output_clip is None else estimate.clamp(max=output_clip)
    return _with_gradient_of_k2(estimate, difference) if estimator.endswith("+") else estimate


def _with_gradient_of_k2(
    estimate: Float[Tensor, "*shape"], difference: Float[Tensor, "*shape"]
) -> Float[Tensor, "*shape"]:
    """Returns stop(K) + k2 - stop(k2), in an order in which the value is exactly K."""
    k2 = 0.5 * difference.square()
    return estimate.detach() + (k2 - k2.detach())


def kl_loss_estimate(
    log_probs: Float[Tensor, "*shape"],
    old_log_probs: Float[Tensor, "*shape"],
    reference_log_probs: Float[Tensor, "*shape"],
    mask: Bool[Tensor, "*shape"] | None,
    estimator: KLLossEstimator,
    gradient: KLGradient,
    output_clip: float | None = None,
) -> Float[Tensor, "*shape"]:
    """Returns the KL term of a loss for each element, 0 outside `mask` bool (None: all positions).

    `gradient` path: the gradient of the estimator itself. k2: the value of the estimator with the gradient of k2.
    score: rho K with rho = pi / pi_old, whose mean gradient is that of the expected K, off-policy too. `old_log_probs`
    are those of the weights that the batch was sampled with. `output_clip`: see `kl_estimate`, which gives the reason
    why a loss is better without it.
    """
    kl = kl_estimate(log_probs, reference_log_probs, mask, estimator, output_clip)
    match gradient:
        case "path":
            return kl
        case "k2":
            return _with_gradient_of_k2(kl, select(log_probs - reference_log_probs, mask))
        case "score":
            log_ratio = select(log_probs - old_log_probs, mask)
            return ratio_of(log_ratio) * kl


def full_kl(
    logits: Float[Tensor, "*tokens vocab"], reference_logits: Float[Tensor, "*tokens vocab"]
) -> Float[Tensor, "*tokens"]:
    """Returns KL(pi || pi_ref) = sum_v pi(v) (log pi(v) - log pi_ref(v)) [...] from logits [...,V], with gradient to
    `logits`.

    Both are divided by the same temperature beforehand. In logit v the gradient is
    pi(v) (log pi(v) - log pi_ref(v) - KL).
    """
    log_probs, reference = logits.log_softmax(dim=-1), reference_logits.log_softmax(dim=-1)
    return (log_probs.exp() * (log_probs - reference)).sum(dim=-1)


def sequence_mean_kl(kl: FloatBT, mask: BoolBT) -> float:
    """Returns the mean of K [B,T] over the active positions of each row, averaged over the rows that have one.

    The input of the adaptive controller. `mask` [B,T] bool.
    """
    lengths = mask.sum(dim=1)
    row_means = torch.where(mask, kl, 0.0).sum(dim=1) / lengths.clamp(min=1)
    return float(row_means.sum() / (lengths > 0).sum().clamp(min=1))


class KLController:
    """The coefficient beta that `algorithm.kl_ctrl` describes: constant, or adapted to a target (Ziegler et al. 2019).

    A constant coefficient has no state: on resume the config decides. An adapted one goes on from the checkpoint,
    unless the resumed config has another `kl_coef`: it then begins there.
    """

    def __init__(self, control: KLControl) -> None:
        self.control, self.coefficient = control, control.kl_coef

    def update(self, kl: float, trajectories: int) -> None:
        """Adapts beta to `kl` from `sequence_mean_kl`; `trajectories` counts samples, not prompts.

        Called once per rollout batch, after the batch has used the coefficient.
        """
        if self.control.type == "adaptive":
            # beta <- beta (1 + clip(KL / target - 1, -0.2, 0.2) n / horizon)
            error = min(max(kl / self.control.target_kl - 1.0, -ADAPTIVE_LIMIT), ADAPTIVE_LIMIT)
            self.coefficient *= 1.0 + error * trajectories / self.control.horizon

    def state_dict(self) -> dict[str, float]:
        if self.control.type != "adaptive":
            return {}
        return {"coefficient": self.coefficient, "initial": self.control.kl_coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Raises CheckpointError if the coefficient is adaptive and was fixed in the run of the checkpoint."""
        if self.control.type != "adaptive":
            return
        if "coefficient" not in state:
            raise CheckpointError(
                "the checkpoint holds no adaptive KL coefficient: it was written with algorithm.kl_ctrl.type=fixed; "
                "resume with that type, or start a new run"
            )
        initial = self.control.kl_coef
        self.coefficient = state["coefficient"] if state.get("initial", initial) == initial else initial
