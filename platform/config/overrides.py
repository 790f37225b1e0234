"""`section.key=value` arguments of the command line, laid over the YAML file before anything is checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_platform.config.source import COMMAND_LINE, YamlReader
from rl_platform.errors import Problem


def apply_overrides(tree: dict[str, Any], where: dict[str, str], overrides: Sequence[str]) -> list[Problem]:
    """Changes `tree` and `where` in place; returns what is wrong with the arguments themselves.

    A value is read as YAML and replaces what stands at the key, a whole section included. The last of several for one
    key wins, so that a script can append arguments. Unknown keys are found later, as those of the file are.
    """
    problems: list[Problem] = []
    for text in overrides:
        key, equals, value = text.partition("=")
        key = key.strip()
        problem = _malformed(text, key, equals, value)
        if problem is None:
            reader = YamlReader(COMMAND_LINE)
            parsed = reader.read(value, key)
            problems += reader.problems
            if not reader.problems:
                problem = _set(tree, where, key, parsed)
                where.update(dict.fromkeys(reader.where, COMMAND_LINE))
        if problem is not None:
            problems.append(problem)
    return problems


def _malformed(text: str, key: str, equals: str, value: str) -> Problem | None:
    message = hint = ""
    if not equals or not key or "" in key.split("."):
        message, hint = "an override has the form section.key=value", "quote it if it holds spaces"
    elif key[0] in "+~-":
        message, hint = f"overrides have no `{key[0]}` in front", f"write {key.lstrip('+~-')}=value"
    elif not value.strip():
        message, hint = "the value is missing", f"write {key}=null to switch it off"
    return Problem(key or text, message, where=COMMAND_LINE, value=text, hint=hint) if message else None


def _set(tree: dict[str, Any], where: dict[str, str], key: str, value: Any) -> Problem | None:
    *sections, leaf = key.split(".")
    path = ""
    for section in sections:
        path = f"{path}.{section}" if path else section
        if section not in tree or tree[section] is None:
            tree[section] = {}
            where[path] = COMMAND_LINE
        tree = tree[section]
        if not isinstance(tree, dict):
            message = f"{path} is no section, so nothing can be set inside it"
            return Problem(key, message, where=COMMAND_LINE, value=repr(tree), hint=f"set {path} as a whole")
    tree[leaf] = value
    for stale in [known for known in where if known.startswith((f"{key}.", f"{key}["))]:
        del where[stale]
    return None
