"""Imports of extras: parts of the package that an installation may lack (`planner`, `launch.check`, an engine)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rl_platform.errors import ConfigError, Problem


@contextmanager
def required(extra: str, key: str, hint: str = "") -> Iterator[None]:
    """Runs the imports of an extra, a package name such as `rl_platform.planner`.

    Raises ConfigError if that package is not installed. `key` is the option or config key that needs it.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if not f"{error.name}.".startswith(f"{extra}."):
            raise
        raise ConfigError([Problem(key, f"{extra} is not installed", hint=hint)]) from None
