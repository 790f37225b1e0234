"""The page of `--plan=html`: devices, memory and one step in time, with sliders, and a step of an earlier run.

The plan of every position of the sliders is computed beforehand; the page draws the chosen one.
"""

from __future__ import annotations

import base64
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.resources import files
from pathlib import Path

from rl_platform.config.schema import Config
from rl_platform.errors import DataError
from rl_platform.launch.placed_config import PlacedConfig, load
from rl_platform.launch.plans.plan_basis import basis_of
from rl_platform.launch.tools.self_contained import filled
from rl_platform.launch.tools.timeline import read_lanes, shown
from rl_platform.planner.basis import Basis
from rl_platform.planner.calibration import read_measured, stored_basis
from rl_platform.planner.report import DeviceUse, Report, names_of, plan_report
from rl_platform.planner.svg import COLOURS, report_svg
from rl_platform.planner.what_if import Point, points, sliders, stretched

Tree = dict[str, object]


def plan_page(config: str, overrides: Sequence[str], planned: PlacedConfig, calibrate: str | None) -> str:
    """Returns the page as HTML.

    config, overrides: of the command line that gave `planned`. calibrate: folder of an earlier run or its
    metrics.jsonl. Raises ConfigError as `basis_of` does.
    """
    loaded, _, inventory = planned
    basis, source = basis_of(loaded.config, inventory, calibrate)

    def plan(changes: Sequence[str]) -> Report:
        other, placement, machines = load(config, [*overrides, *changes])
        known = stored_basis(other.config, machines) if calibrate is None else _for(other.config, basis, loaded.config)
        return plan_report(other.config, placement, machines, known)

    chosen = sliders(loaded.config, inventory)
    planned_points = points(chosen, plan)
    own = tuple(slider.own for slider in chosen)
    report = planned_points[own].report
    assert report is not None, planned_points[own].refusal
    pictures: dict[str, int] = {}  # picture -> its number
    data: Tree = {
        "title": loaded.config.runner.experiment_name,
        "command": shlex.join(["platform-launch", "--plan", config, *overrides]),
        "sliders": [{"name": each.name, "values": [choice.value for choice in each.choices]} for each in chosen],
        "own": list(own),
        "points": {",".join(map(str, indices)): _point(point, pictures) for indices, point in planned_points.items()},
        "pictures": list(pictures),
        "colours": COLOURS,
        "rates": report.source,
        "lengths": str(report.lengths) if loaded.config.runner.task_type == "reasoning" else "",
        "measured": None if calibrate is None else _measured(Path(calibrate), basis, source),
    }
    return filled(files(__package__).joinpath("plan_page.html").read_text(encoding="utf-8"), data)


def _for(config: Config, basis: Basis, measured: Config) -> Basis:
    """Returns the basis of an earlier run for a config with another longest response."""
    if basis.lengths is None or config.runner.task_type == "embodied":
        return basis
    longest, former = config.data.max_response_length, measured.data.max_response_length
    return replace(basis, lengths=stretched(basis.lengths, longest, former))


def _point(point: Point, pictures: dict[str, int]) -> Tree:
    """Returns the values that the page draws; adds the picture of the placement to `pictures`."""
    changes, report = shlex.join(point.overrides), point.report
    if report is None:
        return {"changes": changes, "refusal": point.refusal}
    return {
        "changes": changes,
        "seconds": report.seconds,
        "mean": report.mean_seconds,
        "spans": [
            [span.component, span.phase, span.start, span.stop, span.note or span.bound] for span in report.spans
        ],
        "other": [[work.name, work.seconds, work.steps] for work in report.other_work],
        "memory": list(_memory(report)),
        "picture": pictures.setdefault(_picture(report), len(pictures)),
        "warnings": list(report.warnings),
    }


def _memory(report: Report) -> Iterator[Tree]:
    """Yields the memory of devices that are used alike, once for each kind."""
    alike: dict[object, list[DeviceUse]] = {}
    for use in report.devices:
        alike.setdefault((use.number is None, id(use.usage), tuple(use.ranks)), []).append(use)
    for uses in alike.values():
        usage = uses[0].usage
        yield {
            "devices": names_of(uses, report.inventory),
            "peak": usage.peak,
            "capacity": report.capacity(uses[0]),
            "parts": {name: memory.total for name, memory in usage.components.items()},
        }


def _picture(report: Report) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(report_svg(report, step=False).encode()).decode()}"


def _measured(run: Path, basis: Basis, source: str) -> Tree:
    """Returns the phases of the last recorded step of a run, and its seconds beside the uncorrected prediction."""
    measured = read_measured(run)
    rows = [
        [phase, measured.seconds[phase] / correction.factor, measured.seconds[phase]]
        for phase, correction in basis.corrections.items()
        if phase in measured.seconds  # not the runner's own work, which has no timing
    ]
    try:
        lanes = read_lanes(measured.file.parent)
        begin, end = shown(lanes, 1)
    except DataError as error:
        return {"source": source, "rows": rows, "spans": [], "lacks": str(error)}
    phases = [event for event in lanes["runner"] if event["cat"] == "phase" and begin <= event["ts"] < end]
    spans = [[e["name"], (e["ts"] - begin) / 1e6, (e["ts"] + e["dur"] - begin) / 1e6] for e in phases]
    return {"source": source, "rows": rows, "spans": spans, "lacks": ""}
