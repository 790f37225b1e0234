"""Callbacks of `rl.train` and `rl.ppo`: their protocol `Callback`, and callbacks that are often needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from rl_platform.config.suggest import nearest
from rl_platform.errors import ConfigError, Problem
from rl_platform.runners.step_callbacks import Callback as Callback


@dataclass(frozen=True)
class StopAt:
    """Stops the run after the first step whose `metric` is at least `value`.

    Metrics of the validation exist in steps that were validated, see `runner.val_check_interval`.
    """

    metric: str
    value: float

    def __call__(self, step: int, metrics: Mapping[str, float], /) -> bool:
        """Raises ConfigError if the step was validated and the validation has no such metric."""
        if self.metric not in metrics and self.metric.startswith("val/"):
            validated = [name for name in metrics if name.startswith("val/")]
            if validated:
                hint = f"did you mean {close}?" if (close := nearest(self.metric, validated)) else ""
                message = "a validation of this run has no such metric"
                raise ConfigError([Problem("StopAt.metric", message, "", self.metric, ", ".join(validated), hint)])
        return metrics.get(self.metric, float("-inf")) >= self.value
