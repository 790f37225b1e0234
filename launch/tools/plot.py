"""Learning curves as a PNG. Several runs (seeds of one setting) are thin lines, their median is a thick one."""

from __future__ import annotations

import importlib.util
import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from rl_platform.errors import ConfigError, DataError, Problem
from rl_platform.launch.headline import headline_of_run
from rl_platform.metrics import read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

AXES = {
    "step": ("", "PPO step"),
    "env_steps": ("perf/env_steps", "environment steps"),
    "minutes": ("time/step", "minutes"),
}
"""Name of an x axis: the metric that is summed up (none: the step itself) and the label."""

Curve = list[tuple[float, float]]
"""(x, value) in ascending x."""


def plot(
    runs: Sequence[Path], output: Path, metrics: Sequence[str] | None = None, x: str = "step", title: str = ""
) -> None:
    """Writes one chart per metric, side by side, to `output`. A run is an output folder or a metrics.jsonl.

    Raises ConfigError without matplotlib, DataError for a run that cannot be read or a metric that no run has.
    """
    require_matplotlib("plot")
    from matplotlib.figure import Figure

    rows = [read_metrics(run) for run in runs]
    names = list(metrics) if metrics else _default_metrics(runs, rows)
    charts = {name: [curve for run in rows if (curve := read_curve(run, name, x))] for name in names}
    for name, curves in charts.items():
        if not curves:
            known = sorted({key for run in rows for row in run for key in row} - {"step"})
            raise DataError(f"no run has values of {name!r} over {x}; there are: {', '.join(known)}")
    figure = Figure(figsize=(5.5 * len(charts), 3.6), layout="constrained")
    for axes, (name, curves) in zip(figure.subplots(1, len(charts), squeeze=False)[0], charts.items(), strict=True):
        _draw(axes, name, curves, AXES[x][1])
    if title:
        figure.suptitle(title)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=150)


def require_matplotlib(verb: str) -> None:
    """Raises ConfigError without matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        hint = "pip install 'rl-platform[plot]'"
        raise ConfigError([Problem(verb, "matplotlib is not installed", hint=hint)])


def read_curve(rows: Sequence[dict[str, float]], metric: str, x: str) -> Curve:
    """Returns the finite values of `metric` over the step, or over the sum of another metric up to it."""
    summed = AXES[x][0]
    if not summed:
        positions = [row["step"] for row in rows]
    elif not any(summed in row for row in rows):
        return []
    else:
        scale = 60.0 if x == "minutes" else 1.0
        positions = list(accumulate(row.get(summed, 0.0) / scale for row in rows))
    values = (row.get(metric, math.nan) for row in rows)
    return [(position, value) for position, value in zip(positions, values, strict=True) if math.isfinite(value)]


def median_curve(curves: Sequence[Curve]) -> Curve:
    """Returns the median of all curves, interpolated linearly, where all of them have values."""
    begin, end = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    positions = sorted({x for curve in curves for x, _ in curve if begin <= x <= end})
    return [(x, median(_at(curve, x) for curve in curves)) for x in positions]


def _at(curve: Curve, x: float) -> float:
    right = min(bisect_right(curve, x, key=lambda point: point[0]), len(curve) - 1)
    (x0, y0), (x1, y1) = curve[max(right - 1, 0)], curve[right]
    return y0 if x1 == x0 else y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _default_metrics(runs: Sequence[Path], rows: Sequence[Sequence[dict[str, float]]]) -> list[str]:
    """Returns objective, validation and success rates of the runs' tasks, if they were reported."""
    present = {key for run in rows for row in run for key in row}
    headlines = [headline_of_run(run, {key for row in own for key in row}) for run, own in zip(runs, rows, strict=True)]
    wanted = [name for one in headlines for name in (one.objective, one.validation, *one.rates.values())]
    reported = [name for name in dict.fromkeys(wanted) if name in present]
    if not reported:
        raise DataError(f"name a --metric; the runs have: {', '.join(sorted(present - {'step'})) or 'no steps yet'}")
    return reported


def _draw(axes: Axes, name: str, curves: Sequence[Curve], x_label: str) -> None:
    several = len(curves) > 1
    for index, curve in enumerate(curves):
        label = "runs" if several and index == 0 else None
        style: dict[str, float] = {"linewidth": 1, "alpha": 0.35} if several else {"linewidth": 2}
        axes.plot(
            *zip(*curve, strict=True), color="tab:blue", label=label, marker="." if len(curve) < 15 else "", **style
        )
    if several and (middle := median_curve(curves)):
        axes.plot(*zip(*middle, strict=True), color="tab:blue", linewidth=2, label=f"median of {len(curves)}")
        axes.legend(frameon=False)
    axes.set_title(name)
    axes.set_xlabel(x_label)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
