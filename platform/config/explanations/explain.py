"""Turns pydantic's validation errors into problems in plain words: key, value, what is allowed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from functools import cache

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rl_platform.config.describe import field_at, section_at
from rl_platform.config.explanations.accepted_values import allowed, choices, walk
from rl_platform.config.explanations.foreign_names import ForeignName, foreign_sections, of_component, translate
from rl_platform.config.layers import dotted
from rl_platform.config.python_values import OVERRIDES
from rl_platform.config.source import COMMAND_LINE
from rl_platform.errors import Problem, shown
from rl_platform.suggest import ALIKE, SURE, did_you_mean, nearest

Where = Callable[[str], str]

_KINDS: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "text", list: "a list"}
_MAPPINGS = ("dict_type", "model_type", "model_attributes_type")


def explain(error: ValidationError, where: Where) -> list[Problem]:
    """Returns one problem for each of pydantic's errors; for a section of another system, one per known key."""
    problems: dict[tuple[str, str], Problem] = {}
    for detail in error.errors(include_url=False):
        key = dotted(detail["loc"])
        if detail["type"] == "extra_forbidden":
            explained = list(_unknown(key, detail["input"], where))
        elif detail["type"] == "missing":
            explained = [_missing(detail, key, where)]
        else:
            explained = [_wrong(detail, key, where)]
        problems.update({(problem.key, problem.message): problem for problem in explained})
    return list(problems.values())


def _missing(detail: ErrorDetails, key: str, where: Where) -> Problem:
    if isinstance(detail["loc"][-1], int):
        parent = dotted(detail["loc"][:-1])
        return Problem(parent, "too few entries", where=where(parent), allowed=_allowed(parent))
    field = field_at(key)
    meaning = f" ({field.description})" if field is not None and field.description else ""
    place, section, hint = where(key), key.rpartition(".")[0], ""
    if section and place in (COMMAND_LINE, OVERRIDES):
        hint = f"a value of {section} replaces the whole section; {section}.KEY sets one key of it"
    return Problem(key, f"this key is required{meaning}", where=place, allowed=_allowed(key), hint=hint)


def _wrong(detail: ErrorDetails, key: str, where: Where) -> Problem:
    kind, value = detail["type"], detail["input"]
    hint = ""
    if kind == "literal_error":
        message = "not one of the allowed values"
        field = field_at(key.partition("[")[0])
        hint = did_you_mean(str(value), choices(field.annotation) if field is not None else [])
    elif kind.endswith("_type") or kind.startswith(("int_", "float_", "bool_")):
        here = "nothing stands here" if value is None else f"this is {_KINDS.get(type(value), 'a mapping')}"
        message = f"the wrong type: {here}"
        hint = _type_hint(kind, value)
    elif kind in ("greater_than", "greater_than_equal", "less_than", "less_than_equal"):
        message = "out of range"
    elif kind == "finite_number":
        message = "must be a finite number"
    elif kind in ("too_short", "string_too_short"):
        message = "must not be empty"
    elif kind == "too_long":
        message = "too many entries"
    elif kind == "string_pattern_mismatch":  # of all patterns: ^[\w.-]+$
        message = "names of metrics contain it, so it may have letters, digits, _, . and - only"
        hint = "for example " + re.sub(r"[^\w.-]+", "_", str(value))
    else:
        message = detail["msg"]
    return Problem(key, message, where=where(key), value=shown(value), allowed=_allowed(key), hint=hint)


def _allowed(key: str) -> str:
    field = field_at(key) or field_at(key.partition("[")[0])
    return allowed(field) if field is not None else ""


def _type_hint(kind: str, value: object) -> str:
    if isinstance(value, str):
        if kind.startswith("bool") and value.lower() in ("yes", "on", "y", "no", "off", "n"):
            return f"write {'true' if value.lower() in ('yes', 'on', 'y') else 'false'}"
        if kind.startswith(("int", "float")) and _is_number(value):
            return "write the number without quotes"
        if kind.startswith("bool") and value.lower() in ("true", "false"):
            return "write it without quotes"
    if kind.startswith("int") and isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return f"write {int(value)}"
    if kind.startswith("bool") and value in (0, 1) and not isinstance(value, bool):
        return f"write {'true' if value else 'false'}"
    if kind.startswith("string") and value is not None and not isinstance(value, list | dict):
        return "put it in quotes"
    if kind in _MAPPINGS and value is None:
        return "leave the key out to get the defaults"
    return ""


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def _unknown(key: str, value: object, where: Where) -> Iterator[Problem]:
    parent, _, name = key.rpartition(".")
    if field_at(key) is not None:  # one name, such as `runner.seed`
        hint = f"names hold no dots: write {name} inside the section {parent}"
        yield Problem(key, "unknown key", where=where(key), hint=hint)
        return
    inside = list(_inside(key, value, where)) if isinstance(value, dict) and value else []
    if key in foreign_sections():
        system, target = foreign_sections()[key]
        message = f"`{name}` is {system}'s section; here its keys go to {target}"
        yield from inside or [Problem(key, message, where=where(key))]
        return
    foreign = translate(key)
    if foreign is not None and not (inside and foreign.here):
        yield _foreign(key, foreign, where)
        return
    if foreign is not None or any(translate(problem.key) for problem in inside):
        yield from inside
        return
    section = section_at(parent)
    names = list(section.model_fields) if section is not None else []
    close = nearest(name, names, ALIKE)
    if not parent and name.startswith(("x-", "_", ".")) and isinstance(value, dict):
        hint = "define an anchor where it is first used, as actor: {optim: &name {lr: 1e-4}}"
    elif elsewhere := _keys_named(key):
        hint = f"this key belongs to {elsewhere}"
    elif close:
        hint = f"did you mean {parent + '.' if parent else ''}{close}?"
    else:
        far = nearest(name, {path.rpartition(".")[2] for path in _our_keys()}, SURE)
        hint = f"did you mean {_keys_named(f'{parent}.{far}')}?" if far else ""
    yield Problem(
        key, f"unknown {'key' if parent else 'section'}", where=where(key), allowed=", ".join(names), hint=hint
    )


def _inside(key: str, value: object, where: Where) -> Iterator[Problem]:
    """Yields one problem for each key below an unknown section."""
    if isinstance(value, dict) and value:
        for name, item in value.items():
            yield from _inside(f"{key}.{name}", item, where)
        return
    if (foreign := translate(key)) is not None:
        yield _foreign(key, foreign, where)
    elif ours := _keys_named(key, together=1 if "_" in key.rpartition(".")[2] else 2):  # `name` alone says nothing
        yield Problem(key, f"unknown key; here it is {ours}", where=where(key))
    else:
        yield Problem(key, "unknown key", where=where(key), hint=_around(key))


def _around(key: str) -> str:
    """Returns where the section around an unknown key of another system belongs, "" if there is no such section."""
    while key := key.rpartition(".")[0]:
        name = key.rpartition(".")[2]
        if (foreign := translate(key)) is not None:
            return f"`{name}` is {' and '.join(foreign.here)} here" if foreign.here else f"`{name}`: {foreign.note}"
        if key in foreign_sections():
            return f"keys of `{name}` go to {foreign_sections()[key][1]}"
    return ""


def _foreign(key: str, foreign: ForeignName, where: Where) -> Problem:
    name = key.rpartition(".")[2]
    here = f"here it is {' and '.join(foreign.here)}" if foreign.here else "there is no such key here"
    return Problem(key, f"`{name}` is {foreign.system}'s name; {here}", where=where(key), hint=foreign.note)


@cache
def _our_keys() -> tuple[str, ...]:
    return tuple(key for key, _ in walk())


def _keys_named(path: str, together: int = 1) -> str:
    """Returns our keys that end as `path` does, "a.b or c.b": with as many of its steps as possible, at least
    `together`; at most four; "" if there is none."""
    steps, ours = path.split("."), _our_keys()
    for start in range(len(steps) - together + 1):
        if same := [key for key in ours if key.split(".")[start - len(steps) :] == steps[start:]]:
            return " or ".join(of_component(path, same)[:4])
    return ""
