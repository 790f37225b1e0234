"""The forms of `--plan`: text, page, simulation, search and calibration."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rl_platform.config import LoadedConfig
from rl_platform.disk import replacing_file
from rl_platform.errors import ConfigError, Problem
from rl_platform.launch.command import load
from rl_platform.launch.options import PlanForm
from rl_platform.launch.sharding import check_layout
from rl_platform.placement.inventory import Inventory
from rl_platform.placement.scheduler import Placement
from rl_platform.planner.plan_text import plan_search, plan_simulation, plan_text
from rl_platform.planner.search import Candidate

if TYPE_CHECKING:
    from rl_platform.launch.command import Arguments


def planned(arguments: Arguments, loaded: LoadedConfig, placement: Placement, inventory: Inventory) -> str:
    """Returns the text of `--plan` in the form of the command line."""
    if arguments.plan == "search":
        return search(arguments, loaded, placement, inventory)
    if arguments.plan == "html":
        return page(arguments, loaded, placement, inventory)
    if arguments.plan == "simulate":
        return simulation(arguments, loaded, placement, inventory)
    assert arguments.plan is not None
    return plan(arguments.plan, loaded, placement, inventory, arguments.calibrate)


def plan(
    form: PlanForm, loaded: LoadedConfig, placement: Placement, inventory: Inventory, calibrate: str | None = None
) -> str:
    """Returns the text of `--plan`, but for that of a search. Raises ConfigError for models that cannot be sharded as
    configured."""
    if form == "calibrate":
        from rl_platform.launch.tools.calibrate import calibrate as measure  # loads torch

        return measure(loaded.config, inventory)
    check_layout(loaded.config, placement)
    return plan_text(form, (loaded, placement, inventory), calibrate, load)


def page(arguments: Arguments, loaded: LoadedConfig, placement: Placement, inventory: Inventory) -> str:
    """Returns the HTML of `--plan=html`. Raises ConfigError as `plan` does."""
    from rl_platform.launch.tools.plan_page import plan_page

    check_layout(loaded.config, placement)
    given = loaded, placement, inventory
    return plan_page(arguments.config, arguments.overrides, given, arguments.calibrate, load)


def simulation(arguments: Arguments, loaded: LoadedConfig, placement: Placement, inventory: Inventory) -> str:
    """Returns the text of `--plan=simulate`. Raises ConfigError as `plan` does."""

    def changed(overrides: Sequence[str]) -> tuple[LoadedConfig, Placement, Inventory]:
        larger = load(arguments.config, [*arguments.overrides, *overrides])
        check_layout(larger[0].config, larger[1])
        return larger

    check_layout(loaded.config, placement)
    return plan_simulation((loaded, placement, inventory), arguments.calibrate, load, changed)


def search(arguments: Arguments, loaded: LoadedConfig, placement: Placement, inventory: Inventory) -> str:
    """Returns the text of `--plan=search`; writes the config with the best candidate to the file of `--write`.

    Raises ConfigError if no candidate can run, or if the file exists or cannot be written.
    """

    def changed(candidate: Candidate) -> LoadedConfig:
        proposed, placed, _ = load(arguments.config, [*arguments.overrides, *candidate.overrides])
        check_layout(proposed.config, placed)
        return proposed

    if arguments.write is not None:
        _check_writable(arguments.write)  # before the search, which takes up to half a minute
    text, best = plan_search((loaded, placement, inventory), arguments.calibrate, load, changed)
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


def _check_writable(file: str) -> None:
    """Raises ConfigError if the file exists or cannot be made."""
    try:
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        os.unlink(file)
    except OSError as error:
        raise _not_written(file, error) from error


def _not_written(file: str, error: OSError) -> ConfigError:
    exists = error.errno == errno.EEXIST
    hint = "name a file that does not exist yet" if exists else "name a file in a folder that you may write to"
    return ConfigError([Problem("--write", f"cannot be written: {error.strerror or error}", value=file, hint=hint)])
