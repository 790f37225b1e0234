"""The timeline of a run, from its trace.json: a picture as PNG, and the shares of kinds of work in its time.

One row per component rank and one for the phases of the runner; work is coloured, waiting on a channel is pale. To zoom
into single calls, open trace.json in ui.perfetto.dev.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

from rl_platform.errors import DataError, check_all
from rl_platform.launch.tools.named_runs import check_runs
from rl_platform.launch.tools.plot import require_matplotlib
from rl_platform.launch.written import PICTURES, check_output, writing

TRACE = "trace.json"
REASON = "after the steps of runner.trace_steps, which must be above 0"
REST = "rest"
WAIT_COLOR, PHASE_COLOR = "#d0d4da", "#8a929e"
MOST_NAMED = 7  # methods with a colour of their own; C7 is grey
WIDE_ENOUGH = 0.06  # of the width, for a phase to carry its name

Span = tuple[float, float]
"""Begin and end."""


class TimelineEvent(TypedDict):
    """A span of trace.json. ts, dur: begin and length in microseconds; cat: step, phase, call, wait or work."""

    name: str
    cat: str
    ts: float
    dur: float


def draw(run: Path, output: Path, steps: int = 2, title: str = "") -> None:
    """Writes the picture to `output`. `run` is an output folder or its trace.json.

    Raises ConfigError without matplotlib, for a run without a trace and a file that cannot be written. DataError: a
    damaged trace.
    """
    check_all(
        partial(require_matplotlib, "timeline"), partial(check_traced, run), partial(check_output, output, PICTURES)
    )
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
            edges: dict[str, Any] = {"edgecolor": "white", "linewidth": 0.5} if kind == "phase" else {}
            axes.broken_barh(spans, (row - 0.38, 0.76), facecolors=shades, **edges)
            for event in bars if kind == "phase" else ():
                if event["dur"] > WIDE_ENOUGH * (end - begin):
                    middle = (event["ts"] + event["dur"] / 2 - begin) / 1e6
                    axes.text(
                        middle,
                        row,
                        event["name"],
                        ha="center",
                        va="center",
                        color=text_color(PHASE_COLOR),
                        fontsize="small",
                    )
    axes.set_yticks(range(len(rows)), rows)
    axes.invert_yaxis()
    axes.set_xlim(0, (end - begin) / 1e6)
    axes.set_xlabel("seconds")
    axes.spines[["top", "right"]].set_visible(False)
    legend = [Patch(color=color, label=name) for name, color in (colors | {"waits": WAIT_COLOR}).items()]
    axes.legend(handles=legend, frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize="small")
    axes.set_title(title)
    with writing(output, PICTURES) as stage:
        figure.savefig(stage, dpi=150)


def text_color(fill: str) -> str:
    """Returns black or white, whichever has the larger contrast on `fill`, a colour as #rrggbb (WCAG 2.1)."""
    shares = [int(fill[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [share / 12.92 if share <= 0.04045 else ((share + 0.055) / 1.055) ** 2.4 for share in shares]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    # contrast of two luminances: (lighter + 0.05) / (darker + 0.05)
    return "black" if (luminance + 0.05) / 0.05 > 1.05 / (luminance + 0.05) else "white"


def check_traced(run: Path) -> None:
    """Raises ConfigError for what is neither a run with a timeline nor a file of one."""
    check_runs([run], TRACE, f"a run writes it {REASON}")


def read_lanes(run: Path) -> dict[str, list[TimelineEvent]]:
    """Returns the spans of each lane in order of time, the runner first. Raises DataError for another file."""
    path = run / TRACE if run.is_dir() else run
    try:
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
        lanes: dict[str, list[TimelineEvent]] = {"runner": []}
        for event in events:
            if event["ph"] == "X":
                lanes.setdefault(names[event["pid"], event["tid"]], []).append(event)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; a run writes it {REASON}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path}: not the timeline of a run") from error
    return lanes


def shown(lanes: dict[str, list[TimelineEvent]], steps: int) -> tuple[float, float]:
    """Returns begin and end, in microseconds, of the last `steps` steps."""
    last = lanes.get("steps", [])[-max(steps, 1) :]
    if not last:
        raise DataError("the timeline holds no finished step")
    return last[0]["ts"], last[-1]["ts"] + last[-1]["dur"]


def measured_steps(lanes: Mapping[str, Sequence[TimelineEvent]]) -> list[TimelineEvent]:
    """Returns the recorded steps. The first one loads and compiles, so it is left out if there are others."""
    steps = [event for event in lanes.get("steps", ()) if event["name"] != "start"]
    return steps[1:] or steps


def _colors(rows: dict[str, list[TimelineEvent]]) -> dict[str, str]:
    """Returns colours for the methods that took longest."""
    seconds: dict[str, float] = {}
    for events in rows.values():
        for event in events:
            if event["cat"] == "call":
                seconds[event["name"]] = seconds.get(event["name"], 0.0) + event["dur"]
    ranked = sorted(seconds, key=seconds.__getitem__, reverse=True)[:MOST_NAMED]
    return {name: f"C{index}" for index, name in enumerate(ranked)}


def work_shares(lanes: Mapping[str, Sequence[TimelineEvent]]) -> dict[str, float]:
    """Returns the share of the recorded steps' wall-clock by kind of work, largest first, and `rest`.

    * physics: MuJoCo's steps and the starts of episodes for tasks that are computed here; whole steps of other
      environments, or the wait for their processes. Evaluations count.
    * inference: forwards of the policy, with drawing actions.
    * optimizer step: loss, gradient and update of a mini-batch.
    * rest: time without any of these (observations, rewards, normalisers, advantages, weights, logs, checkpoints).

    The steps are those of `measured_steps`. Work that overlaps counts once for each kind, so the shares may add up to
    more than 1. Empty for a run without physics.
    """
    steps = measured_steps(lanes)
    work = [event for events in lanes.values() for event in events if event["cat"] == "work"]
    if not steps or all(event["name"] != "physics" for event in work):
        return {}
    begin, end = steps[0]["ts"], steps[-1]["ts"] + steps[-1]["dur"]

    def share(events: Sequence[TimelineEvent]) -> float:
        clipped = [(max(event["ts"], begin), min(event["ts"] + event["dur"], end)) for event in events]
        return covered((first, last - first) for first, last in clipped if last > first) / (end - begin)

    kinds = {name: share([event for event in work if event["name"] == name]) for name in {e["name"] for e in work}}
    ordered = dict(sorted(kinds.items(), key=lambda kind: -kind[1]))
    return ordered | {REST: 1.0 - share(work)}


def as_text(shares: Mapping[str, float]) -> str:
    """Returns the shares as one line, empty if there are none."""
    if not shares:
        return ""
    kinds = ", ".join(f"{name} {share:.1%}" for name, share in shares.items() if name != REST)
    return f"share of the time: {kinds}; {REST} {shares[REST]:.1%}"


def covered(spans: Iterable[tuple[float, float]]) -> float:
    """Returns the time in which at least one of the spans (begin, length) was open, in their unit."""
    return total(union((begin, begin + length) for begin, length in spans))


def union(spans: Iterable[Span]) -> list[Span]:
    """Returns disjoint spans that cover the same time, in order."""
    joined: list[Span] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def total(spans: Iterable[Span]) -> float:
    """Returns the time of disjoint spans."""
    return sum(end - begin for begin, end in spans)
