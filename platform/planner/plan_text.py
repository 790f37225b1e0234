"""The output of `--plan`: the report as text, JSON or SVG; of `--plan=search` and `--plan=simulate`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from rl_platform.config import LoadedConfig
from rl_platform.config.schema import Config
from rl_platform.errors import ConfigError, Problem
from rl_platform.placement.inventory import Inventory
from rl_platform.placement.scheduler import Placement
from rl_platform.planner.basis import Basis
from rl_platform.planner.calibration import OPTION, corrected_basis, read_measured, stored_basis
from rl_platform.planner.candidates import Candidate
from rl_platform.planner.report import Report, plan_report
from rl_platform.planner.report_json import report_json
from rl_platform.planner.report_text import report_text
from rl_platform.planner.search import search
from rl_platform.planner.search_text import search_text
from rl_platform.planner.simulation_text import simulation_text
from rl_platform.planner.svg import report_svg

Planned = tuple[LoadedConfig, Placement, Inventory]
Load = Callable[[str, Sequence[str]], Planned]

_DRAW = {"text": report_text, "json": report_json, "svg": report_svg}


def plan_text(form: str, planned: Planned, calibrate: str | None, load: Load) -> str:
    """Returns the text of a form: text, json or svg.

    `calibrate` is the folder of an earlier run, or its metrics.jsonl; `load` reads that run's config. Raises
    ConfigError if the file cannot be read or was measured on another kind of device.
    """
    loaded, placement, inventory = planned
    basis, _ = basis_of(loaded.config, inventory, calibrate, load)
    return _DRAW[form](plan_report(loaded.config, placement, inventory, basis))


def plan_search(
    planned: Planned, calibrate: str | None, load: Load, check: Callable[[Candidate], object]
) -> tuple[str, Candidate]:
    """Returns the text of a search and its best candidate.

    `check` raises ConfigError for a candidate that cannot run; such a candidate is left out. Raises ConfigError as
    `plan_text` and `search` do, and that of `check` if no candidate is left.
    """
    loaded, placement, inventory = planned
    basis, source = basis_of(loaded.config, inventory, calibrate, load)
    report = plan_report(loaded.config, placement, inventory, basis)
    present = report.overlap.seconds if report.overlap else report.seconds
    result = search(loaded.config, inventory, basis).checked(check)
    return search_text(result, inventory, present, source, report.source), result.candidates[0]


def plan_simulation(
    planned: Planned, calibrate: str | None, load: Load, changed: Callable[[Sequence[str]], Planned]
) -> str:
    """Returns the text of a simulation. changed: loads the config with more overrides. Raises ConfigError as
    `plan_text` does."""

    def report(given: Planned) -> Report:
        loaded, placement, inventory = given
        basis, _ = basis_of(loaded.config, inventory, calibrate, load)
        return plan_report(loaded.config, placement, inventory, basis)

    return simulation_text(report(planned), lambda overrides: report(changed(overrides)))


def basis_of(config: Config, inventory: Inventory, calibrate: str | None, load: Load) -> tuple[Basis, str]:
    """Returns the basis, and the source of its corrections in words."""
    if calibrate is None:
        return stored_basis(config, inventory), ""
    return _of_run(Path(calibrate), config, inventory, load)


def _of_run(given: Path, config: Config, inventory: Inventory, load: Load) -> tuple[Basis, str]:
    """Returns the basis corrected by a run, and the source of the corrections in words."""
    measured = read_measured(given)
    own = measured.file.parent / "config.yaml"
    if not own.is_file():
        message = "the run's config.yaml is missing beside it, so the measured config is unknown"
        raise ConfigError([Problem(OPTION, message, value=str(measured.file), hint="as runs/ppo/metrics.jsonl")])
    loaded, placement, machines = load(str(own), [])
    task = loaded.config.runner.task_type
    if task != config.runner.task_type:
        message = f"the run is {task}, the config is {config.runner.task_type}: they have other phases and lengths"
        hint = f"a run of a {config.runner.task_type} config, or no --calibrate"
        raise ConfigError([Problem(OPTION, message, value=str(given), hint=hint)])
    basis = corrected_basis(measured, (loaded.config, placement, machines), config, inventory)
    steps = f"{len(measured.rows)} step{'s' if len(measured.rows) > 1 else ''}"
    return basis, f"{steps} of {measured.file}"
