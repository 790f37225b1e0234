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
    from jaxtyping import Bool, Float

Estimate = Callable[[RolloutBatch, Algorithm], tuple[Tensor, Tensor | None]]
KEY = "algorithm.adv_type"
SIGNATURE = "function(batch, algorithm) -> (advantages [B,T], returns [B,T] or None)"


def load_estimator(name: str) -> Estimate:
    """The function behind module:function, with its results checked. Raises ConfigError if it cannot be imported."""
    function = load_function(KEY, name, SIGNATURE)

    def checked(batch: RolloutBatch, algorithm: Algorithm) -> tuple[Tensor, Tensor | None]:
        with torch.no_grad():
            found = function(batch, algorithm)
        if not (isinstance(found, tuple) and len(found) == 2):
            raise misfit(KEY, name, f"returned {type(found).__name__}, not a pair", SIGNATURE)
        estimated = _check(name, "advantages", found[0], batch.mask)
        if found[1] is None and batch.values is None:
            return estimated, None
        return estimated, _check(name, "returns", found[1], batch.mask)

    return checked


def _check(name: str, what: str, found: object, mask: Bool[Tensor, "batch seq"]) -> Float[Tensor, "batch seq"]:
    """`found` as float32, 0 outside `mask`. Raises ConfigError if it is not finite numbers in the shape of `mask`."""
    if found is None:
        raise misfit(KEY, name, "returned no returns, but a critic is trained on them", SIGNATURE)
    if not isinstance(found, Tensor) or found.shape != mask.shape or found.is_complex():
        shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise misfit(KEY, name, f"returned {what} as {shape}, not as a tensor {list(mask.shape)}", SIGNATURE)
    wrong = first_not_finite(found, mask)
    if wrong is not None:
        raise misfit(
            KEY, name, f"returned {what} that are not finite, first at {wrong}: {found[wrong].item()}", SIGNATURE
        )
    return torch.where(mask, found.to(torch.float32), 0.0)
