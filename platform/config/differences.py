"""Differences between two stored configs."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import yaml

from rl_platform.config.source import CoreLoader, Tree

SILENT_KEYS = {"runner.resume"}  # the view shows the step that a run is resumed from


def differences(earlier: str, now: str) -> list[str]:
    """Returns `KEY BEFORE -> AFTER` for every key in which two configs differ, nothing if one cannot be read."""
    try:
        before, after = flat_values(earlier), flat_values(now)
    except (yaml.YAMLError, AttributeError):
        return []
    keys = [key for key in (*before, *(key for key in after if key not in before)) if key not in SILENT_KEYS]
    return [f"{key} {shown(before, key)} -> {shown(after, key)}" for key in keys if before.get(key) != after.get(key)]


def flat_values(text: str) -> dict[str, object]:
    """Returns the values of a config by their dotted keys. Raises YAMLError, and AttributeError for no mapping."""
    return flat(yaml.load(text, CoreLoader))


def shown(values: dict[str, object], key: str) -> str:
    """Returns the value of a key as one line of YAML."""
    if key not in values:
        return "(not set)"
    return yaml.safe_dump(values[key], default_flow_style=True, width=10**6).removesuffix("\n...\n").rstrip()


def flat(tree: Mapping[str, object], prefix: str = "", whole: Collection[str] = ()) -> Tree:
    """Returns the values of nested sections by their dotted keys; sections of the keys `whole` are single values."""
    values: Tree = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, dict) and value and key not in whole:
            values |= flat(value, f"{key}.", whole)
        else:
            values[key] = value
    return values
