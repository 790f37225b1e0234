"""Checks names in `env.kwargs`, because simulators raise only a KeyError for unknown ones."""

from __future__ import annotations

from collections.abc import Collection
from difflib import get_close_matches

from rl_platform.errors import ConfigError, Problem, shown


def check_name(argument: str, name: object, known: Collection[str]) -> None:
    """Raises ConfigError, with the nearest names, if `name` of `env.kwargs.argument` is not in `known`."""
    if name in list(known):  # a list or mapping cannot be searched for in a set
        return
    key, near = f"env.kwargs.{argument}", get_close_matches(str(name), known)
    hint = f"did you mean {', '.join(near)}? {key}={near[0]}" if near else ""
    message = "the simulator has nothing of this name"
    raise ConfigError([Problem(key, message, value=shown(name), allowed=", ".join(sorted(known)), hint=hint)])
