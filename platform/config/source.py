"""Reads YAML into plain Python values and stores the line of every key.

Scalars follow YAML 1.2's core rules: `1e-5` is a number, `1:0` and `off` are text, `010` is ten; a number may also hold
underscores (`10_000`). Keys are text and unique. The schema gives the keys their meaning. Two tags are allowed:
`!unset` and `!replace` control how a file is merged into the one it extends.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator
from typing import Any

import yaml

from rl_platform.errors import Problem, shortened

Tree = dict[str, Any]  # nested values of a config
COMMAND_LINE = "command line"
_CORE = "tag:yaml.org,2002:"
UNSET_TAG, REPLACE_TAG = "!unset", "!replace"
_PLACEMENT = "cluster.component_placement"
MAX_DEPTH = 50  # of nested sections and lists
MAX_SIZE = 500_000  # characters of all values, and one for each of them: an alias repeats its target
_MAX_WHOLE = 2**63  # exclusive limit of int64, the type of files and libraries


class _Unset:
    """The value of a key that is tagged `!unset`."""

    def __repr__(self) -> str:
        return "!unset"


UNSET = _Unset()


class Replacement(Tree):
    """A section that is tagged `!replace`."""


class _TooLarge(Exception):
    """The values of a text have more than `MAX_SIZE` characters."""


class CoreLoader(yaml.SafeLoader):
    """PyYAML's parser with the scalars of YAML 1.2 instead of 1.1 (no sexagesimals, dates, yes/no, octal 010)."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own attribute
    depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Calls PyYAML's method, which calls this one for nested nodes, and limits the depth."""
        if self.depth > MAX_DEPTH:
            message = f"more than {MAX_DEPTH} sections and lists inside each other"
            raise yaml.MarkedYAMLError(problem=message, problem_mark=self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        self.depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self.depth -= 1
        return node


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
    """Turns one YAML text into values. `where` maps dotted key paths to `file:line`, `problems` is what is wrong.

    numbered False: the user does not see the text, so places are the label alone.
    """

    def __init__(self, label: str, numbered: bool = True) -> None:
        self.label, self.numbered = label, numbered
        self.where: dict[str, str] = {}
        self.problems: list[Problem] = []
        self._open: list[yaml.Node] = []
        self._size = 0

    def read(self, text: str, path: str = "") -> object:
        """Returns the value of `text`, whose keys lie under `path`. None if it cannot be read at all.

        A value may be `UNSET`, and a mapping a `Replacement`.
        """
        try:
            node = yaml.compose(text, Loader=CoreLoader)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            reason = " ".join(part for part in (error.context, error.problem) if part)
            self._complain(path or "config", f"not readable as YAML: {reason}", self._place(mark))
            return None
        except (yaml.YAMLError, ValueError, OverflowError) as error:
            # an unprintable character, whose error has no mark; an escape beyond Unicode; a version of 5,000 digits
            self._complain(path or "config", f"not readable as YAML: {str(error).splitlines()[0]}", self.label)
            return None
        try:
            return None if node is None else self._value(node, path)
        except _TooLarge:
            message = f"the values have more than {MAX_SIZE} characters, each alias counted with all that it repeats"
            self._complain(path or "config", message, self.label)
            return None

    def _place(self, mark: yaml.Mark | None) -> str:
        return f"{self.label}:{mark.line + 1}" if self.numbered and mark is not None else self.label

    def _complain(self, key: str, message: str, where: str, **details: str) -> None:
        self.problems.append(Problem(key=key, message=message, where=where, **details))

    def _value(self, node: yaml.Node, path: str) -> object:
        self.where.setdefault(path, self._place(node.start_mark))
        self._size += 1 + (len(node.value) if isinstance(node, yaml.ScalarNode) else 0)
        if self._size > MAX_SIZE:
            raise _TooLarge
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path)
        if any(node is outer for outer in self._open):
            self._complain(path, "this alias contains itself", self.where[path])
            return None
        self._open.append(node)
        try:
            if isinstance(node, yaml.MappingNode):
                values = self._mapping(node, path)
                return Replacement(values) if node.tag == REPLACE_TAG else values
            return [self._value(item, f"{path}[{index}]") for index, item in enumerate(node.value)]
        finally:
            self._open.pop()
            if node.tag not in (_CORE + "map", _CORE + "seq"):
                self._check_tag(node, path)

    def _check_tag(self, node: yaml.Node, path: str) -> None:
        """Complains of a tag that is not allowed at this node."""
        place, in_list = self._place(node.start_mark), any(isinstance(n, yaml.SequenceNode) for n in self._open)
        if node.tag not in (UNSET_TAG, REPLACE_TAG):
            hint = f"plain YAML, {UNSET_TAG} and {REPLACE_TAG} only"
            self._complain(path, f"the tag {node.tag!r} is not allowed", place, hint=hint)
        elif in_list:
            self._complain(path, f"{node.tag} is inside a list, and lists are never merged", place)
        elif node.tag == UNSET_TAG and node.value:
            self._complain(
                path, "!unset takes no value", place, value=shortened(str(node.value)), hint="as key: !unset"
            )
        elif node.tag == REPLACE_TAG and not isinstance(node, yaml.MappingNode):
            self._complain(
                path, "only sections are merged: a list or a value always replaces", place, hint="remove !replace"
            )

    def _mapping(self, node: yaml.MappingNode, path: str) -> Tree:
        values: Tree = {}
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
            if not key.isprintable():
                message = "a key contains characters that cannot be printed"
                self._complain(path or "config", message, place, value=shortened(ascii(key)))
                continue
            full = f"{path}.{key}" if path else key
            if key in values:
                first = f"the first is in line {lines[key]}" if self.numbered else ""
                self._complain(full, "this key appears twice", place, hint=first)
                continue
            self.where[full], lines[key] = place, key_node.start_mark.line + 1
            values[key] = self._value(value_node, full)
        for inherited in merged:
            for key, value in self._inherited(inherited, path):
                values.setdefault(key, value)
        return values

    def _inherited(self, node: yaml.Node, path: str) -> Iterator[tuple[str, object]]:
        """Yields the entries of a `<<` merge; keys of the mapping itself come first."""
        if any(node is outer for outer in self._open):
            self._complain(path, "this alias contains itself", self._place(node.start_mark))
            return
        if not isinstance(node, yaml.MappingNode):
            self._complain(path or "config", "`<<` merges mappings only", self._place(node.start_mark))
            return
        values = self._value(node, path)
        assert isinstance(values, dict)
        yield from values.items()

    def _scalar(self, node: yaml.ScalarNode, path: str) -> object:
        text: str = node.value
        kind = node.tag.removeprefix(_CORE)
        if any(mark == "\0" or "\ud800" <= mark <= "\udfff" for mark in text):
            message = "the text contains a NUL or half a surrogate pair, which no path or text file can contain"
            self._complain(path, message, self._place(node.start_mark), value=shortened(ascii(text)))
            return None
        # a placement is always text: 0 means "0", and nothing may turn 1:0 into a number
        if kind == "str" or (kind in ("int", "float") and path.startswith(_PLACEMENT)):
            return text
        try:
            if kind == "null":
                return None
            if kind == "bool":
                return {"true": True, "false": False}[text.lower()]
            if kind in ("int", "float"):
                return self._number(text, kind, node, path)
        except (ValueError, KeyError):
            self._complain(path, f"{shortened(repr(text))} is no {kind}", self._place(node.start_mark))
            return None
        self._check_tag(node, path)
        return UNSET if node.tag == UNSET_TAG else None

    def _number(self, text: str, kind: str, node: yaml.ScalarNode, path: str) -> int | float | None:
        """Returns the number in `text`, None with a problem if it is too large. Raises ValueError if it is none."""
        infinite = re.sub(r"\.(?=inf|nan)", "", text.lower())
        if kind == "float" and (infinite != text.lower() or math.isfinite(float(infinite))):
            return float(infinite)
        if kind == "int" and len(text) < 100:
            number = int(text, 0) if text[:2] in ("0x", "0o") else int(text)
            if -_MAX_WHOLE <= number < _MAX_WHOLE:
                return number
        allowed = "-2^63 to 2^63 - 1" if kind == "int" else f"up to {sys.float_info.max:.2g}"
        self._complain(
            path, "the number is too large", self._place(node.start_mark), value=shortened(text), allowed=allowed
        )
        return None
