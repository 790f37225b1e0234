"""The timeline of a run: `python -m rl_platform.launch.tools.timeline RUN [-o docs/timeline.png] [--steps 2]`.

RUN is an output folder or its trace.json. One row per component rank and one for the phases of the runner; work is
coloured, waiting on a channel is pale. Of an embodied run it also says which shares of the time physics, inference and
optimizer steps took. Needs matplotlib (`pip install 'rl-platform[plot]'`). To zoom into single calls,
open trace.json in ui.perfetto.dev.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_platform.errors import ConfigError, DataError, PlatformError, Problem
from rl_platform.interrupts import handle_signals
from rl_platform.launch.tools.work_shares import told, work_shares
from rl_platform.standard_streams import never_fail

Event = dict[str, Any]
WAIT_COLOR, PHASE_COLOR = "#d0d4da", "#8a929e"
MOST_NAMED = 7  # methods with a colour of their own; C7 is grey
WIDE_ENOUGH = 0.06  # of the width, for a phase to carry its name


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0, 2 for a bad command line, 65 for a file that cannot be read."""
    parser = argparse.ArgumentParser(prog="python -m rl_platform.launch.tools.timeline", description="a run's timeline")
    parser.add_argument("run", type=Path, metavar="RUN", help="output folder or trace.json")
    parser.add_argument("-o", "--output", type=Path, default=Path("timeline.png"))
    parser.add_argument("--steps", type=int, default=2, help="steps shown, the last ones recorded")
    parser.add_argument("--title", default="")
    options = parser.parse_args(arguments)
    try:
        draw(options.run, options.output, options.steps, options.title)
        shares = told(work_shares(read_lanes(options.run)))
    except PlatformError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(options.output)
    if shares:
        print(shares)
    return 0


def draw(run: Path, output: Path, steps: int = 2, title: str = "") -> None:
    """Write the picture to `output`. Raises ConfigError without matplotlib, DataError for a file that is no trace."""
    if importlib.util.find_spec("matplotlib") is None:
        hint = "pip install 'rl-platform[plot]'"
        raise ConfigError([Problem("timeline", "matplotlib is not installed", hint=hint)])
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    lanes = read_lanes(run)
    begin, end = shown(lanes, steps)
    rows = {
        lane: [event for event in events if begin <= event["ts"] < end]
        for lane, events in lanes.items()
        if lane != "steps"
    }
    colors = _colors(rows)
    figure = Figure(figsize=(11, 1.2 + 0.42 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for row, events in enumerate(rows.values()):
        for kind in ("phase", "call", "wait"):  # waits lie over the calls they are part of
            bars = [event for event in events if event["cat"] == kind]
            spans = [((event["ts"] - begin) / 1e6, event["dur"] / 1e6) for event in bars]
            shade = {"phase": PHASE_COLOR, "wait": WAIT_COLOR}.get(kind)
            shades = [shade or colors.get(event["name"], "C7") for event in bars]
            edges = {"edgecolor": "white", "linewidth": 0.5} if kind == "phase" else {}
            axes.broken_barh(spans, (row - 0.38, 0.76), facecolors=shades, **edges)
            for event in bars if kind == "phase" else ():
                if event["dur"] > WIDE_ENOUGH * (end - begin):
                    middle = (event["ts"] + event["dur"] / 2 - begin) / 1e6
                    axes.text(middle, row, event["name"], ha="center", va="center", color="white", fontsize="small")
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlim(0, (end - begin) / 1e6)
    axes.set_xlabel("seconds")
    axes.spines[["top", "right"]].set_visible(False)
    legend = [Patch(color=color, label=name) for name, color in (colors | {"waits": WAIT_COLOR}).items()]
    axes.legend(handles=legend, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")
    axes.set_title(title)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=150)


def read_lanes(run: Path) -> dict[str, list[Event]]:
    """The spans of each lane in order of time; the runner first."""
    path = run / "trace.json" if run.is_dir() else run
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        lanes: dict[str, list[Event]] = {"runner": []}
        for event in events:
            if event["ph"] == "X":
                lanes.setdefault(names[event["pid"], event["tid"]], []).append(event)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; runs write it with runner.trace_steps above 0") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not the timeline of a run") from error
    return lanes


def shown(lanes: dict[str, list[Event]], steps: int) -> tuple[float, float]:
    """Begin and end, in microseconds, of the last `steps` steps."""
    found = lanes.get("steps", [])[-max(steps, 1) :]
    if not found:
        raise DataError("the timeline holds no finished step")
    return found[0]["ts"], found[-1]["ts"] + found[-1]["dur"]


def _colors(rows: dict[str, list[Event]]) -> dict[str, str]:
    """A colour per method, for those that took longest."""
    seconds: dict[str, float] = {}
    for events in rows.values():
        for event in events:
            if event["cat"] == "call":
                seconds[event["name"]] = seconds.get(event["name"], 0.0) + event["dur"]
    ranked = sorted(seconds, key=seconds.__getitem__, reverse=True)[:MOST_NAMED]
    return {name: f"C{index}" for index, name in enumerate(ranked)}


if __name__ == "__main__":
    handle_signals()
    never_fail()
    sys.exit(main())
