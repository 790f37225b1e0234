"""Callbacks of `rl.train` and `rl.ppo`: their protocol `Callback`, and callbacks that are often needed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real

from rl_platform.errors import ConfigError, Problem
from rl_platform.runners.step_callbacks import Callback as Callback
from rl_platform.suggest import SURE, nearest


@dataclass(frozen=True)
class StopAt:
    """Stops the run after the first step whose `metric` is at least `value`.

    Metrics of the validation exist in steps that were validated, see `runner.val_check_interval`. Raises ConfigError if
    the metric is no text or the value no number.
    """

    metric: str
    value: float

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str):
            allowed = "the name of a metric, as val/return"
            raise ConfigError([Problem("StopAt.metric", "is no name", value=repr(self.metric)[:80], allowed=allowed)])
        if not isinstance(self.value, Real) or math.isnan(self.value):
            raise ConfigError([Problem("StopAt.value", "is no number", value=repr(self.value)[:80])])

    def __call__(self, step: int, metrics: Mapping[str, float], /) -> bool:
        """Raises ConfigError if the step was validated and the validation has no such metric."""
        if self.metric not in metrics and self.metric.startswith("val/"):
            validated = [name for name in metrics if name.startswith("val/")]
            if validated:
                hint = f"did you mean {close}?" if (close := nearest(self.metric, validated)) else ""
                message = "a validation of this run has no such metric"
                raise ConfigError(
                    [Problem("StopAt.metric", message, value=self.metric, allowed=", ".join(validated), hint=hint)]
                )
        elif self.metric not in metrics and (close := nearest(self.metric, self._alike(metrics), SURE)):
            # it may come in later steps; Python shows the same warning once
            warnings.warn(f"StopAt: no metric {self.metric} so far; did you mean {close}?", stacklevel=2)
        return metrics.get(self.metric, float("-inf")) >= self.value

    def _alike(self, metrics: Mapping[str, float]) -> list[str]:
        """Returns the metrics of the same group, as `episode/`."""
        group = self.metric.partition("/")[0]
        return [name for name in metrics if name.partition("/")[0] == group]
