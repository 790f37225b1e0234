"""Extras: folders of the package that an installation may lack (`planner`, `launch.check`, an engine)."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar, cast

from rl_platform.errors import ConfigError, Problem

T = TypeVar("T")


def is_present(extra: str) -> bool:
    """Returns whether an extra, a package name such as `rl_platform.accel`, is installed."""
    spec = importlib.util.find_spec(extra)
    return spec is not None and spec.origin is not None  # an empty folder is a namespace without an origin


def find(extra: str, name: str, instead: T) -> T:
    """Returns the object `name` of an extra, as `placement_text.render`; `instead` if that extra is not installed."""
    if not is_present(extra):
        return instead
    module, _, attribute = f"{extra}.{name}".rpartition(".")
    return cast(T, getattr(importlib.import_module(module), attribute))


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
