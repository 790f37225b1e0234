"""Learning curves as a PNG.

Several runs (seeds of one setting) are thin lines and their median a thick one, or their mean with a band. Groups of
runs have a colour and an entry of the legend each.
"""

from __future__ import annotations

import importlib.util
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence, Set
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import mean, median, stdev
from typing import TYPE_CHECKING, Any, Literal

from rl_platform.errors import ConfigError, DataError, Problem, check_all
from rl_platform.launch.tools.named_runs import check_runs
from rl_platform.launch.tools.run_groups import Rows, group_by_config, group_by_task
from rl_platform.launch.tools.run_headline import headline_of_run
from rl_platform.launch.written import PICTURES, check_output, writing
from rl_platform.metrics import read_metrics
from rl_platform.suggest import did_you_mean

if TYPE_CHECKING:
    from matplotlib.axes import Axes

AXES = {
    "step": ("", "PPO step"),
    "env_steps": ("perf/env_steps", "environment steps"),
    "minutes": ("time/step", "minutes"),
}
"""Name of an x axis: the metric that is summed up (none: the step itself) and the label."""

UNITS = {1e9: "G", 1e6: "M", 1e3: "k"}
LARGE = 10_000  # of an axis, for labels with a unit

Curve = list[tuple[float, float]]
"""(x, value) in ascending x."""


Band = Literal["std", "minmax", "none"]
"""Around the mean: one standard deviation (of the sample), the lowest and highest run, or nothing."""


def plot(
    runs: Sequence[Path],
    output: Path,
    metrics: Sequence[str] | None = None,
    x: str = "step",
    title: str = "",
    band: Band | None = None,
    compare: bool = False,
) -> None:
    """Writes one chart per metric, side by side, to `output`. A run is an output folder or a metrics.jsonl.

    band: None draws each run and the median. compare: a colour per config, whatever the seed is; without it, runs of
    different tasks have a colour and a median for each task. Raises ConfigError without matplotlib, for a folder
    without a run, a metric that no run has, and a file that cannot be written. DataError: damaged metrics.
    """
    check_all(partial(require_matplotlib, "plot"), partial(check_runs, runs), partial(check_output, output, PICTURES))
    by_config = group_by_config(runs) if compare else None
    rows = {run: read_metrics(run) for run in runs}
    groups = {name: {run: rows[run] for run in own} for name, own in (by_config or group_by_task(rows)).items()}
    draw_groups(groups, output, metrics, x, title, band or ("std" if compare else None))


def draw_groups(
    groups: Mapping[str, Mapping[Path, Rows]],
    output: Path,
    metrics: Sequence[str] | None = None,
    x: str = "step",
    title: str = "",
    band: Band | None = None,
) -> None:
    """Draws named groups of runs, each with its metrics, as `plot` does."""
    from matplotlib.figure import Figure

    every = [measured for own in groups.values() for measured in own.items()]
    flat = [rows for _, rows in every]
    names = list(metrics) if metrics else _default_metrics([run for run, _ in every], flat)
    charts = {metric: {name: _curves([*own.values()], metric, x) for name, own in groups.items()} for metric in names}
    for metric, curves in charts.items():
        if not any(curves.values()):
            known = {key for run in flat for row in run for key in row} - {"step"}
            if metric not in known:
                raise ConfigError([unknown_metric(metric, known)])
            message = f"no run has {AXES[x][0]}, whose sum is this axis"
            raise ConfigError([Problem("-x", message, value=x, allowed="step")])
    figure = Figure(figsize=(5.5 * len(charts), 3.6), layout="constrained")
    for axes, (metric, curves) in zip(figure.subplots(1, len(charts), squeeze=False)[0], charts.items(), strict=True):
        for (name, own), colour in zip(curves.items(), _colours(len(curves)), strict=True):
            if own:
                _draw(axes, own, colour, _without_formulas(name), band)
        _finish(axes, metric, AXES[x][1])
    if title:
        figure.suptitle(_without_formulas(title))
    with writing(output, PICTURES) as stage:
        figure.savefig(stage, dpi=150)


def unknown_metric(metric: str, known: Set[str], note: str = "") -> Problem:
    """Returns the problem of a metric that no run has; `note` follows the hint."""
    close = did_you_mean(metric, known)
    allowed = "" if close else ", ".join(sorted(known))
    hint = close or "rl-platform metrics explains them"
    hint = f"{hint} ({note})" if note else hint
    return Problem("--metric", "no run has this metric", value=metric, allowed=allowed, hint=hint)


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
    """Returns the median of all curves where all of them have values."""
    return [(x, median(values)) for x, values in aligned(curves)]


def aligned(curves: Sequence[Curve]) -> list[tuple[float, list[float]]]:
    """Returns (x, value of each curve), interpolated linearly, where all curves have values."""
    begin, end = max(curve[0][0] for curve in curves), min(curve[-1][0] for curve in curves)
    positions = sorted({x for curve in curves for x, _ in curve if begin <= x <= end})
    return [(x, [_at(curve, x) for curve in curves]) for x in positions]


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
        if not present - {"step"}:  # lines that hold the step only stand for metrics that are lost
            raise DataError(f"no step is finished yet in {', '.join(map(str, runs))}")
        raise DataError(f"name a --metric; the runs have: {', '.join(sorted(present - {'step'}))}")
    return reported


def _curves(runs: Sequence[Sequence[dict[str, float]]], metric: str, x: str) -> list[Curve]:
    return [curve for run in runs if (curve := read_curve(run, metric, x))]


def _colours(count: int) -> Sequence[object]:
    """Returns distinct colours: the usual ones for up to ten groups."""
    if count <= 10:
        return [f"C{index}" for index in range(count)]
    from matplotlib import colormaps

    return [colormaps["turbo"](index / (count - 1)) for index in range(count)]


def _draw(axes: Axes, curves: Sequence[Curve], colour: object, name: str, band: Band | None) -> None:
    """Draws the runs of a group and their median, or their mean with a band."""
    several, marker = len(curves) > 1, "." if max(map(len, curves)) < 15 else ""
    if band is None or not several:
        for index, curve in enumerate(curves):
            label = name or ("runs" if several else "") if index == 0 else ""
            style: dict[str, Any] = {"linewidth": 1, "alpha": 0.35} if several else {"linewidth": 2}
            axes.plot(*zip(*curve, strict=True), color=colour, label=label or None, marker=marker, **style)
        if several and (middle := median_curve(curves)):
            label = f"{name}, median of {len(curves)}" if name else f"median of {len(curves)}"
            axes.plot(*zip(*middle, strict=True), color=colour, linewidth=2, label=label)
        return
    if not (points := aligned(curves)):  # no x at which all runs have values
        return
    positions = [x for x, _ in points]
    centre = [mean(values) for _, values in points]
    label = f"{name} ({len(curves)})" if name else f"mean of {len(curves)}"
    axes.plot(positions, centre, color=colour, linewidth=2, label=label, marker=marker)
    if band == "std":
        spread = [stdev(values) for _, values in points]
        low = [middle - around for middle, around in zip(centre, spread, strict=True)]
        high = [middle + around for middle, around in zip(centre, spread, strict=True)]
    elif band == "minmax":
        low, high = [min(values) for _, values in points], [max(values) for _, values in points]
    else:
        return
    axes.fill_between(positions, low, high, color=colour, alpha=0.2, linewidth=0)


def with_unit(value: float) -> str:
    """Returns a number as the label of an axis: `2 M`, `-50 k`, `0`."""
    for scale, unit in UNITS.items():
        if abs(value) >= scale:
            return f"{value / scale:g} {unit}"
    return f"{value:g}"


def _without_formulas(text: str) -> str:
    """Returns a text for Matplotlib, which would read what is between dollar signs as a formula, or fail."""
    return text.replace("$", r"\$")


def _finish(axes: Axes, title: str, x_label: str) -> None:
    if labels := axes.get_legend_handles_labels()[1]:
        crowded = len(labels) > 4 or max(map(len, labels)) > 25
        axes.legend(frameon=False, fontsize="small" if crowded else None, ncols=1 + len(labels) // 12)
    axes.set_title(title)
    axes.set_xlabel(x_label)
    for axis, limits in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        if max(map(abs, limits)) >= LARGE:
            axis.set_major_formatter(lambda value, _: with_unit(value))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
