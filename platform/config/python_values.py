"""Configs and overrides that a program passes as Python values: as YAML text, which is then read like a file."""

from __future__ import annotations

import os
from collections.abc import Mapping

import yaml

from rl_platform.config.source import MAX_DEPTH, CoreLoader
from rl_platform.errors import Problem, shortened

DICT, OVERRIDES = "config", "overrides"  # names of the two in messages
END = "\n...\n"  # PyYAML's mark after a value that is no dict or list
ALLOWED = "dict, list, text, numbers, True, False, None"


class Dumper(yaml.SafeDumper):
    """Quotes all text that YAML 1.2 or YAML 1.1 would read as something else."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own attribute
        first: CoreLoader.yaml_implicit_resolvers.get(first, [])
        + yaml.SafeDumper.yaml_implicit_resolvers.get(first, [])
        for first in {*CoreLoader.yaml_implicit_resolvers, *yaml.SafeDumper.yaml_implicit_resolvers}
    }


def as_yaml(config: Mapping[str, object]) -> tuple[str, list[Problem]]:
    """Returns the text of a config, and the problems of values that no config can hold."""
    problems: list[Problem] = []
    tree = _plain(config, "", DICT, problems)
    return yaml.dump(tree, Dumper=Dumper, sort_keys=False, allow_unicode=True), problems


def as_arguments(overrides: Mapping[str, object]) -> tuple[list[str], list[Problem]]:
    """Returns the overrides as the arguments `section.key=value` of a command line, and the problems of the others."""
    arguments, problems = [], [_no_key(OVERRIDES, OVERRIDES, key) for key in overrides if not isinstance(key, str)]
    for key in (key for key in overrides if isinstance(key, str)):
        invalid: list[Problem] = []
        value = _plain(overrides[key], key, OVERRIDES, invalid)
        if not invalid:
            text = yaml.dump(value, Dumper=Dumper, default_flow_style=True, allow_unicode=True, width=10**9)
            arguments.append(f"{key}={text.removesuffix(END).rstrip()}")
        problems += invalid
    return arguments, problems


def _plain(value: object, key: str, place: str, problems: list[Problem], depth: int = 0) -> object:
    """Returns `value` in the types of YAML: tuples as lists, paths as text, NumPy's numbers as Python's."""
    if depth > MAX_DEPTH:
        message = f"more than {MAX_DEPTH} dicts and lists inside each other"
        problems.append(Problem(key.partition(".")[0], message, where=place))
        return None
    if isinstance(value, Mapping):
        below = f"{key}." if key else ""
        problems += [_no_key(f"{below}{name}", place, name) for name in value if not isinstance(name, str | int)]
        items = [(str(name), item) for name, item in value.items() if isinstance(name, str | int)]
        return {name: _plain(item, f"{below}{name}", place, problems, depth + 1) for name, item in items}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{key}[{index}]", place, problems, depth + 1) for index, item in enumerate(value)]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if getattr(value, "shape", None) == () and hasattr(value, "item"):  # a number of NumPy, or a tensor with one
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)  # of a subclass, for which YAML has no tag
    message, hint = "no config can hold this value", "name a function as module:function" if callable(value) else ""
    problems.append(
        Problem(key or DICT, message, where=place, value=shortened(repr(value)), allowed=ALLOWED, hint=hint)
    )
    return None


def _no_key(key: str, place: str, name: object) -> Problem:
    return Problem(key, "a key must be text", where=place, value=shortened(repr(name)))
