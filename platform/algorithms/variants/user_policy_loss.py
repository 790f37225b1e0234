"""A user's own policy loss: a function named in the config as module:function, checked at every use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor

from rl_platform.algorithms.aggregation import select
from rl_platform.algorithms.metrics import Metrics
from rl_platform.config.schema.algorithm import Algorithm
from rl_platform.user_code import Extension

if TYPE_CHECKING:
    from rl_platform.algorithms.shapes import BoolBT, FloatBT


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


def load_policy_loss(name: str) -> PolicyLoss:
    """Returns the function behind module:function, with inputs that are 0 outside the mask, so that its gradient is
    finite there. Raises ConfigError if it cannot be imported."""
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
