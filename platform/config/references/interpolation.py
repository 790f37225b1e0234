"""`${section.key}` references inside a config, and `${env:NAME}` for an environment variable.

`$${` stands for a literal `${`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import NoReturn

from rl_platform.config.differences import flat
from rl_platform.config.layers import value_at
from rl_platform.config.source import MAX_DEPTH, MAX_SIZE, Tree
from rl_platform.errors import ConfigError, Problem
from rl_platform.redact import hide_variable
from rl_platform.suggest import SURE, nearest

_REFERENCE = re.compile(r"(\$?)\$\{([^{}]*)\}")
_NESTED = re.compile(r"\$\{[^{}]*\$\{")
_LOOKUP_FAILED = object()


def resolve_references(
    tree: Tree, defaults: Tree, where: Callable[[str], str]
) -> tuple[Tree, list[Problem], set[str], dict[str, str]]:
    """Replaces all references.

    Returns the tree, the problems (missing targets, cycles, sections inside text), the keys that have no value because
    of them, and the references to environment variables. The latter are the texts of the config file, by key.

    A value that is one reference as a whole keeps the type of its target. Keys that are not in `tree` are looked up in
    `defaults`, the schema's. A reference with a problem, and those that lead to it, become None. Raises ConfigError if
    the references make more text than a config may have, or lead too far.
    """
    resolver = _Resolver(tree, defaults, where)
    resolved = {key: resolver.value(value, (key,)) for key, value in tree.items()}
    return resolved, resolver.problems, resolver.failed, resolver.from_environment


class _Resolver:
    def __init__(self, tree: Tree, defaults: Tree, where: Callable[[str], str]) -> None:
        self.tree = tree
        self.defaults = defaults
        self.where = where
        self.problems: list[Problem] = []
        self.failed: set[str] = set()
        self._open: list[tuple[str, ...]] = []
        self._size = 0
        self.from_environment: dict[str, str] = {}
        self._variables = 0  # read so far
        self._failures = 0

    def value(self, value: object, path: tuple[str, ...]) -> object:
        """Returns the value at `path` with its references replaced."""
        if isinstance(value, dict):
            return {key: self.value(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [self.value(item, (*path[:-1], f"{path[-1]}[{index}]")) for index, item in enumerate(value)]
        self._count(value, path)
        if not isinstance(value, str) or "${" not in value:
            return value
        if len(self._open) == MAX_DEPTH:
            self._give_up(path, f"more than {MAX_DEPTH} references lead from one to the next")
        if path in self._open:
            cycle = " -> ".join(".".join(step) for step in [*self._open[self._open.index(path) :], path])
            self._complain(path, value, f"the references go in a circle: {cycle}")
            return None
        self._open.append(path)
        before, failures = self._variables, self._failures
        try:
            return self._text(value, path)
        finally:
            self._open.pop()
            if self._failures > failures:
                self.failed.add(".".join(path))
            if self._variables > before:
                self.from_environment[".".join(path)] = value

    def _text(self, text: str, path: tuple[str, ...]) -> object:
        if _NESTED.search(text):
            self._complain(path, text, "a reference contains another", hint="write $${ for a literal ${")
            return None
        whole = _REFERENCE.fullmatch(text)
        if whole and not whole[1]:
            value = self._target(whole[2].strip(), text, path)
            return None if value is _LOOKUP_FAILED else value
        failed = False

        def replace(match: re.Match[str]) -> str:
            nonlocal failed
            if match[1]:
                return match[0][1:]
            value = self._target(match[2].strip(), text, path)
            if isinstance(value, dict | list) or value is None:
                kind = "is null" if value is None else "is a whole section or list"
                self._complain(path, text, f"${{{match[2]}}} {kind} and cannot stand inside text")
                value = _LOOKUP_FAILED
            failed = failed or value is _LOOKUP_FAILED
            return str(value).lower() if isinstance(value, bool) else str(value)

        replaced = _REFERENCE.sub(replace, text)
        self._count(replaced, path)
        if "${" in _REFERENCE.sub("", text):
            self._complain(path, text, "a `${` without its `}`", hint="write $${ for a literal ${")
            return None
        return None if failed else replaced

    def _target(self, name: str, text: str, path: tuple[str, ...]) -> object:
        if name.startswith("env:"):
            return self._variable(name.removeprefix("env:"), text, path)
        target = tuple(name.split("."))
        value = value_at(self.tree, target, _LOOKUP_FAILED)
        if value is _LOOKUP_FAILED:
            value = value_at(self.defaults, target, _LOOKUP_FAILED)
        if value is _LOOKUP_FAILED:
            self._complain(path, text, *self._no_target(name))
            return value
        if path[: len(target)] == target:
            self._complain(path, text, f"the references go in a circle: {name} contains this key")
            return _LOOKUP_FAILED
        before = self._failures
        resolved = self.value(value, target)
        return _LOOKUP_FAILED if self._failures > before else resolved

    def _no_target(self, name: str) -> tuple[str, str]:
        """Returns message and hint for a reference to nothing."""
        resolver, colon, argument = name.partition(":")
        if colon:
            message = f"there is no resolver `{resolver}`: a reference is ${{section.key}} or ${{env:NAME}}"
            if resolver == "oc.env":
                return message, f"write ${{env:{argument.partition(',')[0].strip()}}}; it has no default"
            return message, "write the value itself, or set the key on the command line"
        close = nearest(name, flat(self.tree), SURE)
        hint = f"did you mean ${{{close}}}?" if close else "a literal ${ is written $${"
        return f"${{{name}}} names no key of this config", hint

    def _variable(self, name: str, text: str, path: tuple[str, ...]) -> object:
        if (value := os.environ.get(name)) is None:
            hint = f"export {name}=... before the command"
            self._complain(path, text, f"there is no environment variable {name}", hint=hint)
            return _LOOKUP_FAILED
        self._variables += 1
        hide_variable(name)
        self._count(value, path)
        return value

    def _count(self, value: object, path: tuple[str, ...]) -> None:
        """Raises ConfigError if all values together, each as often as references repeat it, are too many."""
        self._size += 1 + (len(value) if isinstance(value, str) else 0)
        if self._size > MAX_SIZE:
            self._give_up(path, f"after replacing all references the values have more than {MAX_SIZE} characters")

    def _give_up(self, path: tuple[str, ...], message: str) -> NoReturn:
        key = ".".join(path)
        raise ConfigError([*self.problems, Problem(key, message, where=self.where(key))])

    def _complain(self, path: tuple[str, ...], text: str, message: str, hint: str = "") -> None:
        self._failures += 1
        key = ".".join(path)
        problem = Problem(key=key, message=message, where=self.where(key), value=repr(text), hint=hint)
        if problem not in self.problems:
            self.problems.append(problem)
