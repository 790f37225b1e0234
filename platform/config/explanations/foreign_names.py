"""Names of other systems for the keys of the config, from `names.yaml`. No value is converted."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml


@dataclass(frozen=True)
class ForeignName:
    """A key of another system. `here`: our keys for it, possibly none; `note`: a difference in meaning."""

    system: str
    here: tuple[str, ...]
    note: str = ""


@dataclass(frozen=True)
class _Table:
    sections: dict[str, tuple[str, str]]
    keys: dict[str, ForeignName]
    systems: dict[str, dict[str, ForeignName]]


_COMPONENTS = {
    "policy": "actor",
    "value": "critic",
    "ref": "reference",
    "reward_model": "reward",
}  # names of components in other systems


def translate(path: str, system: str | None = None) -> ForeignName | None:
    """Returns our name for a dotted path of another system. The longest listed ending decides; `-` counts as `_`.

    With `system` only the names of that one are read.
    """
    names = foreign_keys() if system is None else _read().systems.get(system, {})
    steps = path.replace("-", "_").split(".")
    endings = (".".join(steps[start:]) for start in range(len(steps)))
    name = next((name for ending in endings if (name := names.get(ending)) is not None), None)
    return name and replace(name, here=tuple(of_component(path, name.here)))


def of_component(path: str, keys: Sequence[str]) -> list[str]:
    """Returns those of `keys` that belong to a component in a path of another system, or else all of them."""
    components = {_COMPONENTS.get(step, step) for step in path.split(".")}
    return [key for key in keys if key.partition(".")[0] in components] or list(keys)


def foreign_sections() -> dict[str, tuple[str, str]]:
    """Returns the top-level sections of other systems: their system, and where their keys go here."""
    return _read().sections


def foreign_keys() -> dict[str, ForeignName]:
    """Returns the endings of other systems' paths. If two systems share a name, the first in the file counts."""
    return _read().keys


@functools.cache
def _read() -> _Table:
    """Reads the file, once, at the first unknown key."""
    table = yaml.safe_load(Path(__file__).with_name("names.yaml").read_text(encoding="utf-8"))
    keys: dict[str, ForeignName] = {}
    systems: dict[str, dict[str, ForeignName]] = {}
    for system, names in table["keys"].items():
        for name, entry in names.items():
            here = entry["here"] if isinstance(entry, dict) else entry
            note = entry["note"] if isinstance(entry, dict) else ""
            foreign = ForeignName(system, (here,) if isinstance(here, str) else tuple(here), note)
            systems.setdefault(system, {})[name] = foreign
            keys.setdefault(name, foreign)
    return _Table({name: (system, target) for name, (system, target) in table["sections"].items()}, keys, systems)
