"""The parts that the rules of all sections share: conditions, problems, and keys without effect.

The rules of a section are two generators. `refused` yields a `Problem` for each combination that makes no sense,
`unread` an `Unread` for each key that the config does not read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple, TypeVar

from rl_platform.config.schema import Config
from rl_platform.config.schema.section import Unreadable
from rl_platform.errors import Problem
from rl_platform.suggest import did_you_mean
from rl_platform.user_code import is_named

TASK, CHUNKS = "runner.task_type", "actor.model.num_action_chunks"
Value = TypeVar("Value")


class Unread(NamedTuple):
    """A key or section without effect, the reason, and the keys that decide it."""

    key: str
    reason: str
    switches: tuple[str, ...]


def when(condition: Callable[[], Value]) -> Value | None:
    """Returns the value of a condition, None if the condition reads a key that has a problem of its own.

    A rule is therefore judged if all keys that it depends on are valid. Each rule reads optional keys inside `when`.
    """
    try:
        return condition()
    except Unreadable:
        return None


def unread_keys(section: str, names: str, reason: str, *switches: str) -> Iterator[Unread]:
    """Yields the keys `names`, separated by blanks, of a section."""
    return (Unread(f"{section}.{name}", reason, switches) for name in names.split())


def unknown_name(key: str, name: str, known: Collection[str], what: str = "function") -> Problem | None:
    """Returns the problem of a name that is neither in `known` nor of the form module:Name or path/to/file.py:Name.

    what: the user's own is a function or a Class.
    """
    if name in known or is_named(name):
        return None
    one_of = "one of " if len(known) > 1 else ""
    message = (
        f"neither {one_of}{', '.join(known)} nor a {what.lower()} of yours"
        if known
        else f"not the name of a {what.lower()}"
    )
    allowed = ", ".join([*known, f"module:{what}", f"path/to/file.py:{what}"])
    return Problem(key, message, allowed=allowed, hint=did_you_mean(name, known))


def embodied(config: Config) -> bool:
    """Returns whether the config trains an embodied policy."""
    return config.runner.task_type == "embodied"


def reasoning(config: Config) -> bool:
    """Returns whether the config trains a language model."""
    return config.runner.task_type == "reasoning"
