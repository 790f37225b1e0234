"""The input and output of the verdict's rules: the numbers of a run, and findings with their evidence."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from rl_platform.config.layers import value_at
from rl_platform.launch.views.headline import Headline

Level = Literal["bad", "warning", "note"]
LEVELS: tuple[Level, ...] = ("bad", "warning", "note")


@dataclass(frozen=True)
class Busy:
    """The work of a device in the recorded steps. share: of the time; waiting: share of the time by phase of the
    step in which it did not work, largest first; components: those on it."""

    device: str
    components: tuple[str, ...]
    share: float
    waiting: Mapping[str, float]


@dataclass(frozen=True)
class Facts:
    """The input of the rules. rows: metrics.jsonl. config: section, key, value. busy: of the timeline. rank_seconds:
    component and method -> seconds of each rank of it."""

    rows: Sequence[Mapping[str, float]]
    headline: Headline
    config: Mapping[str, object] = field(default_factory=dict)
    busy: Sequence[Busy] = ()
    rank_seconds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def key(self, path: str) -> Any:
        """Returns the value of a config key, None if there is none."""
        return value_at(self.config, path.split("."))

    def series(self, metric: str) -> list[tuple[int, float]]:
        """Returns (step, value) of the steps in which the metric is finite."""
        values = ((int(row["step"]), row.get(metric, math.nan)) for row in self.rows)
        return [(step, value) for step, value in values if math.isfinite(value)]

    def values(self, metric: str) -> list[float]:
        return [value for _, value in self.series(metric)]

    def early(self, metric: str) -> list[float]:
        """Returns the values of the first quarter of the steps."""
        values = self.values(metric)
        return values[: max(len(values) // 4, 1)]

    def late(self, metric: str) -> list[float]:
        """Returns the values of the last quarter of the steps."""
        values = self.values(metric)
        return values[-max(len(values) // 4, 1) :]

    def late_steps(self, metric: str) -> str:
        series = self.series(metric)[-max(len(self.series(metric)) // 4, 1) :]
        return f"steps {series[0][0]} to {series[-1][0]}" if len(series) > 1 else f"step {series[-1][0]}"


@dataclass(frozen=True)
class Finding:
    """A finding of a rule. title: what is wrong; evidence: the numbers; advice: what to do. metrics: to look
    at."""

    level: Level
    title: str
    evidence: str
    advice: str
    metrics: tuple[str, ...] = ()


@dataclass(frozen=True)
class VerdictRule:
    """A rule of the verdict. question: the question that it answers. needs: metrics without which it has no finding, or
    other `SOURCES`."""

    question: str
    needs: tuple[str, ...]
    check: Callable[[Facts], Finding | None]
