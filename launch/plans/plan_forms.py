"""The forms of `--plan`: text, page, simulation, search and calibration."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rl_platform.config import LoadedConfig
from rl_platform.disk import no_space
from rl_platform.errors import ConfigError, PlatformError, Problem
from rl_platform.launch.options import PlanForm
from rl_platform.launch.placed_config import PlacedConfig, load
from rl_platform.launch.start_checks.sharding import check_layout
from rl_platform.launch.tools.written import replacing_file
from rl_platform.planner.candidates import Candidate
from rl_platform.planner.plan_text import plan_search, plan_simulation, plan_text

if TYPE_CHECKING:
    from rl_platform.launch.command import Arguments


def planned(arguments: Arguments, placed: PlacedConfig) -> str:
    """Returns the text of `--plan` in the form of the command line."""
    if arguments.plan == "search":
        return search(arguments, placed)
    if arguments.plan == "html":
        return page(arguments, placed)
    if arguments.plan == "simulate":
        return simulation(arguments, placed)
    assert arguments.plan is not None
    return plan(arguments.plan, placed, arguments.calibrate)


def plan(form: PlanForm, placed: PlacedConfig, calibrate: str | None = None) -> str:
    """Returns the text of `--plan`, but for that of a search. Raises ConfigError for models that cannot be sharded as
    configured."""
    if form == "calibrate":
        from rl_platform.launch.tools.calibrate import calibrate as measure  # loads torch

        return measure(placed.config, placed.inventory)
    check_layout(placed.config, placed.placement)
    return plan_text(form, placed, calibrate, load)


def page(arguments: Arguments, placed: PlacedConfig) -> str:
    """Returns the HTML of `--plan=html`. Raises ConfigError as `plan` does."""
    from rl_platform.launch.tools.plan_page import plan_page

    check_layout(placed.config, placed.placement)
    return plan_page(arguments.config, arguments.overrides, placed, arguments.calibrate, load)


def simulation(arguments: Arguments, placed: PlacedConfig) -> str:
    """Returns the text of `--plan=simulate`. Raises ConfigError as `plan` does."""

    def changed(overrides: Sequence[str]) -> PlacedConfig:
        return _loaded(arguments, overrides)

    check_layout(placed.config, placed.placement)
    return plan_simulation(placed, arguments.calibrate, load, changed)


def search(arguments: Arguments, placed: PlacedConfig) -> str:
    """Returns the text of `--plan=search`; writes the config with the best candidate to the file of `--write`.

    Raises ConfigError if no candidate can run, or if the file exists or cannot be written.
    """

    def changed(candidate: Candidate) -> LoadedConfig:
        return _loaded(arguments, candidate.overrides).loaded

    if arguments.write is not None:
        _check_writable(arguments.write)  # before the search, which takes up to half a minute
    text, best = plan_search(placed, arguments.calibrate, load, changed)
    if arguments.write is None:
        return text
    written = changed(best).resolved_yaml()
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
