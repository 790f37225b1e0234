"""Sections, keys and defaults of the schema, by their dotted paths."""

from __future__ import annotations

import types
from functools import cache
from typing import Annotated, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from rl_platform.config.schema import Config
from rl_platform.config.schema.section import Section


def section_of(annotation: object) -> type[Section] | None:
    """Returns the section class behind an annotation such as `Model | None`, or None for a plain value."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        return next((section for section in map(section_of, get_args(annotation)) if section), None)
    return None


@cache
def section_at(path: str) -> type[Section] | None:
    """Returns the section class at a dotted path ("" is the whole config, `[0]` an item of a list), None if there is
    none."""
    section: type[Section] | None = Config
    for step in path.split(".") if path else ():
        name = step.partition("[")[0]
        if section is None or name not in section.model_fields:
            return None
        annotation = section.model_fields[name].annotation
        section = section_of(get_args(annotation)[0] if get_origin(annotation) is list else annotation)
    return section


def field_at(path: str) -> FieldInfo | None:
    """Returns the field at a dotted path, None where the schema has no such key."""
    parent, _, name = path.rpartition(".")
    section = section_at(parent)
    return section.model_fields.get(name) if section is not None else None


def is_known(path: str) -> bool:
    """Returns True if the schema accepts a key at a dotted path, also inside a mapping whose keys are free."""
    parent, _, name = path.rpartition(".")
    section = section_at(parent)
    return is_known(parent) if section is None else name.partition("[")[0] in section.model_fields


@cache
def default_tree(section: type[Section] = Config) -> dict[str, object]:
    """Returns the defaults of all keys that have one, as plain nested values. All callers share it: read only."""
    tree: dict[str, object] = {}
    for name, field in section.model_fields.items():
        inner = section_of(field.annotation)
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        if inner is not None and (default is not None or field.is_required()):
            tree[name] = default_tree(inner)
        elif not field.is_required():
            tree[name] = list(default) if isinstance(default, tuple) else default
    return tree
