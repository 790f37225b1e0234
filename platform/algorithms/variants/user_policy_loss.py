"""A user's own policy loss: a function named in the config as module:function, checked at every use."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING, Protocol, TypeVar, cast, runtime_checkable

import numpy as np
from torch import Tensor

from rl_platform.algorithms.aggregation import select
from rl_platform.algorithms.metrics import Metrics, Sums
from rl_platform.algorithms.variants.unchanged import unchanged
from rl_platform.config.schema.algorithm import Algorithm
from rl_platform.user_code import Extension

if TYPE_CHECKING:
    from rl_platform.algorithms.shapes import BoolBT, FloatBT


@runtime_checkable
class PolicyLoss(Protocol):
    """A policy loss, of either task."""

    def __call__(
        self,
        log_probs: FloatBT,
        old_log_probs: FloatBT,
        advantages: FloatBT,
        mask: BoolBT | None,
        algorithm: Algorithm,
        /,
    ) -> tuple[FloatBT, Metrics]:
        """Returns the loss of each position [B,T] and metrics.

        The platform calls it for each micro-batch. The tensors [B,T] are 0 outside the mask, and `log_probs` has a
        gradient. The loss has a gradient, too, even where it is 0. mask: None if every position counts. algorithm: the
        section of the config.
        """


T = TypeVar("T")
TAKEN = (  # metrics `actor/...` that the platform computes beside any policy loss
    *("approx_kl_first", "approx_kl_k3", "approx_kl_last", "clip_frac_first", "clip_frac_last", "demonstration_nll"),
    *("early_stopped", "entropy", "grad_norm", "kl_loss", "loss", "lr", "optimizer_steps", "pg_loss", "positive_nll"),
    *("router_aux_loss", "skipped_updates"),
)
GRADIENT = "compute it from log_probs, without torch.no_grad, detach or numbers of Python"
LOSS = Extension(
    "policy loss",
    "algorithm.policy_loss",
    PolicyLoss,
    "function(log_probs, old_log_probs, advantages, mask, algorithm) -> (loss [B,T], Metrics)",
)


def load_policy_loss(name: str) -> PolicyLoss:
    """Returns the function behind module:function, with inputs that are 0 outside the mask, so that its gradient is
    finite there. Raises ConfigError if it cannot be imported."""
    function = LOSS.load(name)

    def loss(
        log_probs: FloatBT, old_log_probs: FloatBT, advantages: FloatBT, mask: BoolBT | None, algorithm: Algorithm
    ) -> tuple[FloatBT, Metrics]:
        tensors = [select(x, mask) for x in (log_probs, old_log_probs, advantages)]
        lent = {"old_log_probs": old_log_probs, "advantages": advantages, "mask": mask}
        with unchanged(LOSS, name, lambda: lent), LOSS.running(name):
            result = function(*tensors, mask, algorithm)
        if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Metrics)):
            raise LOSS.misfit(name, f"returned {type(result).__name__}")
        if not isinstance(result[0], Tensor) or result[0].shape != log_probs.shape:
            shape = list(result[0].shape) if isinstance(result[0], Tensor) else type(result[0]).__name__
            raise LOSS.misfit(name, f"the loss it returned is {shape}, not one number per position")
        if log_probs.requires_grad and not result[0].requires_grad:
            raise LOSS.misfit(name, "the loss it returned has no gradient, so the policy would not learn", GRADIENT)
        return select(result[0], mask), _checked(name, result[1])

    return loss


def _checked(name: str, metrics: Metrics) -> Metrics:
    """Returns the metrics without their gradients, which would keep the tensors of all mini-batches in memory.

    Raises ConfigError if they are not those of `Metrics`, or would be mixed with others of the platform.
    """
    means = {}
    for names, sums in metrics.means.items():
        if not (isinstance(names, tuple) and isinstance(sums, Sums) and np.shape(sums.total) == (len(names),)):
            raise LOSS.misfit(
                name, f"its metrics have {names!r} as means", "rl_platform.algorithms.metrics.over makes them"
            )
        means[names] = Sums(_detached(sums.total), _detached(sums.count))
    for extrema in (metrics.minima, metrics.maxima):
        for each, value in extrema.items():
            if np.shape(value) != ():
                raise LOSS.misfit(name, f"its metric {each} is no number but has the shape {list(np.shape(value))}")
    _check_names(name, (*chain(*means), *metrics.minima, *metrics.maxima))
    minima, maxima = (
        {each: _detached(value) for each, value in extrema.items()} for extrema in (metrics.minima, metrics.maxima)
    )
    return Metrics(means, minima, maxima)


def _check_names(name: str, metrics: Iterable[str]) -> None:
    """Raises ConfigError for a metric that the platform computes too: the log would have a mixture of both."""
    for metric in metrics:
        if not metric.startswith("actor/"):
            raise LOSS.misfit(name, f"its metric {metric} has no actor/ in front", f"name it actor/{metric}")
        if metric.removeprefix("actor/") in TAKEN:
            message = f"its metric {metric} is one of the platform, and would be mixed with it"
            raise LOSS.misfit(name, message, f"another name, as actor/my_{metric.removeprefix('actor/')}")


def _detached(value: T) -> T:
    return cast(T, value.detach()) if isinstance(value, Tensor) else value
