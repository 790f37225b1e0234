"""Reads YAML into plain Python values and remembers the line of every key.

Scalars follow YAML 1.2's core rules: `1e-5` is a number, `1:0` and `off` are text, `010` is ten; a number may also hold
underscores (`10_000`). Keys are text and unique. What the keys mean is not known here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from rl_platform.errors import Problem

COMMAND_LINE = "command line"
_CORE = "tag:yaml.org,2002:"
_PLACEMENT = "cluster.component_placement"


class CoreLoader(yaml.SafeLoader):
    """PyYAML's parser with the scalars of YAML 1.2 instead of 1.1 (no sexagesimals, dates, yes/no, octal 010)."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own attribute


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?[0-9]+(_[0-9]+)*|0o[0-7]+|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(_[0-9]+)*(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
):
    CoreLoader.add_implicit_resolver(_CORE + _tag, re.compile(rf"^(?:{_pattern})$"), list(_first))


class YamlReader:
    """Turns one YAML text into values. `where` maps dotted key paths to `file:line`, `problems` is what is wrong."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.where: dict[str, str] = {}
        self.problems: list[Problem] = []
        self._open: set[int] = set()

    def read(self, text: str, path: str = "") -> Any:
        """The value of `text`, whose keys lie under `path`. None if it cannot be read at all."""
        try:
            node = yaml.compose(text, Loader=CoreLoader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            reason = " ".join(part for part in (error.context, error.problem) if part)
            self._complain(path or "config", f"not readable as YAML: {reason}", self._place(mark))
            return None
        except yaml.YAMLError as error:  # an unprintable character: this error has no mark
            self._complain(path or "config", f"not readable as YAML: {str(error).splitlines()[0]}", self.label)
            return None
        return None if node is None else self._value(node, path)

    def _place(self, mark: yaml.Mark | None) -> str:
        return self.label if mark is None or self.label == COMMAND_LINE else f"{self.label}:{mark.line + 1}"

    def _complain(self, key: str, message: str, where: str, **details: str) -> None:
        self.problems.append(Problem(key=key, message=message, where=where, **details))

    def _value(self, node: yaml.Node, path: str) -> Any:
        self.where.setdefault(path, self._place(node.start_mark))
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if id(node) in self._open:
            self._complain(path, "this alias contains itself", self.where[path])
            return None
        self._open.add(id(node))
        try:
            if isinstance(node, yaml.MappingNode):
                return self._mapping(node, path)
            return [self._value(item, f"{path}[{index}]") for index, item in enumerate(node.value)]
        finally:
            self._open.discard(id(node))

    def _mapping(self, node: yaml.MappingNode, path: str) -> dict[str, Any]:
        values: dict[str, Any] = {}
        lines: dict[str, int] = {}
        merged: list[yaml.Node] = []
        for key_node, value_node in node.value:
            place = self._place(key_node.start_mark)
            if key_node.tag == _CORE + "merge":
                merged += value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                self._complain(path or "config", "a key must be text", place)
                continue
            key = key_node.value
            full = f"{path}.{key}" if path else key
            if key in values:
                first = f"the first is in line {lines[key]}" if self.label != COMMAND_LINE else ""
                self._complain(full, "this key stands here twice", place, hint=first)
                continue
            self.where[full], lines[key] = place, key_node.start_mark.line + 1
            values[key] = self._value(value_node, full)
        for inherited in merged:
            for key, value in self._inherited(inherited, path):
                values.setdefault(key, value)
        return values

    def _inherited(self, node: yaml.Node, path: str) -> Iterator[tuple[str, Any]]:
        """Entries of a `<<` merge; keys of the mapping itself come first."""
        if not isinstance(node, yaml.MappingNode):
            self._complain(path or "config", "`<<` merges mappings only", self._place(node.start_mark))
            return
        yield from self._value(node, path).items()

    def _scalar(self, node: yaml.ScalarNode, path: str) -> Any:
        text: str = node.value
        kind = node.tag.removeprefix(_CORE)
        try:
            # a placement is always text: 0 means "0", and nothing may turn 1:0 into a number
            if kind == "str" or (kind in ("int", "float") and path.startswith(_PLACEMENT)):
                return text
            if kind == "null":
                return None
            if kind == "bool":
                return {"true": True, "false": False}[text.lower()]
            if kind == "int":
                return int(text, 0) if text[:2] in ("0x", "0o") else int(text)
            if kind == "float":
                return float(re.sub(r"\.(?=inf|nan)", "", text.lower()))
        except (ValueError, KeyError):
            self._complain(path, f"{text!r} is no {kind}", self._place(node.start_mark))
            return None
        self._complain(
            path, f"the tag {node.tag!r} is not allowed", self._place(node.start_mark), hint="plain YAML only"
        )
        return None
