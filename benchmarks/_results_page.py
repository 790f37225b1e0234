"""A results page: curves, table and notes of the runs of one config. Written by `results.py`, which makes the runs."""

from __future__ import annotations

import csv
import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from _peer import ZOO_SOURCE

from rl_platform.config import LoadedConfig
from rl_platform.launch.tools.plot import Curve, median_curve, read_curve
from rl_platform.launch.views.headline import number

OURS, PEER = "rl-platform", "Stable-Baselines3"
RETURN_ASKED = {"HalfCheetah-v5": 3000.0, "Hopper-v5": 2000.0}  # of a page that says how long it takes to get there
COLUMNS = ("episode/return", "val/return", "env/success_once", "val/success_once", "val/success_at_end", "val/length")
MACHINE = re.compile(r"^\* (.+, \d+ cores, Python .+) \((.+)\)$", re.MULTILINE)  # a note of a page
TASK = re.compile(r"val/.+/success_once")  # of one task of several
PANELS = (("val/return", "env_steps"), ("val/return", "minutes"), ("val/success_once", "env_steps"))
CLEANRL_SOURCE = "https://docs.cleanrl.dev/rl-algorithms/ppo/"
# ppo_continuous_action.py, tag pr-424: mean and deviation of training episodes over 3 seeds of 1 M steps. Not of Ant
CLEANRL = {
    "HalfCheetah-v5": ("HalfCheetah-v4", 1442.64, 46.03),
    "Hopper-v5": ("Hopper-v4", 2382.86, 271.74),
    "Walker2d-v5": ("Walker2d-v4", 2287.95, 571.78),
}


@dataclass(frozen=True)
class Run:
    """A finished run. `made`: machine, versions and date, as the page shows them."""

    who: str
    seed: int
    rows: list[dict[str, float]]
    made: str

    @property
    def env_steps(self) -> int:
        return int(sum(row.get("perf/env_steps", 0) for row in self.rows))

    @property
    def seconds(self) -> float:
        """Of training, without evaluation."""
        return sum(trained_in(row) for row in self.rows)

    def curve(self, metric: str, x: str = "env_steps") -> Curve:
        """`x`: "env_steps", or "minutes" of training."""
        training = [{**row, "time/step": trained_in(row)} for row in self.rows]
        return read_curve(training, metric, x)

    def minutes_to(self, wanted: float) -> float:
        """Of training until an evaluation reached this return, linear between evaluations; NaN if none did."""
        curve = self.curve("val/return", "minutes")
        for (x0, y0), (x1, y1) in pairwise([(0.0, -math.inf), *curve]):
            if y1 >= wanted:
                return x0 + (x1 - x0) * (wanted - y0) / (y1 - y0) if math.isfinite(y0) else x1
        return math.nan

    def last(self, metric: str) -> float:
        """NaN if it was never reported."""
        return next((row[metric] for row in reversed(self.rows) if metric in row), math.nan)


def trained_in(row: Mapping[str, float]) -> float:
    """Seconds of this step, without its evaluation; 0 for the evaluation before the first step."""
    return row.get("time/step", 0.0) - row.get("time/validate", 0.0) if row["step"] > 0 else 0.0


def write_csv(path: Path, runs: Sequence[Run]) -> None:
    """One line per PPO step of each run; what was not measured in it is empty."""
    found = dict.fromkeys(name for run in runs for row in run.rows for name in row)
    present = [*(name for name in COLUMNS if name in found), *filter(TASK.fullmatch, found)]
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["who", "seed", "step", "env_steps", "seconds", *present])
        for run in runs:
            steps, seconds = 0.0, 0.0
            for row in run.rows:
                steps += row.get("perf/env_steps", 0.0)
                seconds += trained_in(row)
                values = (row.get(name, math.nan) for name in present)
                cells = ("" if math.isnan(value) else f"{value:.6g}" for value in values)
                writer.writerow([run.who, run.seed, int(row["step"]), int(steps), f"{seconds:.2f}", *cells])


def read_csv(page: Path) -> list[Run]:
    """Returns the runs of an earlier page from its CSV file; none if there is no page."""
    if not page.exists():
        return []
    by_run: dict[tuple[str, int], list[dict[str, float]]] = {}
    with open(page.with_suffix(".csv"), newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            row = {name: float(value) for name, value in line.items() if name != "who" and value}
            by_run.setdefault((line["who"], int(line["seed"])), []).append(row)
    made = _read_machines(page.read_text(encoding="utf-8"))
    return [Run(*key, list(_by_step(rows)), made[key]) for key, rows in by_run.items()]


def _by_step(rows: Sequence[dict[str, float]]) -> Iterator[dict[str, float]]:
    """Yields the rows of a run as its metrics have them: its file sums environment steps and seconds."""
    steps, seconds = 0.0, 0.0
    for row in rows:
        sums = {"perf/env_steps": row.pop("env_steps") - steps, "time/step": row.pop("seconds") - seconds}
        steps, seconds = steps + sums["perf/env_steps"], seconds + sums["time/step"]
        del row["seed"]
        yield {**row, **sums}


def draw(path: Path, title: str, runs: Sequence[Run], published: tuple[str, float, float] | None) -> None:
    """Evaluation returns over environment steps and minutes, success rates where there are any: seeds thin, medians
    thick."""
    from matplotlib.figure import Figure

    panels = [(metric, x) for metric, x in PANELS if any(run.curve(metric) for run in runs)]
    figure = Figure(figsize=(5.5 * len(panels), 3.6), layout="constrained")
    for axes, (metric, x) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for who, color in ((OURS, "tab:blue"), (PEER, "tab:orange")):
            curves = [curve for run in runs if run.who == who and (curve := run.curve(metric, x))]
            for curve in curves:
                axes.plot(*zip(*curve, strict=True), color=color, linewidth=1, alpha=0.35)
            if curves and (middle := median_curve(curves)):
                axes.plot(*zip(*middle, strict=True), color=color, linewidth=2, label=f"{who}, median of {len(curves)}")
        if published is not None and (metric, x) == PANELS[0]:
            axes.axhline(published[1], color="gray", linestyle=":", label=f"CleanRL after 1 M steps, {published[0]}")
        axes.set(title=f"{title}: {metric}", xlabel="environment steps" if x == "env_steps" else "minutes of training")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize="small")
    figure.savefig(path, dpi=150)


def page(name: str, loaded: LoadedConfig, runs: Sequence[Run], command: str) -> str:
    """The Markdown page of a config."""
    config = loaded.config
    published = CLEANRL.get(config.env.id)
    rated = any(not math.isnan(run.last("val/success_once")) for run in runs)
    lines = [
        f"# {name}: {config.env.id}",
        "",
        f"![Learning curves]({name}.png)",
        "",
        f"Mean return of {config.env.evaluation.episodes} evaluation episodes after the last step. All points: "
        f"[{name}.csv]({name}.csv).",
        "",
        "| who | seeds | environment steps | final return: mean ± deviation over seeds | minutes of training | "
        "steps/s |" + " success at any step |" * rated,
        "|---|---|---|---|---|---|" + "---|" * rated,
        *(_summary(who, [run for run in runs if run.who == who], rated) for who in (OURS, PEER)),
    ]
    if published is not None:
        task, mean, deviation = published
        lines.append(
            f"| CleanRL, published ({task}) | 3 | 1,000,000 | {mean:,.0f} ± {deviation:,.0f} | | |" + " |" * rated
        )
    lines += ["", *_by_seed(runs, RETURN_ASKED.get(config.env.id))]
    notes = [f"Made with `{command}`.", *_machines(runs)]
    if any(run.who == PEER for run in runs):
        notes.append(f"{PEER}: hyperparameters of the [zoo]({ZOO_SOURCE}).")
    if published is not None:
        notes.append(f"CleanRL: returns of training episodes, from [its documentation]({CLEANRL_SOURCE}).")
    return "\n".join([line for line in lines if line is not None] + ["", *(f"* {note}" for note in notes), ""])


def _summary(who: str, runs: Sequence[Run], rated: bool) -> str | None:
    if not runs:
        return None
    finals = [run.last("val/return") for run in runs]
    deviation = statistics.stdev(finals) if len(finals) > 1 else math.nan
    rates = [rate for run in runs if not math.isnan(rate := run.last("val/success_once"))]
    success = f"{100 * statistics.mean(rates):.0f} %" if rates else "not defined"
    speed = statistics.median(run.env_steps / run.seconds for run in runs)
    cells = [
        who,
        str(len(runs)),
        f"{statistics.median(run.env_steps for run in runs):,.0f}",
        f"{number(statistics.mean(finals))} ± {number(deviation)}",
        f"{statistics.mean(run.seconds for run in runs) / 60:.1f}",
        f"{speed:,.0f}",
        *([success] if rated else []),
    ]
    return f"| {' | '.join(cells)} |"


def _by_seed(runs: Sequence[Run], wanted: float | None) -> list[str]:
    """Every run, and how long the medians of both sides took to the return that was wanted."""
    heading = "" if wanted is None else f" minutes to a return of {wanted:,.0f} |"
    lines = [f"| who | seed | final return | minutes |{heading}", "|---|---|---|---|" + ("---|" if heading else "")]
    reached: dict[str, list[float]] = {}
    for run in runs:
        line = f"| {run.who} | {run.seed} | {number(run.last('val/return'))} | {run.seconds / 60:.1f} |"
        if wanted is not None:
            minutes = run.minutes_to(wanted)
            reached.setdefault(run.who, []).append(math.inf if math.isnan(minutes) else minutes)
            line += " not reached |" if math.isnan(minutes) else f" {minutes:.2f} |"
        lines.append(line)
    if wanted is not None and PEER in reached:
        ours, peer = (statistics.median(reached[who]) for who in (OURS, PEER))
        if math.isfinite(ours):
            beside = f"{100 * ours / peer:.0f} % of {PEER}'s {peer:.2f}" if math.isfinite(peer) else f"{PEER}'s: never"
            lines += ["", f"Median time to a return of {wanted:,.0f}: {ours:.2f} minutes, {beside}."]
    return lines


def where(made: Mapping[str, Any]) -> str:
    """Returns machine, versions and date of a run as a page shows them."""
    versions = ", ".join(f"{package} {version}" for package, version in made["versions"].items())
    return f"{made['cpu']}, {made['cores']} cores, Python {made['python']}, {versions}, {made['date']}"


def _machines(runs: Sequence[Run]) -> list[str]:
    """Where and with what, once for all runs that agree."""
    found: dict[str, dict[str, list[str]]] = {}
    for run in runs:
        found.setdefault(run.made, {}).setdefault(run.who, []).append(str(run.seed))
    of = {made: "; ".join(f"{who} {', '.join(seeds)}" for who, seeds in by.items()) for made, by in found.items()}
    return [f"{made} ({runs_there})" for made, runs_there in of.items()]


def _read_machines(text: str) -> dict[tuple[str, int], str]:
    """Returns where each run of a page was made: the inverse of `_machines`."""
    found = {}
    for made, runs_there in MACHINE.findall(text):
        for one in runs_there.split("; "):
            who, _, seeds = one.partition(" ")
            found |= {(who, int(seed)): made for seed in seeds.split(", ")}
    return found
