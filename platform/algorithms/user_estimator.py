"""A user's own estimator: a function named in the config as module:function, imported once and checked at every use."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_platform.algorithms.validation import first_not_finite
from rl_platform.config.schema.algorithm import Algorithm
from rl_platform.records import RolloutBatch
from rl_platform.user_function import load_function, misfit

if TYPE_CHECKING:
    from rl_platform.algorithms.shapes import BoolBT, FloatBT

Estimate = Callable[[RolloutBatch, Algorithm], tuple[Tensor, Tensor | None]]
KEY = "algorithm.adv_type"
SIGNATURE = "function(batch, algorithm) -> (advantages [B,T], returns [B,T] or None)"


def load_estimator(name: str) -> Estimate:
    """The function behind module:function, with its results checked. Raises ConfigError if it cannot be imported."""
    function = load_function(KEY, name, SIGNATURE)

    def checked(batch: RolloutBatch, algorithm: Algorithm) -> tuple[Tensor, Tensor | None]:
        with torch.no_grad():
            pair = function(batch, algorithm)
        if not (isinstance(pair, tuple) and len(pair) == 2):
            raise misfit(KEY, name, f"returned {type(pair).__name__}, not a pair", SIGNATURE)
        estimated = _check(name, "advantages", pair[0], batch.mask)
        if pair[1] is None and batch.values is None:
            return estimated, None
        return estimated, _check(name, "returns", pair[1], batch.mask)

    return checked


def _check(name: str, what: str, result: object, mask: BoolBT) -> FloatBT:
    """`result` as float32, 0 outside `mask`. Raises ConfigError if it is not finite numbers in the shape of `mask`."""
    if result is None:
        raise misfit(KEY, name, "returned no returns, but a critic is trained on them", SIGNATURE)
    if not isinstance(result, Tensor) or result.shape != mask.shape or result.is_complex():
        shape = list(result.shape) if isinstance(result, Tensor) else type(result).__name__
        raise misfit(KEY, name, f"returned {what} as {shape}, not as a tensor {list(mask.shape)}", SIGNATURE)
    wrong = first_not_finite(result, mask)
    if wrong is not None:
        raise misfit(
            KEY, name, f"returned {what} that are not finite, first at {wrong}: {result[wrong].item()}", SIGNATURE
        )
    return torch.where(mask, result.to(torch.float32), 0.0)
