"""Results of a sweep: one value per point, mean and deviation per group, as a table, JSON, CSV and curves."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from statistics import mean, stdev

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rl_platform.errors import ConfigError, DataError
from rl_platform.launch.tools.plot import draw_groups, unknown_metric
from rl_platform.launch.tools.run_headline import headline_of_run
from rl_platform.launch.tools.sweep.grid import SweepPoint
from rl_platform.launch.views.headline import number
from rl_platform.launch.views.panels import aligned
from rl_platform.metrics import read_metrics
from rl_platform.run_files import FINISHED

DRAWN = 10  # groups of the picture, the best ones
DIRECTIONS = {"maximize": "highest", "minimize": "lowest"}


@dataclass(frozen=True)
class PointResult:
    """The end of a point. status: finished, pruned, failed or unfinished. step, value: the last ones of its metrics.

    seconds: of all its steps. reason: of a failure in this call.
    """

    point: str
    group: str
    values: Mapping[str, str]
    status: str
    step: int = 0
    value: float | None = None
    seconds: float = 0.0
    reason: str = ""


@dataclass(frozen=True)
class SeedGroup:
    """Points that differ in their seed. n: the finished ones, of which the other numbers are; std needs two."""

    name: str
    label: str
    n: int
    points: int
    mean: float | None = None
    std: float | None = None
    lowest: float | None = None
    highest: float | None = None
    best: bool = False


class Summary:
    """Results of `points` in `folder`. failed: names of points that failed, with the reason. metric: empty for the
    validation metric of the task, or its objective if nothing was validated.

    Raises ConfigError if points finished and none has the metric.
    """

    def __init__(
        self,
        folder: Path,
        points: Sequence[SweepPoint],
        failed: Mapping[str, str],
        pruned: frozenset[str] = frozenset(),
        metric: str = "",
        direction: str = "maximize",
    ) -> None:
        self.folder, self.direction = folder, direction
        rows = {point.name: steps_of(folder / point.name) for point in points}
        self.metric = metric or _metric(folder, rows)
        self.results = [self._result(point, rows[point.name], failed, pruned) for point in points]
        finished = [result for result in self.results if result.status == "finished"]
        if finished and all(result.value is None for result in finished):
            known = {key for own in rows.values() for row in own for key in row} - {"step"}
            raise ConfigError([unknown_metric(self.metric, known, "finished points are not run again")])
        self.groups = self._grouped(points)

    def _result(
        self, point: SweepPoint, rows: Sequence[Mapping[str, float]], failed: Mapping[str, str], pruned: frozenset[str]
    ) -> PointResult:
        if point.name in pruned:
            status = "pruned"
        elif point.name in failed:
            status = "failed"
        else:
            status = "finished" if (self.folder / point.name / FINISHED).exists() else "unfinished"
        return PointResult(
            point.name,
            point.group,
            point.values,
            status,
            int(rows[-1]["step"]) if rows else 0,
            last_value(rows, self.metric),
            sum(row["time/step"] for row in rows if math.isfinite(row.get("time/step", math.nan))),
            failed.get(point.name, ""),
        )

    def _grouped(self, points: Sequence[SweepPoint]) -> list[SeedGroup]:
        """Returns the groups, the best first, those without a value last."""
        groups = []
        for name, label in {point.group: point.label for point in points}.items():
            own = [result for result in self.results if result.group == name]
            values = [result.value for result in own if result.status == "finished" and result.value is not None]
            group = SeedGroup(name, label, len(values), len(own))
            if values:
                deviation = stdev(values) if len(values) > 1 else None
                group = replace(group, mean=mean(values), std=deviation, lowest=min(values), highest=max(values))
            groups.append(group)
        sign = -1.0 if self.direction == "maximize" else 1.0
        groups.sort(key=lambda group: math.inf if group.mean is None else sign * group.mean)
        best = groups[0].mean if len(groups) > 1 else None
        return [replace(group, best=best is not None and group.mean == best) for group in groups]

    def write(self) -> None:
        """Writes summary.json and summary.csv."""
        content = {
            "metric": self.metric,
            "direction": self.direction,
            "groups": [asdict(group) for group in self.groups],
            "points": [asdict(result) for result in self.results],
        }
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (self.folder / "summary.json").write_text(f"{text}\n", encoding="utf-8")
        keys = list(dict.fromkeys(key for result in self.results for key in result.values))
        with (self.folder / "summary.csv").open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(["point", "group", *keys, "status", "step", self.metric, "seconds"])
            for result in self.results:
                values = [result.values.get(key, "") for key in keys]
                number_of = "" if result.value is None else result.value
                row = [result.status, result.step, number_of, round(result.seconds, 1)]
                writer.writerow([result.point, result.group, *values, *row])

    def draw(self) -> str:
        """Writes curves.png with the best groups; returns the line that says so."""
        if find_spec("matplotlib") is None:
            return "curves.png needs matplotlib: pip install 'rl-platform[plot]'; the same command then draws it"
        best = [group for group in self.groups if group.n][:DRAWN]
        if not best:
            return ""
        members = {
            group.name or group.label: {
                run: read_metrics(run)
                for result in self.results
                if result.group == group.name and result.value is not None and result.status == "finished"
                for run in [self.folder / result.point]
            }
            for group in best
        }
        title = f"the {len(best)} best of {len(self.groups)}" if len(best) < len(self.groups) else ""
        path = self.folder / "curves.png"
        draw_groups(members, path, [self.metric], title=title, band="std")
        return str(path)

    def print(self, console: Console) -> None:
        """Prints a table of the groups: with lines and colours on a terminal, else as aligned text."""
        order = f"{DIRECTIONS[self.direction]} first"
        head = [f"group ({order})", "n", f"{self.metric}, mean", "std", "lowest", "highest", ""]
        rows = [
            [
                group.label,
                str(group.n) if group.n == group.points else f"{group.n} of {group.points}",
                *(_cell(value) for value in (group.mean, group.std, group.lowest, group.highest)),
                "best" if group.best else "",
            ]
            for group in self.groups
        ]
        if console.is_terminal:
            table = Table(header_style="bold", border_style="dim")
            for index, name in enumerate(head):
                table.add_column(Text(name), justify="left" if index in (0, 6) else "right", overflow="fold")
            for group, row in zip(self.groups, rows, strict=True):
                table.add_row(*map(Text, row), style="green" if group.best else "")
            console.print(table)
            return
        print(*aligned([head, *rows], left=(0, 6)), sep="\n")


def last_value(rows: Sequence[Mapping[str, float]], metric: str) -> float | None:
    """Returns the last finite value of a metric."""
    values = (row.get(metric, math.nan) for row in reversed(rows))
    return next((value for value in values if math.isfinite(value)), None)


def steps_of(run: Path) -> list[dict[str, float]]:
    """Returns the metrics of a point's steps so far."""
    try:
        return read_metrics(run)
    except DataError:  # it ended before its first step
        return []


def _metric(folder: Path, rows: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    name = next((name for name, own in rows.items() if own), next(iter(rows)))
    present = {key for own in rows.values() for row in own for key in row}
    headline = headline_of_run(folder / name, present)
    return headline.validation if headline.validation in present else headline.objective


def _cell(value: float | None) -> str:
    return "–" if value is None else number(value)
