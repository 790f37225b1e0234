"""Refuses a run whose simulator is not installed, with the line that installs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rl_platform.envs.embodied.build_problems.simulator_packages import SIMULATORS
from rl_platform.errors import ConfigError, Problem


@contextmanager
def installed(part: str, key: str) -> Iterator[None]:
    """Turns a failed import into ConfigError. part: of the simulator; key: of the config."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = SIMULATORS[part]
        problem = Problem(key, f"{missing.name} is not installed here ({error})", hint=missing.install_line())
        raise ConfigError([problem]) from error
