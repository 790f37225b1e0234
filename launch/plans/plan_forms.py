"""The forms of `--plan`: text, page, simulation, search and calibration."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rl_platform.disk import no_space
from rl_platform.errors import ConfigError, PlatformError, Problem
from rl_platform.launch.options import PlanForm
from rl_platform.launch.placed_config import PlacedConfig, load
from rl_platform.launch.plans.plan_basis import basis_of
from rl_platform.launch.start_checks.sharding import check_layout
from rl_platform.launch.written import replacing_file
from rl_platform.planner.report import Report, plan_report
from rl_platform.planner.report_json import report_json
from rl_platform.planner.report_text import report_text
from rl_platform.planner.search import search
from rl_platform.planner.search_text import search_text
from rl_platform.planner.simulation_text import simulation_text
from rl_platform.planner.svg import report_svg

if TYPE_CHECKING:
    from rl_platform.launch.command import Arguments

_DRAW = {"text": report_text, "json": report_json, "svg": report_svg}


def planned(arguments: Arguments, placed: PlacedConfig) -> str:
    """Returns the text of `--plan` in the form of the command line. Raises ConfigError as `plan` does."""
    if arguments.plan == "search":
        return _search(arguments, placed)
    if arguments.plan == "html":
        from rl_platform.launch.tools.plan_page import plan_page

        check_layout(placed.config, placed.placement)
        return plan_page(arguments.config, arguments.overrides, placed, arguments.calibrate)
    if arguments.plan == "simulate":
        check_layout(placed.config, placed.placement)
        report = _report(placed, arguments.calibrate)
        return simulation_text(report, lambda more: _report(_loaded(arguments, more), arguments.calibrate))
    assert arguments.plan is not None
    return plan(arguments.plan, placed, arguments.calibrate)


def plan(form: PlanForm, placed: PlacedConfig, calibrate: str | None = None) -> str:
    """Returns the text of the forms text, json, svg and calibrate. Raises ConfigError for models that cannot be sharded
    as configured, and as `basis_of`."""
    if form == "calibrate":
        from rl_platform.launch.tools.calibrate import calibrate as measure  # loads torch

        return measure(placed.config, placed.inventory)
    check_layout(placed.config, placed.placement)
    return _DRAW[form](_report(placed, calibrate))


def _report(placed: PlacedConfig, calibrate: str | None) -> Report:
    basis, _ = basis_of(placed.config, placed.inventory, calibrate)
    return plan_report(placed.config, placed.placement, placed.inventory, basis)


def _search(arguments: Arguments, placed: PlacedConfig) -> str:
    """Returns the text of `--plan=search`; writes the config with the best candidate to the file of `--write`.

    Candidates that cannot run are left out. Raises ConfigError if none is left, or if the file exists or cannot be
    written.
    """
    if arguments.write is not None:
        _check_writable(arguments.write)  # before the search, which takes up to half a minute
    basis, source = basis_of(placed.config, placed.inventory, arguments.calibrate)
    report = plan_report(placed.config, placed.placement, placed.inventory, basis)
    present = report.overlap.seconds if report.overlap else report.seconds
    result = search(placed.config, placed.inventory, basis)
    result = result.checked(lambda candidate: _loaded(arguments, candidate.overrides))
    text = search_text(result, placed.inventory, present, source, report.source)
    if arguments.write is None:
        return text
    written = _loaded(arguments, result.candidates[0].overrides).loaded.resolved_yaml()
    _check_writable(arguments.write)  # another process may have written it meanwhile
    try:
        with replacing_file(Path(arguments.write)) as stage:
            stage.write_text(written, encoding="utf-8")
    except OSError as error:
        raise _not_written(arguments.write, error) from error
    return f"{text}\nThe config with the first is in {arguments.write}\n"


def _loaded(arguments: Arguments, overrides: Sequence[str]) -> PlacedConfig:
    """Returns the config with more overrides. Raises ConfigError for models that cannot be sharded as configured."""
    changed = load(arguments.config, [*arguments.overrides, *overrides])
    check_layout(changed.config, changed.placement)
    return changed


def _check_writable(file: str) -> None:
    """Raises ConfigError if the file exists or cannot be made."""
    try:
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        os.unlink(file)
    except OSError as error:
        raise _not_written(file, error) from error


def _not_written(file: str, error: OSError) -> PlatformError:
    if (full := no_space(error, file)) is not None:
        return full
    exists = error.errno == errno.EEXIST
    hint = "name a file that does not exist yet" if exists else "name a file in a folder that you may write to"
    return ConfigError([Problem("--write", f"cannot be written: {error.strerror or error}", value=file, hint=hint)])
