"""The basis of a prediction: the measurement of this machine, and the lengths and seconds of an earlier run.

The seconds of a run correct the prediction for the run's own config. Corrections hold for the same kind of device.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rl_platform.config.schema import Config
from rl_platform.disk import read_regular
from rl_platform.errors import ConfigError, Problem
from rl_platform.placement.estimates.hardware import Device, device_of
from rl_platform.placement.inventory import Inventory
from rl_platform.placement.scheduler import Placement
from rl_platform.planner.basis import Basis, Correction
from rl_platform.planner.cost import ADVANTAGES
from rl_platform.planner.lengths import of_metrics
from rl_platform.planner.rates import measured_lengths, measured_rates, stored_machine
from rl_platform.planner.report import Report, plan_report
from rl_platform.run_files import METRICS

OPTION = "--calibrate"
OTHER_TIMINGS = {"validation": "validate", "checkpoint": "checkpoint"}  # work outside the phases -> its timing in a run


def stored_basis(config: Config, inventory: Inventory) -> Basis:
    """Returns the stored rates of this machine and lengths of the config's prompts; an empty basis without them."""
    device = device_of(inventory)
    machine = stored_machine(device, inventory)
    if machine is None:
        return Basis()
    node = inventory.nodes[0]
    share = 1 / max(1, node.num_accelerators) if node.emulated else 1.0
    return Basis(measured_lengths(machine, config), measured_rates(machine, device, config, share))


def run_basis(measured: Measured, config: Config, inventory: Inventory) -> Basis:
    """Returns the basis with the lengths of a run."""
    stored = stored_basis(config, inventory)
    other = {name: measured.seconds[name] for name in OTHER_TIMINGS.values() if name in measured.seconds}
    lengths = of_metrics(measured.metrics, config, f"of {measured.file}")
    return replace(stored, lengths=lengths, other_seconds=other)


@dataclass(frozen=True)
class Measured:
    """Medians over the steps of the run in `file`: seconds of each phase, and all metrics. rows: the steps' metrics."""

    file: Path
    rows: Sequence[Mapping[str, object]]
    seconds: Mapping[str, float]
    metrics: Mapping[str, float]

    def rest(self, phases: Iterable[str]) -> float:
        """Returns the median of the seconds of a step outside `phases`, validation and checkpoints.

        A slow phase of one step may lengthen the median step beyond the sum of the median phases, but not this median.
        """
        inside = [f"time/{name}" for name in (*phases, *OTHER_TIMINGS.values())]
        seconds = [{name: value for name, value in row.items() if isinstance(value, int | float)} for row in self.rows]
        return statistics.median(row["time/step"] - sum(row.get(name, 0.0) for name in inside) for row in seconds)


def read_measured(file: Path) -> Measured:
    """Returns the medians in a metrics.jsonl, or in that of a run's folder.

    The first step is a warm-up, so it is left out if there are others. Raises ConfigError for a file without timings.
    """
    file = file / METRICS if file.is_dir() else file
    try:
        lines = [json.loads(line) for line in read_regular(file).decode().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigError(
            [Problem(OPTION, f"cannot be read: {getattr(error, 'strerror', None) or error}", value=str(file))]
        ) from error
    steps = [line for line in lines if _is_step(line)]
    if not steps:
        hint = "the metrics.jsonl of a run that made at least one step"
        raise ConfigError([Problem(OPTION, "contains no timings of a step", value=str(file), hint=hint)])
    return measured_of(file, steps[1:] or steps)


def measured_of(file: Path, steps: Sequence[Mapping[str, object]]) -> Measured:
    """Returns the medians of the metrics of `steps`."""
    values: dict[str, list[float]] = {}
    for step in steps:
        for name, value in step.items():
            if isinstance(value, int | float) and math.isfinite(value):
                values.setdefault(name, []).append(value)
    medians = {name: statistics.median(each) for name, each in sorted(values.items())}
    seconds = {name.removeprefix("time/"): value for name, value in medians.items() if name.startswith("time/")}
    return Measured(file, steps, seconds, medians)


def _is_step(line: object) -> bool:
    if not isinstance(line, dict) or "time/step" not in line:
        return False
    return isinstance(step := line.get("step"), int | float) and step > 0


def corrected_basis(
    measured: Measured, ran: tuple[Config, Placement, Inventory], config: Config, inventory: Inventory
) -> Basis:
    """Returns the basis of plans for `config` on `inventory`, corrected by the run of the config and placement `ran`.

    Raises ConfigError as `corrections` does.
    """
    uncorrected = replace(run_basis(measured, ran[0], ran[2]), other_seconds={})
    factors = corrections(measured, plan_report(*ran, uncorrected), device_of(inventory))
    return replace(run_basis(measured, config, inventory), corrections=factors)


def corrections(measured: Measured, earlier: Report, device: Device) -> dict[str, Correction]:
    """Returns corrections by phase or other timing for a plan on `device`.

    `earlier`: the uncorrected report on the run's config.
    """
    if earlier.device.kind != device.kind:
        message = f"the run was timed on {earlier.device.kind}, the plan is for {device.kind}"
        hint = "a run on the same kind of device, or no calibration"
        raise ConfigError([Problem(OPTION, message, value=str(measured.file), hint=hint)])
    factors = {
        span.phase: Correction(measured.seconds[span.phase] / span.seconds, span.bound)
        for span in earlier.spans
        if not span.note and measured.seconds.get(span.phase, 0.0) > 0 and span.seconds > 0
    }
    phases = [span for span in earlier.spans if not span.note]
    if earlier.layout.one_process and "step" in measured.seconds:  # its phases follow one another
        rest = measured.rest(span.phase for span in phases)
        factors |= {
            span.phase: Correction(rest / span.seconds, span.bound)
            for span in phases
            if span.phase == ADVANTAGES and rest > 0
        }
    if not factors:
        raise ConfigError([Problem(OPTION, "none of its phases is one of a plan", value=str(measured.file))])
    for work in earlier.other_work:
        timing = OTHER_TIMINGS.get(work.name, "")
        if (seconds := measured.seconds.get(timing, 0.0)) > 0:
            factors[timing] = Correction(seconds / work.seconds, "")
    return factors
