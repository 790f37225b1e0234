"""The few numbers of a run that a view shows: their names for each task, their history and their format.

Not covered: the views themselves (`view`, `plain`, `plot`).
"""

from __future__ import annotations

import math
import shlex
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from rl_platform.envs.reasoning.verifiers import DECIDING
from rl_platform.metrics import iter_metrics
from rl_platform.reporter import RunInfo


@dataclass(frozen=True)
class Headline:
    """The metrics of a task: objective, validation, and the others with short labels.

    rates: success rates, shown beside them if a run reports them.
    """

    objective: str
    validation: str
    numbers: Mapping[str, str]
    rates: Mapping[str, str] = field(default_factory=dict)


def _reasoning(validation: str, label: str) -> Headline:
    numbers = {
        "reward": "reward/mean",
        label: validation,
        "KL": "actor/approx_kl",
        "clip": "actor/clip_frac",
        "entropy": "actor/entropy",
        "expl var": "critic/explained_var",
        "length": "len/response_mean",
        "tokens/s": "perf/tokens_per_sec",
    }
    return Headline("reward/mean", validation, numbers)


HEADLINES = {
    "reasoning": _reasoning("val/accuracy", "val acc"),
    "embodied": Headline(
        "episode/return",
        "val/return",
        {
            "return": "episode/return",
            "val return": "val/return",
            "length": "episode/length",
            "KL": "actor/approx_kl",
            "clip": "actor/clip_frac",
            "entropy": "actor/entropy",
            "expl var": "critic/explained_var",
            "steps/s": "perf/env_steps_per_sec",
        },
        {"success": "env/success_once", "val success": "val/success_once"},
    ),
}
OWN_REWARD = _reasoning("val/score", "val score")
"""For reasoning runs with another reward than the verifiers, which return right or wrong."""

CURVE_POINTS = 256
RECENT_STEPS = 10


def headline_of(config: Mapping[str, Mapping[str, object]]) -> Headline:
    """Returns the headline of a run from its config (section, key, value)."""
    task = str(config["runner"]["task_type"])
    reward = config.get("reward") or {}
    functions = reward.get("functions")
    parts = functions if isinstance(functions, list | tuple) and functions else [reward]
    decides = any(part.get("type", "task") in DECIDING for part in parts)
    return OWN_REWARD if task == "reasoning" and not decides else HEADLINES[task]


class Curve:
    """The values of a metric in bounded memory: first, best, last, and means over windows of equal length."""

    def __init__(self) -> None:
        self.first: tuple[int, float] | None = None
        self.best = self.last = (0, math.nan)
        self._points: list[tuple[int, float]] = []
        self._width, self._count, self._sum = 1, 0, 0.0

    def add(self, step: int, value: float) -> None:
        """Adds the value of a step. The step numbers ascend."""
        point = step, value
        if self.first is None:
            self.first = self.best = point
        self.best = max(self.best, point, key=lambda point: point[1])
        self.last = point
        self._count, self._sum = self._count + 1, self._sum + value
        if self._count == self._width:
            self._points.append((step, self._sum / self._count))
            self._count, self._sum = 0, 0.0
        if len(self._points) == CURVE_POINTS:  # half as many, each of twice as many values
            pairs = zip(self._points[::2], self._points[1::2], strict=True)
            self._points = [(end, (a + b) / 2) for (_, a), (end, b) in pairs]
            self._width *= 2

    @property
    def points(self) -> list[tuple[int, float]]:
        """Returns (last step, mean) of at most CURVE_POINTS windows; the values themselves while there are fewer."""
        rest = [(self.last[0], self._sum / self._count)] if self._count else []
        return self._points + rest


class History:
    """The numbers of all steps so far that views show, with the steps before a resume, in bounded memory."""

    def __init__(self, headline: Headline, max_steps: int) -> None:
        self.headline, self.max_steps = headline, max_steps
        self.count = 0  # of steps, that before the first included
        self.step = 0  # the last finished one
        self.seconds = 0.0
        self.last: Mapping[str, float] = {}  # the metrics of the last step
        drawn = (headline.objective, headline.validation, *headline.rates.values())
        self._curves = {name: Curve() for name in drawn}
        self._shown = {*headline.numbers.values(), *drawn}
        self._current: dict[str, float] = {}
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)

    @classmethod
    def of(cls, info: RunInfo) -> History:
        """Returns the history of a run that starts, with the earlier steps of a run that is resumed."""
        config = {**info.config, "runner": {"task_type": info.task_type}}
        history = cls(headline_of(config), info.max_steps)
        if info.resumed_step is not None and (info.output_dir / "metrics.jsonl").exists():
            for row in iter_metrics(info.output_dir):
                if row["step"] <= info.resumed_step:
                    history.add(int(row["step"]), row)
        return history

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds the metrics of a finished step."""
        self.count, self.step, self.last = self.count + 1, step, metrics
        self._current |= {name: metrics[name] for name in self._shown if name in metrics}
        for name, curve in self._curves.items():
            if math.isfinite(value := metrics.get(name, math.nan)):
                curve.add(step, value)
        if math.isfinite(seconds := metrics.get("time/step", math.nan)):
            self.seconds += seconds
            if step > 0:
                self._recent.append(seconds)

    @property
    def numbers(self) -> dict[str, str]:
        """Returns labels and metrics to show: those of the headline, and its rates that were reported."""
        seen = {label: name for label, name in self.headline.rates.items() if name in self._current}
        return {**self.headline.numbers, **seen}

    def series(self, metric: str) -> list[tuple[int, float]]:
        """Returns (step, value) where a metric was reported and finite; means over windows in a long run."""
        return self._curves[metric].points

    def current(self, metric: str) -> float:
        """Returns the last reported value of a shown metric, NaN if there is none."""
        return self._current.get(metric, math.nan)

    @property
    def seconds_per_step(self) -> float:
        """Returns the median of the last ten steps, NaN before the first."""
        return median(self._recent) if self._recent else math.nan

    @property
    def eta(self) -> float:
        """Returns the seconds left, NaN if not known."""
        return self.seconds_per_step * max(self.max_steps - self.step, 0)

    def summary(self, info: RunInfo) -> list[tuple[str, str]]:
        """Returns a summary of the run with the path of its outputs, as (label, text) lines."""
        lines = [("steps", f"{self.step}/{self.max_steps}")]
        if self.seconds:
            lines.append(("time", duration(self.seconds)))
        rates = [name for name in self.headline.rates.values() if name.startswith("val/")]
        for name in (self.headline.validation, *rates):
            if (curve := self._curves[name]).first is not None:
                lines.append((name, _best_and_last(curve)))
        objective = self._curves[self.headline.objective]
        if objective.first is not None:
            first, last = objective.first[1], objective.last[1]
            lines.append((self.headline.objective, f"first {number(first)}, last {number(last)}"))
        lines.append(("outputs", str(info.output_dir)))
        for name, verb in (("curves", "plot"), ("what happened", "report")):
            lines.append((name, shlex.join(["rl-platform", verb, str(info.output_dir)])))
        return lines


def _best_and_last(curve: Curve) -> str:
    """Returns both values with their steps; step 0 alone says nothing about training."""
    if curve.last[0] == 0:
        return f"{number(curve.last[1])} before training (step 0), not measured since"
    points = {"best": curve.best, "last": curve.last}
    return ", ".join(f"{which} {number(value)} (step {step})" for which, (step, value) in points.items())


def number(value: float) -> str:
    """Returns at most 7 characters for |value| < 1e7, as 1,203, 41.7, 0.532, 0.0012, 1.2e-05; an en dash for NaN."""
    size = abs(value)
    if math.isnan(value):
        return "–"
    if math.isinf(value) or size >= 1e7:
        return f"{value:.1e}"
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 10 or value == 0:
        return f"{value:.1f}"
    if size >= 0.01:
        return f"{value:.3f}"
    return f"{value:.4f}" if size >= 0.001 else f"{value:.1e}"


def duration(seconds: float) -> str:
    """Returns a text as 8.4 s, 6:43 or 2:06:43; an en dash for NaN."""
    if math.isnan(seconds):
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"
