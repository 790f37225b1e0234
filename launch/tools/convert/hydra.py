"""Composes a YAML file of Hydra or NeMo-RL: its `defaults`, and `${...}` references. Nothing of it is run."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from rl_platform.config.source import CoreLoader
from rl_platform.errors import ConfigError, Problem
from rl_platform.launch.tools.convert.outcome import Unresolved, Value, number
from rl_platform.text_files import NotUTF8, text_of

_FUNCTIONS: dict[str, Callable[[float, float], float]] = {
    **dict.fromkeys(("add", "sum"), operator.add),
    **dict.fromkeys(("sub", "subtract"), operator.sub),
    **dict.fromkeys(("mul", "multiply"), operator.mul),
    **dict.fromkeys(("div", "divide", "floordiv", "int_div"), operator.floordiv),
}
_ZEROS = r"[-+]?0[0-9_]*[89][0-9_]*"  # text such as 0809, which is no octal number
_BOOLEANS = r"yes|Yes|YES|no|No|NO|on|On|ON|off|Off|OFF"
_MOST_VALUES = 100_000
_DEEPEST = 20  # of files that name each other, and of references


class _WordLoader(CoreLoader):
    """Reads a value of a command line. As in Hydra, zeros before digits make text or an octal number."""


class _FileLoader(_WordLoader):
    """Reads a file. Every system here reads it as YAML 1.1, in which yes, no, on and off are true or false.

    repeated: the keys that appear again in their section, with the lines of both, from 1.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.repeated: list[tuple[str, int, int]] = []

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Composes a section as PyYAML does, which keeps the last of equal keys and drops the others."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        first: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag.endswith(":merge"):
                continue
            line = key.start_mark.line + 1
            if key.value in first:
                self.repeated.append((key.value, first[key.value], line))
            first.setdefault(key.value, line)
        return node


_WordLoader.yaml_implicit_resolvers = {
    first: [("tag:yaml.org,2002:str", re.compile(f"^(?:{_ZEROS})$")), *resolvers] if first in "-+0" else resolvers
    for first, resolvers in CoreLoader.yaml_implicit_resolvers.items()
}
_FileLoader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(f"^(?:{_BOOLEANS})$"), list("yYnNoO"))


def read_yaml(path: Path) -> Value:
    """Returns the values of one YAML file. Raises ConfigError."""
    try:
        loader = _FileLoader(text_of(path.read_bytes(), path))
        value: Value = loader.get_single_data()
        _check_aliases(value)
    except NotUTF8 as error:
        raise ConfigError([Problem(f"{path}:{error.line}", str(error), hint=error.hint)]) from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        reason = " ".join(part for part in (error.context, error.problem) if part)
        place = str(path) if mark is None else f"{path}:{mark.line + 1}"
        raise ConfigError([Problem(place, f"not readable as YAML: {reason}")]) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError([Problem(str(path), f"not readable as YAML: {str(error).splitlines()[0]}")]) from error
    if loader.repeated:
        raise ConfigError(
            [
                Problem(key, "this key appears twice", where=f"{path}:{again}", hint=f"the first is in line {line}")
                for key, line, again in loader.repeated
            ]
        )
    return value


def _check_aliases(value: Value) -> None:
    """Raises ValueError if aliases repeat so many values that no config can have them, as one that contains itself."""
    pending: list[Value] = [value]
    for _ in range(_MOST_VALUES):
        if not pending:
            return
        item = pending.pop()
        pending += item.values() if isinstance(item, dict) else item if isinstance(item, list) else ()
    raise ValueError(f"an alias contains itself, or aliases repeat more than {_MOST_VALUES:,} values")


def parsed(text: str) -> Value:
    """Returns the value of a word. Raises yaml.YAMLError."""
    value: Value = yaml.load(text, Loader=_WordLoader)
    return value


def composed(path: Path, depth: int = 0) -> tuple[dict[str, Value], list[str]]:
    """Returns the values of a file over those of its `defaults`, and the entries whose files are not there."""
    tree = read_yaml(path)
    if not isinstance(tree, dict):
        raise ConfigError([Problem(str(path), "holds no keys", allowed="a YAML mapping")])
    defaults = tree.pop("defaults", None)
    lost: list[str] = []
    base: dict[str, Value] = {}
    for entry in defaults if isinstance(defaults, list) else [defaults] if defaults else []:
        name, package = _entry(entry)
        if name is None:
            continue
        file = next((file for file in _candidates(path, name) if file.is_file()), None)
        if file is None or depth >= _DEEPEST:
            lost.append(f"{name}@{package}" if package else name)
            continue
        inner, more = composed(file, depth + 1)
        lost += more
        for section in reversed(package.split(".") if package else []):
            inner = {section: inner}
        base = merged(base, inner)
    return merged(base, tree), lost


def _entry(entry: Value) -> tuple[str | None, str]:
    """Returns the file and the section of an entry of `defaults`; no file if it sets nothing of the run."""
    if isinstance(entry, Mapping) and len(entry) == 1:
        ((group, option),) = entry.items()
        if str(group).startswith("override ") or option is None:
            return None, ""
        group, _, package = str(group).partition("@")
        return f"{group}/{option}", package
    text = str(entry)
    if text == "_self_" or text.startswith("override "):
        return None, ""
    name, _, package = text.partition("@")
    return name, package


def _candidates(path: Path, name: str) -> list[Path]:
    file = Path(name if name.endswith((".yaml", ".yml")) else f"{name}.yaml")
    return [path.parent / file, path.parent.parent / file]


def merged(base: dict[str, Value], over: Mapping[str, Value]) -> dict[str, Value]:
    """Returns `base` with the values of `over`. Mappings are merged key by key, other values are replaced."""
    both = dict(base)
    for key, value in over.items():
        inner = both.get(key)
        both[key] = merged(inner, value) if isinstance(inner, dict) and isinstance(value, Mapping) else value
    return both


def resolved(values: Mapping[str, Value]) -> dict[str, Value]:
    """Returns the values with `${...}` filled in. A value that needs an unknown one is `Unresolved`."""
    return {key: _value(value, key, values, 0) for key, value in values.items()}


def _value(value: Value, key: str, values: Mapping[str, Value], depth: int) -> Value:
    if isinstance(value, list):
        items = [_value(item, key, values, depth) for item in value]
        return next((item for item in items if isinstance(item, Unresolved)), items)
    if not isinstance(value, str) or "${" not in value:
        return value
    if depth > _DEEPEST:
        return Unresolved(value, "its references contain themselves")
    try:
        return _text(value, key, values, depth)
    except (KeyError, TypeError, ValueError, ArithmeticError, yaml.YAMLError):
        return Unresolved(value, f"{value} cannot be resolved from this file")


def _text(value: str, key: str, values: Mapping[str, Value], depth: int) -> Value:
    """Fills in the innermost references until none is left. A reference that is the whole text keeps its type."""
    while match := re.search(r"\$\{([^${}]*)\}", value):
        result = _reference(match[1].strip(), key, values, depth)
        if isinstance(result, Unresolved):
            raise ValueError
        if match[0] == value:
            return result
        if isinstance(result, str) and result.startswith("${env:"):
            result = result.replace("${", "\0")  # ours, and not one of these references
        value = value.replace(match[0], str(result), 1)
    return value.replace("\0", "${")


def _reference(inner: str, key: str, values: Mapping[str, Value], depth: int) -> Value:
    name, colon, arguments = inner.partition(":")
    if not colon:
        return _at(inner, key, values, depth)
    parts = [part.strip() for part in arguments.split(",")]
    if name in ("oc.env", "env"):
        return parts[1] if len(parts) > 1 else f"${{env:{parts[0]}}}"
    if name == "oc.select":
        try:
            return _at(parts[0], key, values, depth)
        except KeyError:
            return parsed(parts[1]) if len(parts) > 1 else None
    values_ = [parsed(part) for part in parts]
    if name == "not":
        return not values_[0]
    first, second = (number(value) for value in values_)
    return _FUNCTIONS[name](first, second)


def _at(name: str, key: str, values: Mapping[str, Value], depth: int) -> Value:
    if name.startswith("."):
        dots = len(name) - len(name.lstrip("."))
        sections = key.split(".")[:-dots]
        name = ".".join([*sections, name.lstrip(".")])
    return _value(values[name], name, values, depth + 1)
