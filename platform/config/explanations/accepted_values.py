"""Describes the values that each key accepts, in words, for messages and the page of all keys."""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal, Union, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from rl_platform.config.describe import section_of
from rl_platform.config.schema import Config
from rl_platform.config.schema.section import Section

_WORDS: dict[object, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    object: "anything",
}


def walk(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    """Yields all keys of a section as (dotted path, field), each section before its keys. Items of lists are not
    entered."""
    for name, field in section.model_fields.items():
        yield f"{prefix}{name}", field
        inner = section_of(field.annotation)
        if inner is not None:
            yield from walk(inner, f"{prefix}{name}.")


def allowed(field: FieldInfo) -> str:
    """Returns what a key accepts, in words: "a number from 0 to 1, or null"."""
    return _accepts(field.annotation, field.metadata)


def choices(annotation: object) -> list[str]:
    """Returns the members of the Literals in an annotation, [] if it has none."""
    if get_origin(annotation) is Literal:
        return [str(value).lower() if isinstance(value, bool) else str(value) for value in get_args(annotation)]
    return [choice for part in get_args(annotation) if not isinstance(part, FieldInfo) for choice in choices(part)]


def _accepts(annotation: object, metadata: Sequence[object]) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner = [
            item for extra in arguments[1:] for item in (extra.metadata if isinstance(extra, FieldInfo) else [extra])
        ]
        return _accepts(arguments[0], [*metadata, *inner])
    if origin in (Union, types.UnionType):
        plain = [part for part in arguments if part is not type(None)]
        null = ", or null" if len(plain) < len(arguments) else ""
        return " or ".join(_accepts(part, metadata) for part in plain) + null
    if origin is Literal:
        words = choices(annotation)
        return ", ".join(words) if len(words) > 1 else f"only {words[0]}"
    if origin is list:
        inner_words = _accepts(arguments[0], [])
        return f"a list, each item {inner_words}" if not choices(annotation) else f"a list of: {inner_words}"
    if origin is tuple:
        return f"a list of {len(arguments)}, each {_accepts(arguments[0], [])}"
    if origin is dict or section_of(annotation) is not None:
        return "a mapping"
    return _WORDS[annotation] + _range(metadata)


def _range(metadata: Sequence[object]) -> str:
    words: dict[str, object] = {}
    for bound in metadata:
        match bound:
            case annotated_types.Ge(ge=limit):
                words["at least"] = limit
            case annotated_types.Gt(gt=limit):
                words["above"] = limit
            case annotated_types.Le(le=limit):
                words["at most"] = limit
            case annotated_types.Lt(lt=limit):
                words["below"] = limit
            case annotated_types.MinLen():
                words["not empty"] = ""
    if {"at least", "at most"} <= words.keys():
        return f" from {words['at least']} to {words['at most']}"
    return f", {' and '.join(f'{word} {limit}'.strip() for word, limit in words.items())}" if words else ""
