"""The basis of a plan: the measurement of this machine, or an earlier run of `--calibrate`."""

from __future__ import annotations

from pathlib import Path

from rl_platform.config.schema import Config
from rl_platform.errors import ConfigError, Problem
from rl_platform.launch.placed_config import load
from rl_platform.placement.inventory import Inventory
from rl_platform.planner.basis import Basis
from rl_platform.planner.calibration import OPTION, corrected_basis, read_measured, stored_basis


def basis_of(config: Config, inventory: Inventory, calibrate: str | None) -> tuple[Basis, str]:
    """Returns the basis, and the source of its corrections in words.

    calibrate: the folder of an earlier run, or its metrics.jsonl. Raises ConfigError if the file cannot be read or was
    measured on another kind of device.
    """
    if calibrate is None:
        return stored_basis(config, inventory), ""
    measured = read_measured(Path(calibrate))
    own = measured.file.parent / "config.yaml"
    if not own.is_file():
        message = "the run's config.yaml is missing beside it, so the measured config is unknown"
        raise ConfigError([Problem(OPTION, message, value=str(measured.file), hint="as runs/ppo/metrics.jsonl")])
    loaded, placement, machines = load(str(own), [])
    task = loaded.config.runner.task_type
    if task != config.runner.task_type:
        message = f"the run is {task}, the config is {config.runner.task_type}: they have other phases and lengths"
        hint = f"a run of a {config.runner.task_type} config, or no --calibrate"
        raise ConfigError([Problem(OPTION, message, value=str(Path(calibrate)), hint=hint)])
    basis = corrected_basis(measured, (loaded.config, placement, machines), config, inventory)
    steps = f"{len(measured.rows)} step{'s' if len(measured.rows) > 1 else ''}"
    return basis, f"{steps} of {measured.file}"
