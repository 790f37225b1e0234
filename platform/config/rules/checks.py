"""Judges a config by the rules between its keys."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace

from rl_platform.config.layers import is_within_any, steps_of, value_at
from rl_platform.config.rules import broken, without_effect
from rl_platform.config.schema import Config
from rl_platform.config.schema.section import Section
from rl_platform.config.source import Tree
from rl_platform.errors import Problem, shown


def check(config: Config, written: Tree, where: Callable[[str], str], doubtful: Collection[str] = ()) -> list[Problem]:
    """Returns all problems between the keys of `config`: broken rules, then written keys without effect.

    `written` is what the user wrote, without defaults. The keys in `doubtful` hold a default because what was written
    is wrong. No rule reads them or is about them. Rules about a written key that has no effect are left out too:
    removing it is the one thing to do.
    """
    values = config.model_dump(mode="json")
    config = without(config, doubtful)
    unread = [problem for problem in _unread(config, written) if not is_within_any(problem.key, doubtful)]
    silent = [*doubtful, *(problem.key for problem in unread)]
    problems = [problem for problem in broken(config) if not is_within_any(problem.key, silent)]

    def value(key: str) -> str:
        partly = any(is_within_any(other, [key]) for other in doubtful)  # defaults stand for what is wrong
        return shown(value_at(written if partly else values, steps_of(key)))

    return [
        replace(problem, where=where(problem.key), value=problem.value or value(problem.key))
        for problem in (*problems, *unread)
    ]


def without(config: Config, keys: Collection[str]) -> Config:
    """Returns a copy of `config` in which reading one of `keys` raises `Unreadable`."""
    copied = config.model_copy(deep=True)
    for key in keys:
        path = steps_of(key.removesuffix("]").rpartition("[")[0] if key.endswith("]") else key)
        if not path:  # of an argument that names no key
            continue
        inner = value_at(copied, path[:-1])
        if inner is copied and (section := value_at(copied, path)) is not None:
            vars(section).clear()  # the rules read sections outside `when`
        elif isinstance(inner, Section):
            vars(inner).pop(str(path[-1]), None)
    return copied


def _unread(config: Config, written: Tree) -> list[Problem]:
    """Returns one problem for each written key or section without effect; none for keys inside a section that has none.

    An explicit null means off and is fine.
    """
    problems: dict[str, Problem] = {}
    for key, reason, _ in sorted(without_effect(config), key=lambda unread: unread.key):  # a section before its keys
        if not is_within_any(key, problems) and value_at(written, steps_of(key)) is not None:
            hint = f"remove it, so that every key acts; an inherited one: {key}: !unset, or ~{key} on the command line"
            problems[key] = Problem(key, f"has no effect here: {reason}", hint=hint)
    return list(problems.values())
