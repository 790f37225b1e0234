"""The few numbers of a run that a person watches: which ones per task, their history, and how they are written.

Not covered: where they are shown (`view`, `plain`, `plot`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

from rl_platform.metrics import RunInfo, read_metrics


@dataclass(frozen=True)
class Headline:
    """What matters for a task: names of the metrics to raise and to validate by, and short labels for the rest.

    rates: the same as success rates, shown beside them where a run has them.
    """

    objective: str
    validation: str
    numbers: Mapping[str, str]
    rates: Mapping[str, str] = field(default_factory=dict)


HEADLINES = {
    "reasoning": Headline(
        "reward/mean",
        "val/accuracy",
        {
            "reward": "reward/mean",
            "val acc": "val/accuracy",
            "KL": "actor/approx_kl",
            "clip": "actor/clip_frac",
            "entropy": "actor/entropy",
            "expl var": "critic/explained_var",
            "length": "len/response_mean",
            "tokens/s": "perf/tokens_per_sec",
        },
    ),
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

_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.-=+*%#"


@dataclass
class History:
    """The metrics of all steps so far, those before a resume included."""

    headline: Headline
    max_steps: int
    rows: list[dict[str, float]] = field(default_factory=list)

    @classmethod
    def of(cls, info: RunInfo) -> History:
        rows = []
        if info.resumed_step is not None and (info.output_dir / "metrics.jsonl").exists():
            rows = [row for row in read_metrics(info.output_dir) if row["step"] <= info.resumed_step]
        return cls(HEADLINES[info.task_type], info.max_steps, rows)

    def add(self, step: int, metrics: Mapping[str, float]) -> None:
        self.rows.append({"step": step, **metrics})

    @property
    def numbers(self) -> dict[str, str]:
        """Labels and metrics to show: those of the headline, and its rates that have been reported."""
        seen = {label: name for label, name in self.headline.rates.items() if any(name in row for row in self.rows)}
        return {**self.headline.numbers, **seen}

    @property
    def step(self) -> int:
        """The last finished step, 0 before the first."""
        return int(self.rows[-1]["step"]) if self.rows else 0

    def series(self, metric: str) -> list[tuple[int, float]]:
        """(step, value) where the metric was reported and finite."""
        return [(int(row["step"]), row[metric]) for row in self.rows if math.isfinite(row.get(metric, math.nan))]

    def current(self, metric: str) -> float:
        """The value last reported, NaN if there is none."""
        return next((row[metric] for row in reversed(self.rows) if metric in row), math.nan)

    @property
    def seconds_per_step(self) -> float:
        """Median of the last ten steps, NaN before the first."""
        recent = [row["time/step"] for row in self.rows[-10:] if "time/step" in row and row["step"] > 0]
        return median(recent) if recent else math.nan

    @property
    def eta(self) -> float:
        """Seconds left, NaN if not known."""
        return self.seconds_per_step * max(self.max_steps - self.step, 0)

    def summary(self, info: RunInfo) -> list[tuple[str, str]]:
        """How the run went and where its outputs lie, as (label, text) lines."""
        lines = [("steps", f"{self.step}/{self.max_steps}")]
        seconds = sum(value for _, value in self.series("time/step"))
        if seconds:
            lines.append(("time", duration(seconds)))
        objective = self.series(self.headline.objective)
        rates = [name for name in self.headline.rates.values() if name.startswith("val/")]
        for name in (self.headline.validation, *rates):
            if validation := self.series(name):
                points = {"best": max(validation, key=lambda point: point[1]), "last": validation[-1]}
                texts = (f"{which} {number(value)} (step {step})" for which, (step, value) in points.items())
                lines.append((name, ", ".join(texts)))
        if objective:
            lines.append((self.headline.objective, f"first {number(objective[0][1])}, last {number(objective[-1][1])}"))
        lines.append(("outputs", str(info.output_dir)))
        lines.append(("curves", f"python -m rl_platform.launch.plot {info.output_dir}"))
        return lines


def number(value: float) -> str:
    """Compact and at most 7 characters for |value| < 1e7: 1,203  41.7  0.532  0.0012  1.2e-05; an en dash for NaN."""
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
    """8.4 s, 6:43, 2:06:43; an en dash for NaN."""
    if math.isnan(seconds):
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def sparkline(values: Sequence[float], width: int, ascii_only: bool = False) -> str:
    """At most `width` characters, neighbouring values averaged, lowest to highest over the full height."""
    if not values or width < 1:
        return ""
    cells = min(width, len(values))
    edges = [len(values) * cell // cells for cell in range(cells + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    bars = _ASCII_BARS if ascii_only else _BARS
    scale = (len(bars) - 1) / (high - low) if high > low else 0.0
    return "".join(bars[round((mean - low) * scale)] for mean in means)


def printable(text: str) -> str:
    """One line without control characters: generated text must not steer the terminal."""
    return "".join("⏎" if char == "\n" else char if char.isprintable() else "·" for char in text.strip())
