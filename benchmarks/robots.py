"""The page of the robot tasks: start and end of training by suite, curves, steps/s beside the simulator alone.

    python benchmarks/results.py dm_walker metaworld_mt10 --seeds 1 2 3    # trains; writes docs/results/NAME.csv
    python benchmarks/env_python.py --json FILE --tasks ...                  # alone on the machine
    python benchmarks/robots.py --speeds FILE ...    # writes robots.md, robots.png and robots_speeds.csv beside them

Returns and success rates are those of the first and the last evaluation in the CSV files, speeds the medians of the
laps. Without `--speeds` those of robots_speeds.csv remain. Machine and date stand in the notes of the page.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from _common import write_page

from rl_platform.config import load_config
from rl_platform.launch.tools.plot import Curve, median_curve
from rl_platform.launch.views.headline import number

ROOT = Path(__file__).parents[1]
RESULTS, CONFIGS = ROOT / "docs" / "results", ROOT / "configs" / "embodied"
TASKS = {  # config: suite and task
    "dm_cartpole": "dm-control 1.0, cartpole swingup",
    "dm_walker": "dm-control 1.0, walker walk",
    "dm_cheetah": "dm-control 1.0, cheetah run",
    "dm_humanoid": "dm-control 1.0, humanoid stand",
    "dm_reach": "dm-control 1.0, manipulation reach_site_features",
    "metaworld_reach": "Meta-World 3.1, reach-v3",
    "metaworld_drawer": "Meta-World 3.1, drawer-open-v3",
    "metaworld_push": "Meta-World 3.1, push-v3",
    "metaworld_mt10": "Meta-World 3.1, MT10",
    "fetch_reach": "Gymnasium-Robotics 1.4, FetchReachDense-v4",
    "fetch_push": "Gymnasium-Robotics 1.4, FetchPushDense-v4",
    "adroit_pen": "Gymnasium-Robotics 1.4, AdroitHandPen-v1",
    "robosuite_lift": "robosuite 1.5, Lift",
    "robosuite_door": "robosuite 1.5, Door",
    "maniskill_push": "ManiSkill 3.0, PushCube",
    "maniskill_pick": "ManiSkill 3.0, PickCube",
    "maniskill_push_camera": "ManiSkill 3.0, PushCube from images",
}
SUCCESS, SUCCESS_AT_END, RETURN = "val/success_once", "val/success_at_end", "val/return"
TASK_SUCCESS = re.compile(r"val/(.+)/success_once")
HEAD = (
    "| config | task | seeds | evaluated episodes | environment steps | success at any step | at the end | return | "
    "minutes |",
    "|---|---|---|---|---|---|---|---|---|",
)
SPEEDS = (
    "simulator and task",
    "observation",
    "environments, processes",
    "steps/s alone",
    "steps/s with the platform",
    "ratio (least to most)",
    "CPU microseconds of a step alone",
    "with the platform",
)

Row = dict[str, float]


class Run(NamedTuple):
    """The rows of one seed that have an evaluation."""

    seed: int
    rows: list[Row]

    def of(self, metric: str) -> tuple[float, float]:
        """The first and the last value; NaN without one."""
        values = [row[metric] for row in self.rows if metric in row]
        return (values[0], values[-1]) if values else (math.nan, math.nan)

    def curve(self, metric: str) -> Curve:
        return [(row["env_steps"], row[metric]) for row in self.rows if metric in row]


def runs_of(path: Path) -> list[Run]:
    """The evaluations in a CSV file of `results.py`, by seed."""
    by_seed: dict[int, list[Row]] = {}
    with open(path, newline="", encoding="utf-8") as file:
        for line in csv.DictReader(file):
            row = {name: float(value) for name, value in line.items() if name != "who" and value}
            if RETURN in row:
                by_seed.setdefault(int(line["seed"]), []).append(row)
    return [Run(seed, rows) for seed, rows in by_seed.items()]


def span(runs: Sequence[Run], metric: str, form: str) -> str:
    """`start -> end` as means over the seeds; empty if it was not measured."""
    starts, ends = zip(*(run.of(metric) for run in runs), strict=True)
    if math.isnan(starts[0]):
        return ""
    of_seeds = f" ({', '.join(_formed(end, form) for end in ends)})" if len(ends) > 1 else ""
    unit = " %" if form == "share" else ""
    return f"{_formed(statistics.mean(starts), form)} -> {_formed(statistics.mean(ends), form)}{unit}{of_seeds}"


def _formed(value: float, form: str) -> str:
    return f"{100 * value:.0f}" if form == "share" else number(value)


def row(name: str, runs: Sequence[Run]) -> str:
    """A line of the table of results."""
    env = load_config(CONFIGS / f"{name}.yaml").config.env
    lengths = {each["val/length"] for run in runs for each in run.rows if "val/length" in each}
    length = int(lengths.pop()) if len(lengths) == 1 else 0  # those that end at success have no common one
    cells = [
        f"[{name}]({name}.md)",
        TASKS[name],
        ", ".join(str(run.seed) for run in runs),
        f"{env.evaluation.episodes}" + (f" of {length:,} steps" if length else ""),
        f"{statistics.median(run.rows[-1]['env_steps'] for run in runs):,.0f}",
        span(runs, SUCCESS, "share"),
        span(runs, SUCCESS_AT_END, "share"),
        span(runs, RETURN, "number"),
        f"{statistics.mean(run.rows[-1]['seconds'] for run in runs) / 60:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def by_task(runs: Sequence[Run]) -> list[str]:
    """The table of success by task of a run with several; no lines for other runs."""
    names = {match[1]: name for name in runs[0].rows[-1] if (match := TASK_SUCCESS.fullmatch(name))}
    if not names:
        return []
    lines = ["", "Success by task, start -> end:", "", "| task | success at any step |", "|---|---|"]
    return lines + [f"| {task} | {span(runs, name, 'share')} |" for task, name in names.items()]


def speeds(content: Mapping[str, Any]) -> list[list[str]]:
    """The rows of a result of `env_python.py --json`: a lap is [seconds, CPU seconds, numbers]."""
    rows, options = [], content["options"]
    for task, laps in content["laps"].items():
        rates, costs = {}, {}
        for who, each in laps.items():
            rates[who] = [numbers["steps"] / seconds for seconds, _, numbers in each]
            costs[who] = statistics.median(1e6 * numbers["cpu_seconds"] / numbers["steps"] for _, _, numbers in each)
        ratios = [ours / alone for ours, alone in zip(rates["rl_platform"], rates["alone"], strict=True)]
        cells = [
            task,
            content["observations"][task],
            f"{options['num_envs']}, {options['workers']}",
            f"{statistics.median(rates['alone']):,.0f}",
            f"{statistics.median(rates['rl_platform']):,.0f}",
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            f"{costs['alone']:,.0f}",
            f"{costs['rl_platform']:,.0f}",
        ]
        rows.append(cells)
    return rows


def draw(found: Mapping[str, Sequence[Run]], path: Path) -> None:
    """A panel for each config: success, or the return where it is rare; seeds thin, medians thick."""
    from matplotlib.figure import Figure

    columns = min(len(found), 4)
    lines = math.ceil(len(found) / columns)
    figure = Figure(figsize=(3.6 * columns, 2.8 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flat
    for (name, runs), axes in zip(found.items(), panels, strict=False):
        succeeds = any(rate > 0.1 for run in runs for _, rate in run.curve(SUCCESS))
        metric = SUCCESS if succeeds else RETURN
        curves = [run.curve(metric) for run in runs]
        for curve in curves:
            axes.plot(*zip(*curve, strict=True), color="tab:blue", linewidth=1, alpha=0.35)
        axes.plot(*zip(*median_curve(curves), strict=True), color="tab:blue", linewidth=2)
        axes.set(title=f"{name}: {metric}", xlabel="environment steps")
        if succeeds:
            axes.set_ylim(0, 1.03)
        axes.title.set_fontsize("small")
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    for axes in list(panels):
        axes.set_visible(False)
    figure.savefig(path, dpi=120)


def page(found: Mapping[str, Sequence[Run]], measured: Sequence[Sequence[str]]) -> str:
    """measured: the rows of the table of speeds, after the row of its head."""
    lines = [
        "# Robot tasks",
        "",
        "![Learning curves](robots.png)",
        "",
        "First -> last evaluation with the most likely actions: means over seeds, in parentheses the ends of the "
        "seeds. Minutes are those of training. The configs name the published protocol.",
        "",
        *HEAD,
        *(row(name, runs) for name, runs in found.items()),
        *(line for runs in found.values() for line in by_task(runs)),
    ]
    if measured:
        table = [f"| {' | '.join(cells)} |" for cells in measured]
        lines += [
            "",
            "## Steps per second beside the simulator alone",
            "",
            "Alone, as many processes step their environments in loops of their own. With the platform a step waits "
            "for all environments, checks their numbers and returns one array. The aim is a ratio of 0.9.",
            "",
            table[0],
            f"|{'---|' * len(measured[0])}",
            *table[1:],
        ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speeds", type=Path, nargs="*", default=[], help="files of env_python.py --json")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    found = {name: runs_of(RESULTS / f"{name}.csv") for name in TASKS if (RESULTS / f"{name}.csv").exists()}
    table = options.output / "robots_speeds.csv"
    if options.speeds:
        rows = [row for path in options.speeds for row in speeds(json.loads(path.read_text(encoding="utf-8")))]
        with open(table, "w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows([SPEEDS, *rows])
    measured = list(csv.reader(table.read_text(encoding="utf-8").splitlines())) if table.exists() else []
    draw(found, options.output / "robots.png")
    write_page(options.output / "robots.md", page(found, measured))
    print(options.output / "robots.md")


if __name__ == "__main__":
    main()
