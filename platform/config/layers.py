"""The layers of a config: files that extend each other, then the command line, each laid over those below it.

`!unset` takes an inherited key away and `!replace` keeps a section from being merged. Reading text is in `source.py`;
which inherited keys a changed choice takes away is in `rules/inheritance.py`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rl_platform.config.source import UNSET, Replacement, Tree
from rl_platform.errors import Problem
from rl_platform.suggest import nearest

_REPLACED = ("cluster.component_placement",)  # beside other keys, those below would place components twice


@dataclass
class Layers:
    """The keys of all layers so far.

    where: key -> `file:line` or "command line". written: key -> number of the last layer that wrote it, 0 for the
    lowest. trees: the whole config as it was after each layer.
    """

    tree: Tree = field(default_factory=dict)
    where: dict[str, str] = field(default_factory=dict)
    written: dict[str, int] = field(default_factory=dict)
    trees: list[Tree] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)

    def add(self, tree: Tree, where: dict[str, str]) -> None:
        """Merges another file over the layers; `where` are the places of its keys."""
        self._merge(self.tree, tree, "", where)
        self.note(where)
        self.close()

    def drop(self, key: str) -> None:
        """Removes a key from the config, and the sections that are empty without it."""
        path, _, name = key.rpartition(".")
        inner = self.tree
        for section in path.split(".") if path else ():
            inner = inner[section]
        del inner[name]
        self._forget(key)
        self.where.pop(key, None)
        if not inner and path:
            self.drop(path)

    def note(self, where: dict[str, str]) -> None:
        """Records that the layer being added writes the keys of `where`."""
        self.where.update(where)
        self.written.update(dict.fromkeys(where, len(self.trees)))

    def close(self) -> None:
        """Completes the layer."""
        self.trees.append(copy.deepcopy(self.tree))

    def put(self, section: Tree, name: str, key: str, value: object, where: dict[str, str]) -> None:
        """Sets `name` of `section`, whose full path is `key`; `where` are the places of the new keys."""
        if value is UNSET:
            if name not in section:
                message, hint = "only an inherited key can be taken away, and this one is not inherited", "remove it"
                if close := nearest(name, section):
                    hint = f"did you mean {key.removesuffix(name)}{close}?"
                self.problems.append(Problem(key, message, where=where.get(key, ""), value="!unset", hint=hint))
            section.pop(name, None)
        elif isinstance(value, dict):
            section[name] = {}
            self._merge(section[name], value, key, where)
        else:
            section[name] = value
        self._forget(key)

    def _forget(self, key: str) -> None:
        """Removes the records of all keys below `key`."""
        for known in (self.where, self.written):
            for stale in [path for path in known if path.startswith((f"{key}.", f"{key}["))]:
                del known[stale]

    def _merge(self, below: Tree, above: Tree, path: str, where: dict[str, str]) -> None:
        for name, value in above.items():
            key = f"{path}.{name}" if path else name
            if isinstance(value, Replacement) and name not in below:
                message = "!replace keeps a section from being merged with an inherited one, and there is none"
                self.problems.append(
                    Problem(key, message, where=where.get(key, ""), value="!replace", hint="remove the tag")
                )
            merged = isinstance(value, dict) and not isinstance(value, Replacement) and key not in _REPLACED
            if merged and isinstance(below.get(name), dict):
                self._merge(below[name], value, key, where)
            else:
                self.put(below, name, key, value, where)


def dotted(location: Sequence[int | str]) -> str:
    """Returns pydantic's location as a key path: ("a", "b", 0, "c") is a.b[0].c."""
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path


def steps_of(key: str) -> list[str | int]:
    """Returns the steps of a key path: `a.b[0].c` is a, b, 0, c."""
    return [int(index) if index else name for index, name in re.findall(r"\[(\d+)\]|([^.\[\]]+)", key)]


def value_at(tree: object, path: Sequence[str | int], default: object = None) -> Any:
    """Returns the value at `path` in nested mappings, sections and lists, `default` if there is none."""
    for step in path:
        try:
            entries: Any = tree if isinstance(tree, dict | list) else vars(tree)
            tree = entries[step]
        except (KeyError, IndexError, TypeError):
            return default
    return tree


def put_at(tree: Tree, key: str, value: object) -> None:
    """Sets a dotted key; sections that are missing are made."""
    *sections, name = key.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[name] = value


def is_within_any(key: str, sections: Collection[str]) -> bool:
    """Returns whether `key` is one of `sections` or a key inside one."""
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def strings_of(value: object, key: str = "") -> Iterator[tuple[str, str]]:
    """Yields the key and the value of each string in nested dicts and lists."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from strings_of(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from strings_of(inner, f"{key}[{index}]")
    elif isinstance(value, str):
        yield key, value
