"""Writes the report: the data of the runs as JSON inside one HTML file, which draws itself.

Texts of models and names of runs never become markup. The JSON holds no `<`, and the script of the page makes text
nodes of every text. A content security policy allows that script alone and no network.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from importlib.resources import files
from itertools import accumulate
from pathlib import Path
from statistics import fmean

from rl_platform.config.differences import flat
from rl_platform.launch.tools.plot import AXES
from rl_platform.launch.tools.report.collect import LoggedConversation, ReportedRun
from rl_platform.launch.tools.report.definitions import definition_of, definitions
from rl_platform.launch.tools.report.verdict import judge, progress
from rl_platform.launch.tools.report.verdict_rules import FEW_STEPS
from rl_platform.launch.tools.self_contained import filled
from rl_platform.launch.written import writing

ENDINGS = (".html", ".htm")
POINTS = 400  # of a curve; longer ones are drawn as means over windows of steps
OPEN_GROUPS = 2  # groups of curves that are unfolded at first
OTHERS = "Other metrics"
NAMES = ("runner.output_dir", "runner.experiment_name")  # differ in any two runs

Tree = dict[str, object]


def page(runs: Sequence[ReportedRun], follow: int = 0) -> str:
    """Returns the report as HTML. follow: seconds after which the page reads the file again; 0: never."""
    template = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    return filled(template, _plain(_data(runs, follow)))


def write(runs: Sequence[ReportedRun], path: Path, follow: int = 0) -> None:
    """Writes the report as a whole or not at all; errors as of `writing`."""
    text = page(runs, follow)
    with writing(path, ENDINGS) as stage:
        stage.write_text(text, encoding="utf-8")


def _data(runs: Sequence[ReportedRun], follow: int) -> Tree:
    names = sorted({name for run in runs for row in run.facts.rows for name in row} - {"step"})
    curves = {name: [_curve(run, name) for run in runs] for name in names}
    curves = {name: own for name, own in curves.items() if any(own)}
    headlines = [run.facts.headline for run in runs]
    wanted = (name for one in headlines for name in (one.validation, one.objective, *one.rates.values()))
    parts = {name for run in runs for each in run.conversations for name in each.sample if name.startswith("reward/")}
    axes = [name for name in AXES if name == "step" or any(_positions(run, name) for run in runs)]
    return {
        "written": datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        "follow": follow,
        "runs": [_run(run, index) for index, run in enumerate(runs)],
        "headline": [name for name in dict.fromkeys(wanted) if name in curves],
        "curves": curves,
        "window": max((_window(run) for run in runs), default=1),
        "axes": [[name, AXES[name][1]] for name in axes],
        "groups": _groups(curves),
        "open_groups": OPEN_GROUPS,
        "definitions": {
            name: {"means": known.means, "unit": known.unit, "good": known.good, "source": known.source}
            for name in [*curves, *parts]
            if (known := definition_of(name)) is not None
        },
        "differences": _differences([run.facts.config for run in runs]),
    }


def _run(run: ReportedRun, index: int) -> Tree:
    facts = run.facts
    rows = [row for row in facts.rows if row["step"] > 0]
    seconds = [row["time/step"] for row in rows if math.isfinite(row.get("time/step", math.nan))]
    return {
        "index": index,
        "name": run.name,
        "title": str(facts.key("runner.experiment_name") or run.name),
        "folder": str(run.folder),
        "state": run.state,
        "task": run.task,
        "step": int(facts.rows[-1]["step"]) if facts.rows else 0,
        "max_steps": facts.key("runner.max_steps"),
        "seconds": fmean(seconds[1:] or seconds) if seconds else None,
        "progress": progress(facts),
        "enough": len(rows) >= FEW_STEPS,
        "answers": [
            {"question": each.question, "finding": each.finding and vars(each.finding), "missing": each.missing}
            for each in judge(facts)
        ],
        "axes": {name: _positions(run, name) for name in AXES if name != "step"},
        "card": run.card,
        "config": {key: json.dumps(value) for key, value in flat(dict(facts.config)).items()},
        "placement": run.placement and f"data:image/svg+xml;base64,{base64.b64encode(run.placement.encode()).decode()}",
        "busy": [vars(each) for each in facts.busy],
        "timeline": run.timeline
        and {
            "lanes": {
                lane: [[event["name"], event["cat"], round(event["ts"]), round(event["dur"])] for event in events]
                for lane, events in run.timeline.lanes.items()
            },
            "begin": run.timeline.begin,
            "end": run.timeline.end,
            "dropped": run.timeline.dropped,
        },
        "phases": _times(rows, of_components=False),
        "methods": _times(rows, of_components=True),
        "conversations": [_conversation(each, number) for number, each in enumerate(run.conversations)],
        "episodes": run.episodes,
        "videos": [vars(video) for video in run.videos],
        "lacks": run.lacks,
    }


def _conversation(each: LoggedConversation, number: int) -> Tree:
    sample, parts = each.sample, {name: part for name, part in each.sample.items() if name.startswith("reward/")}
    tokens = [{key: value for key, value in line.items() if key not in ("step", "sample")} for line in each.tokens]
    own = {key: value for key, value in sample.items() if key not in parts}
    return own | {
        "number": number,
        "parts": {name.removeprefix("reward/"): part for name, part in parts.items()},
        "tokens": tokens,
    }


def _window(run: ReportedRun) -> int:
    return math.ceil(len(run.facts.rows) / POINTS)


def _curve(run: ReportedRun, name: str) -> Tree | None:
    """Returns steps and values of a metric, in a long run the means of windows, each at its last step."""
    series = run.facts.series(name)
    if not series:
        return None
    width = math.ceil(len(series) / POINTS)
    windows = [series[at : at + width] for at in range(0, len(series), width)]
    values = [value for _, value in series]
    return {
        "s": [window[-1][0] for window in windows],
        "y": [float(f"{fmean(value for _, value in window):.5g}") for window in windows],
        "last": values[-1],
        "best": max(values),
    }


def _positions(run: ReportedRun, axis: str) -> dict[int, float]:
    """Returns where the steps lie on an axis; empty if the run does not report what it sums up."""
    summed = AXES[axis][0]
    if not any(summed in row for row in run.facts.rows):
        return {}
    scale = 60.0 if axis == "minutes" else 1.0
    amounts = (row.get(summed, math.nan) / scale for row in run.facts.rows)
    sums = accumulate(amount if math.isfinite(amount) else 0.0 for amount in amounts)
    return {int(row["step"]): float(f"{at:.6g}") for row, at in zip(run.facts.rows, sums, strict=True)}


def _groups(names: Iterable[str]) -> list[tuple[str, list[str]]]:
    """Returns the metrics by the group of their definition, in the order of the definitions."""
    order = {each.name: place for place, each in enumerate(definitions())}
    groups: dict[str, list[tuple[int, str]]] = {
        group: [] for group in (*(each.group for each in definitions()), OTHERS)
    }
    for name in names:
        known = definition_of(name)
        groups[known.group if known else OTHERS].append((order[known.name] if known else 0, name))
    return [(group, [name for _, name in sorted(members)]) for group, members in groups.items() if members]


def _times(rows: Sequence[Mapping[str, float]], of_components: bool) -> list[Tree]:
    """Returns mean seconds of phases, or of methods of components, and their share of a step, the longest first."""
    rows = rows[1:] or rows  # the first step loads and compiles
    total = sum(row.get("time/step", 0.0) for row in rows)
    if not total:
        return []
    sums: dict[str, float] = {}
    for row in rows:
        for name, value in row.items():
            if re.match(r"time/(?!step$)", name) and ("." in name) == of_components and math.isfinite(value):
                sums[name.removeprefix("time/")] = sums.get(name.removeprefix("time/"), 0.0) + value
    ordered = sorted(sums.items(), key=lambda item: -item[1])
    return [{"name": name, "seconds": value / len(rows), "share": value / total} for name, value in ordered]


def _differences(configs: Sequence[Mapping[str, object]]) -> list[list[str]]:
    """Returns key and value in each config of the keys in which configs differ."""
    values = [flat(dict(config)) for config in configs]
    keys = dict.fromkeys(key for own in values for key in own if key not in NAMES)
    shown = ([key, *(json.dumps(own[key]) if key in own else "–" for own in values)] for key in keys)
    return [row for row in shown if len({*row[1:]}) > 1]


def _plain(value: object) -> object:
    """Returns the value with null for numbers that are not finite, which JSON cannot represent."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return value
