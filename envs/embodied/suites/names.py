"""Checks names in `env.kwargs`, because simulators raise only a KeyError for unknown ones, or take them for others."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from difflib import get_close_matches

from rl_platform.errors import ConfigError, Problem, shown


def check_name(argument: str, name: object, known: Collection[str], given: Sequence[object] | None = None) -> None:
    """Raises ConfigError, with the nearest names, if `name` of `env.kwargs.argument` is not in `known`.

    given: all names of an argument that is a list.
    """
    if name in list(known):  # a list or mapping cannot be searched for in a set
        return
    key, near = f"env.kwargs.{argument}", get_close_matches(str(name), known)
    right = near[0] if near else ""
    if isinstance(given, list | tuple):
        right = f"'[{', '.join(right if each == name else str(each) for each in given)}]'"
    hint = f"did you mean {', '.join(near)}? {key}={right}" if near else ""
    message = "the simulator has nothing of this name"
    raise ConfigError([Problem(key, message, value=shown(name), allowed=", ".join(sorted(known)), hint=hint)])


def check_reward_type(kwargs: Mapping[str, object]) -> None:
    """Raises ConfigError for a reward that Gymnasium-Robotics does not have: its Fetch tasks take every other name than
    `sparse` for the dense one."""
    if "reward_type" in kwargs:
        check_name("reward_type", kwargs["reward_type"], ("dense", "sparse"))
