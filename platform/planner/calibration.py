"""Corrects the cost model by the seconds of an earlier run's phases, from its metrics.jsonl.

The prediction to compare with is that of the run's own config. Corrections hold for the same kind of device.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rl_platform.disk import read_regular
from rl_platform.errors import ConfigError, Problem
from rl_platform.placement.hardware import Device
from rl_platform.planner.cost import Correction
from rl_platform.planner.report import Report

OPTION = "--calibrate"


@dataclass(frozen=True)
class Measured:
    """Median seconds of each phase over `steps` steps of the run in `file`."""

    file: Path
    steps: int
    seconds: Mapping[str, float]


def read_measured(file: Path) -> Measured:
    """Returns the phases of a metrics.jsonl, without the first step (warm-up) if there are others.

    Raises ConfigError for a file without timings.
    """
    try:
        lines = [json.loads(line) for line in read_regular(file).decode().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError([Problem(OPTION, f"cannot be read: {error}", value=str(file))]) from error
    steps = [line for line in lines if _is_step(line)]
    if not steps:
        hint = "the metrics.jsonl of a run that made at least one step"
        raise ConfigError([Problem(OPTION, "contains no timings of a step", value=str(file), hint=hint)])
    steps = steps[1:] or steps
    names = {name.removeprefix("time/") for step in steps for name in step if name.startswith("time/")}
    values = {
        name: [step[f"time/{name}"] for step in steps if isinstance(step.get(f"time/{name}"), int | float)]
        for name in sorted(names)
    }
    return Measured(file, len(steps), {name: statistics.median(seconds) for name, seconds in values.items() if seconds})


def _is_step(line: object) -> bool:
    if not isinstance(line, dict) or "time/step" not in line:
        return False
    return isinstance(step := line.get("step"), int | float) and step > 0


def corrections(measured: Measured, earlier: Report, device: Device) -> dict[str, Correction]:
    """Returns corrections by phase for a plan on `device`. `earlier`: the uncorrected report on the run's config."""
    if earlier.device.kind != device.kind:
        message = f"the run was timed on {earlier.device.kind}, the plan is for {device.kind}"
        hint = "a run on the same kind of device, or no calibration"
        raise ConfigError([Problem(OPTION, message, value=str(measured.file), hint=hint)])
    factors = {
        span.phase: Correction(measured.seconds[span.phase] / span.seconds, span.bound)
        for span in earlier.spans
        if not span.note and measured.seconds.get(span.phase, 0.0) > 0 and span.seconds > 0
    }
    if not factors:
        raise ConfigError([Problem(OPTION, "none of its phases is one of a plan", value=str(measured.file))])
    return factors
