"""A user's own estimator: a function named in the config as module:function, imported once and checked at every use."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch
from torch import Tensor

from rl_platform.config.algorithm import Algorithm
from rl_platform.errors import ConfigError, Problem
from rl_platform.records import RolloutBatch

Estimate = Callable[[RolloutBatch, Algorithm], tuple[Tensor, Tensor | None]]
KEY = "algorithm.adv_type"
SIGNATURE = "function(batch, algorithm) -> (advantages [B,T], returns [B,T] or None)"


def load_estimator(name: str) -> Estimate:
    """The function behind module:function, with its results checked. Raises ConfigError if it cannot be imported."""
    module_name, _, function_name = name.partition(":")
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except Exception as error:  # whatever the user's module raises while it is imported
        allowed = "module:function, importable from where the run was started"
        raise _problem(f"cannot be imported: {type(error).__name__}: {error}", name, allowed) from error
    if not callable(function):
        raise _problem("is not a function", name, SIGNATURE)

    def checked(batch: RolloutBatch, algorithm: Algorithm) -> tuple[Tensor, Tensor | None]:
        with torch.no_grad():
            found = function(batch, algorithm)
        if not (isinstance(found, tuple) and len(found) == 2):
            raise _problem(f"returned {type(found).__name__}, not a pair", name, SIGNATURE)
        estimated = _check(name, "advantages", found[0], batch.mask)
        if found[1] is None and batch.values is None:
            return estimated, None
        return estimated, _check(name, "returns", found[1], batch.mask)

    return checked


def _check(name: str, what: str, found: object, mask: Tensor) -> Tensor:
    """`found` as float32, 0 outside `mask`. Raises ConfigError if it is not finite numbers in the shape of `mask`."""
    if found is None:
        raise _problem("returned no returns, but a critic is trained on them", name, SIGNATURE)
    if not isinstance(found, Tensor) or found.shape != mask.shape or found.is_complex():
        shape = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise _problem(f"returned {what} as {shape}, not as a tensor {list(mask.shape)}", name, SIGNATURE)
    wrong = first_not_finite(found, mask)
    if wrong is not None:
        raise _problem(f"returned {what} that are not finite, first at {wrong}: {found[wrong].item()}", name, SIGNATURE)
    return torch.where(mask, found.to(torch.float32), 0.0)


def first_not_finite(x: Tensor, mask: Tensor) -> tuple[int, ...] | None:
    """The first index of [B,T] where `mask` is set and `x` is NaN or infinite."""
    wrong = mask & ~torch.isfinite(x)
    return tuple(wrong.nonzero()[0].tolist()) if bool(wrong.any()) else None


def _problem(message: str, value: str, allowed: str) -> ConfigError:
    return ConfigError([Problem(KEY, message, value=value, allowed=allowed)])
