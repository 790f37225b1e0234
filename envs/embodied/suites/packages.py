"""Refuses a run whose simulator is not installed, with the line that installs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rl_platform.errors import ConfigError, Problem


@contextmanager
def installed(simulator: str, key: str, hint: str) -> Iterator[None]:
    """Turns a failed import into ConfigError. key: of the config; hint: how to install the simulator."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ConfigError([Problem(key, f"{simulator} is not installed here ({error})", hint=hint)]) from error
