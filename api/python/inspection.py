"""`rl.plan`, `rl.check` and `rl.evaluate`: what `platform-launch --plan`, `--check` and `--eval` do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from os import PathLike
from typing import TYPE_CHECKING, Any

from rl_platform.config.python_values import as_arguments
from rl_platform.extras import required
from rl_platform.launch.placed_config import load, located
from rl_platform.launch.views.console import run_console
from rl_platform.python.arguments import Source, as_overrides, as_source, folder_of
from rl_platform.python.environments import MakeEnv, registered
from rl_platform.python.one_run import one_run
from rl_platform.python.runs import Run

if TYPE_CHECKING:
    from rl_platform.launch.check.property import PropertyOutcome
    from rl_platform.planner.report import Report


class Plan:
    """The plan of a run: its processes on each GPU, their memory, the time of a step. `print(plan)` prints it."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def __str__(self) -> str:
        from rl_platform.planner.report_text import report_text

        return report_text(self.report)

    def _repr_svg_(self) -> str:
        from rl_platform.planner.svg import report_svg

        return report_svg(self.report)

    @cached_property
    def data(self) -> dict[str, Any]:
        """The object of `--plan=json`: bytes and seconds, None where not known. See `docs/placement.md`."""
        from rl_platform.planner.report_json import report_json

        data: dict[str, Any] = json.loads(report_json(self.report))
        return data


def plan(config: Source, overrides: Mapping[str, object] | None = None) -> Plan:
    """Returns the plan of a config without starting anything. Raises ConfigError, PlacementError included."""
    loaded, placement, inventory = load(as_source(config), as_overrides(overrides))
    with required("rl_platform.planner", "rl.plan"):
        from rl_platform.planner.calibration import stored_basis
        from rl_platform.planner.report import plan_report
    from rl_platform.launch.start_checks.env_check import check_env
    from rl_platform.launch.start_checks.sharding import check_layout

    with located(loaded):
        check_env(loaded.config)
        check_layout(loaded.config, placement)
        basis = stored_basis(loaded.config, inventory)
        return Plan(plan_report(loaded.config, placement, inventory, basis))


def check(config: Source, overrides: Mapping[str, object] | None = None, *, show: bool = True) -> list[PropertyOutcome]:
    """Tries on small random numbers that batch layout changes no result; returns the outcome of each property.

    show: print them. Raises ConfigError for the config, and PropertyFailed (exit code 70) if a property does not hold.
    """
    with one_run():
        loaded, _, _ = load(as_source(config), as_overrides(overrides))
        with required("rl_platform.launch.check", "rl.check"):
            from rl_platform.launch.check.property_check import check as check_properties  # loads torch

        with located(loaded):
            return check_properties(loaded, run_console(show=show))


def evaluate(
    run: Run | str | PathLike[str],
    overrides: Mapping[str, object] | None = None,
    *,
    env: MakeEnv | None = None,
    show: bool = True,
) -> list[dict[str, Any]]:
    """Evaluates a checkpoint with the most likely and with sampled actions; returns one row for each, and per task.

    run: a run, its folder (the newest checkpoint), one of its checkpoints, or `latest` in runs/. overrides: of the keys
    that an evaluation may change, as `{"env.evaluation.episodes": 50}`. env: the function that made the environments,
    for a run that was loaded. show: print the table. Table, videos and answers are written into the run's folder
    `evaluation`.

    Raises ConfigError for a folder without a checkpoint and for other keys, CheckpointError for a damaged checkpoint.
    """
    given, env = as_overrides(overrides), env or (run.env if isinstance(run, Run) else None)
    with one_run(), registered(env):
        with required("rl_platform.launch.saved", "evaluate"):
            from rl_platform.launch.saved.saved_run import find_run
        saved = find_run(folder_of(run), "run")
        loaded = saved.load(given)
        from rl_platform.launch.saved.evaluation import evaluate_checkpoint  # loads torch

        with located(loaded):
            return evaluate_checkpoint(saved, loaded, as_arguments(given)[0], run_console(show=show))
