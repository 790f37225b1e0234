"""Callbacks: functions that are called after each step and may stop the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from rl_platform.user_code import Extension


class Callback(Protocol):
    """Called by the process of the runner, in the order of the steps. A checkpoint does not contain its state."""

    def __call__(self, step: int, metrics: Mapping[str, float], /) -> bool | None:
        """Called after PPO step `step` (from 1), before its report and checkpoint. True: the run validates the step,
        saves a checkpoint and ends.

        metrics: of this step by name, without its times; `val/...` only if the step was validated. An exception ends
        the run after it has saved the step.
        """


CALLBACK = Extension(
    "callback",
    "runner.callbacks",
    Callback,
    "function(step, metrics) -> True to stop, else None; or a class whose instances are called like this",
)


def load_callbacks(names: Sequence[str]) -> list[Callback]:
    """Returns the callbacks of `runner.callbacks`. Raises ConfigError for one that cannot be imported or called."""
    return [CALLBACK.load(name) for name in names]


def stopped_by(callbacks: Sequence[Callback], step: int, metrics: Mapping[str, float]) -> list[str]:
    """Calls all callbacks; returns the names of those that returned True.

    Raises WorkerError with their traceback, ConfigError for a result that is no bool.
    """
    stopping = []
    for callback in callbacks:
        name = getattr(callback, "__qualname__", type(callback).__qualname__)
        with CALLBACK.running(name):
            result = callback(step, metrics)
        if not (result is None or isinstance(result, bool | np.bool_)):
            message = f"returned {type(result).__name__}, neither True, False nor None"
            raise CALLBACK.misfit(name, message, "bool(...) of the result says whether the run stops")
        if result:
            stopping.append(name)
    return stopping
