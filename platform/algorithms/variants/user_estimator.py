"""A user's own estimator: a function named in the config as module:function, imported once and checked at every use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor

from rl_platform.algorithms.validation import first_not_finite
from rl_platform.algorithms.variants.unchanged import tensors_of, unchanged
from rl_platform.config.schema.algorithm import Algorithm
from rl_platform.records import RolloutBatch
from rl_platform.user_code import Extension

if TYPE_CHECKING:
    from rl_platform.algorithms.shapes import BoolBT, FloatBT


@runtime_checkable
class Estimate(Protocol):
    """An advantage estimator, of either task."""

    def __call__(self, batch: RolloutBatch, algorithm: Algorithm, /) -> tuple[Tensor, Tensor | None]:
        """Returns advantages [B,T], and returns [B,T] for the values or None without values.

        Called once per rollout batch, without gradient. It must not change the tensors of the batch. `algorithm`: the
        section of the config.
        """


ESTIMATOR = Extension(
    "advantage estimator",
    "algorithm.adv_type",
    Estimate,
    "function(batch, algorithm) -> (advantages [B,T], returns [B,T] or None)",
)


def load_estimator(name: str) -> Estimate:
    """Returns the function behind module:function, with its results checked. Raises ConfigError if it cannot be
    imported."""
    function = ESTIMATOR.load(name)

    def checked(batch: RolloutBatch, algorithm: Algorithm) -> tuple[Tensor, Tensor | None]:
        with torch.no_grad(), unchanged(ESTIMATOR, name, lambda: tensors_of(batch)), ESTIMATOR.running(name):
            pair = function(batch, algorithm)
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise ESTIMATOR.misfit(name, f"returned {type(pair).__name__}, not a pair")
        estimated = _check(name, "advantages", pair[0], batch.mask)
        if pair[1] is None and batch.values is None:
            return estimated, None
        return estimated, _check(name, "returns", pair[1], batch.mask)

    return checked


def _check(name: str, what: str, result: object, mask: BoolBT) -> FloatBT:
    """Returns `result` as float32, 0 outside `mask`.

    Raises ConfigError if it is not finite numbers in the shape of `mask`.
    """
    if result is None:
        raise ESTIMATOR.misfit(name, "returned no returns, but a critic is trained on them")
    if not isinstance(result, Tensor) or result.shape != mask.shape or result.is_complex():
        shape = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise ESTIMATOR.misfit(name, f"returned {what} as {shape}, not as a tensor {list(mask.shape)}")
    wrong = first_not_finite(result, mask)
    if wrong is not None:
        raise ESTIMATOR.misfit(name, f"returned {what} that are not finite, first at {wrong}: {result[wrong].item()}")
    return torch.where(mask, result.detach().to(torch.float32), 0.0)
