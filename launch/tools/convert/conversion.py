"""Applies the table of a system to the keys of a file."""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from pydantic import ValidationError

from rl_platform.config.describe import default_tree
from rl_platform.config.explanations.foreign_names import translate
from rl_platform.config.layers import put_at, steps_of, value_at
from rl_platform.config.rules import without_effect
from rl_platform.config.schema import Config
from rl_platform.config.schema.config import complete_models
from rl_platform.config.source import Tree
from rl_platform.launch.start_checks.model_problems import context_sizes
from rl_platform.launch.tools.convert.key_tables import KeyTable, read_table
from rl_platform.launch.tools.convert.outcome import (
    ForeignConfig,
    Named,
    Outcome,
    Rule,
    Table,
    Unresolved,
    Value,
    same,
    to,
    untranslated,
)
from rl_platform.placement.estimates.component_shapes import shapes
from rl_platform.placement.estimates.model_shape import ModelShape


@dataclass(frozen=True)
class System:
    """A system whose configs can be read. Its keys are in `<name>.yaml`.

    name: of `--from`; title: as in `names.yaml`; marks: keys and patterns that identify its configs;
    rules: of keys whose values are computed; leaves: keys whose value is a mapping; kinds: the groups of defaults that
    a config has, by its keys; stand_ins: files that a config names, each with a name that it defines and its text.
    """

    name: str
    title: str
    marks: Sequence[str]
    rules: Table
    leaves: Sequence[str] = ()
    kinds: Callable[[Mapping[str, Value]], Sequence[str]] = lambda _: ["all"]
    stand_ins: Callable[[ForeignConfig, Mapping[str, Value]], dict[str, tuple[str, str]]] = lambda *_: {}

    @cached_property
    def table(self) -> Table:
        return {**self._read.rules(), **self.rules}

    @cached_property
    def _patterns(self) -> list[str]:
        """Long ones first: they are the narrower ones."""
        return sorted((name for name in self.table if "*" in name), key=len, reverse=True)

    @cached_property
    def _read(self) -> KeyTable:
        return read_table(self.name)

    def entry(self, key: str) -> str | Rule | Named | None:
        """Returns the rule of a foreign key, or of the first pattern that fits."""
        pattern = next((name for name in self._patterns if fnmatch.fnmatchcase(key, name)), "")
        return self.table.get(key) or self.table.get(pattern)

    def defaults(self, given: Mapping[str, Value]) -> dict[str, Value]:
        return {key: value for kind in self.kinds(given) for key, value in self._read.defaults[kind].items()}


@dataclass(frozen=True)
class TranslatedKey:
    """The result of one foreign key. given: the file names it; else it is a default of the system."""

    key: str
    value: Value
    outcome: Outcome
    given: bool = True


@dataclass
class Conversion:
    """values: our keys and their values; origins: the rows that wrote each; stand_ins: as of the system."""

    system: System
    rows: list[TranslatedKey]
    values: dict[str, Value] = field(default_factory=dict)
    origins: dict[str, list[TranslatedKey]] = field(default_factory=dict)
    stand_ins: dict[str, tuple[str, str]] = field(default_factory=dict)

    def of(self, status: str, *, given: bool = True) -> list[TranslatedKey]:
        return [row for row in self.rows if row.outcome.status == status and row.given is given]

    def tree(self) -> Tree:
        tree: Tree = {}
        for key, value in self.values.items():
            put_at(tree, key, copy.deepcopy(value))
        return tree


def convert(system: System, given: Mapping[str, Value]) -> Conversion:
    """Translates every key of a file, then the defaults of the system that differ from ours.

    Values that the known models do not allow become the nearest ones."""
    done = Conversion(system, [])
    defaults = system.defaults(given)
    source = ForeignConfig(given, defaults)
    for key, value in given.items():
        done.rows.append(_placed(done, TranslatedKey(key, value, _outcome(system, key, value, source))))
    ours = default_tree()
    for key, value in defaults.items():
        if key in given and not isinstance(given[key], Unresolved):
            continue
        outcome = _outcome(system, key, value, source)
        new = {name: each for name, each in outcome.values.items() if name not in done.values}
        different = {name: each for name, each in new.items() if value_at(ours, steps_of(name)) != each}
        if different or outcome.status == "untranslated":
            done.rows.append(_placed(done, TranslatedKey(key, value, replace(outcome, values=different), given=False)))
    _prune(done)
    _fit(done)
    done.stand_ins = system.stand_ins(source, done.values)
    return done


def rule_of(system: System, key: str) -> Rule | None:
    """Returns the rule of a foreign key: its own, of a pattern, or a plain rename of `names.yaml`."""
    if (entry := system.entry(key)) is not None:
        return to(entry) if isinstance(entry, str) else entry.rule(key) if isinstance(entry, Named) else entry
    name = translate(key, system.title)
    if name is not None and name.here and not name.note:
        return to(*name.here)
    if name is not None and name.note:
        note = name.note
        return lambda *_: untranslated(note)
    return None


def _outcome(system: System, key: str, value: Value, source: ForeignConfig) -> Outcome:
    if isinstance(value, Unresolved):
        return untranslated(value.why)
    if (rule := rule_of(system, key)) is None:
        return same("not set") if value in (None, [], {}) else untranslated("no counterpart is known")
    try:
        return rule(value, source)
    except (TypeError, ValueError, ArithmeticError, AttributeError, LookupError, SyntaxError):
        return untranslated(f"not a value of this key in {system.title}")


def _placed(done: Conversion, row: TranslatedKey) -> TranslatedKey:
    """Takes over the values of a row. A key that an earlier row set to another value makes it untranslated."""
    values = row.outcome.values
    clash = next((key for key in values if key in done.values and done.values[key] != values[key]), None)
    if clash is not None:
        other = done.origins[clash][0].key
        return replace(row, outcome=untranslated(f"{clash} has another value from {other}"))
    for key, value in values.items():
        done.values[key] = value
        done.origins.setdefault(key, []).append(row)
    return row


def _prune(done: Conversion) -> None:
    """Takes out the keys that have no effect beside the others: the loader would refuse them."""
    while silent := _silent(done):
        for key in silent:
            del done.values[key]
            del done.origins[key]
        done.rows = [row for row in (_without(row, silent) for row in done.rows) if row is not None]


def _silent(done: Conversion) -> dict[str, str]:
    """Returns the written keys without effect, and why. Keys that the schema refuses are left out of the judgement."""
    if (config := _accepted(done)) is None:
        return {}
    reasons = {unread.key: unread.reason for unread in without_effect(config)}
    return {
        key: reason
        for key, value in done.values.items()
        for name, reason in reasons.items()
        if value is not None and (key == name or key.startswith(f"{name}."))
    }


def _accepted(done: Conversion) -> Config | None:
    """Returns the config without the keys that the schema refuses. None if that is not enough."""
    tree = done.tree()
    tree.setdefault("cluster", {}).setdefault("component_placement", {})
    tree.setdefault("runner", {}).setdefault("task_type", "reasoning")
    while True:
        try:
            return Config.model_validate(complete_models(copy.deepcopy(tree)))
        except ValidationError as error:
            for detail in error.errors(include_url=False):
                *sections, name = detail["loc"][:2] if detail["type"] == "missing" else detail["loc"]
                inner = value_at(tree, sections)
                if not isinstance(inner, dict) or name not in inner:
                    return None
                del inner[name]


def _fit(done: Conversion) -> None:
    """Writes the nearest numbers of context ranks, and targets of adapters, that the models have."""
    config = _accepted(done)
    known = shapes(config)[0] if config is not None else {}
    for role in ("actor", "critic", "reference"):
        shape = known.get(role)
        if config is None or not isinstance(shape, ModelShape):
            continue
        section, context = config.section(role), f"{role}.parallel.context"
        fitting = context_sizes(section, shape.heads, shape.kv_heads)
        if context in done.values and section.parallel.context not in fitting:
            nearest = max(size for size in fitting if size < section.parallel.context)
            _replace(done, context, {context: nearest}, "context ranks have equal shares of a tensor rank's heads here")
        adapters = next((key for key in done.values if key.startswith(f"{role}.lora.")), None)
        if adapters is not None and section.lora is not None:
            targets = [name for name in section.lora.target_modules if name in shape.linear_layers]
            if 0 < len(targets) < len(section.lora.target_modules):
                _replace(done, adapters, {f"{role}.lora.target_modules": targets}, "experts have no adapters here")


def _replace(done: Conversion, key: str, values: Mapping[str, Value], why: str) -> None:
    """Makes the rows of `key` untranslated, with `values` as the nearest."""
    for row in done.origins[key]:
        new = replace(row, outcome=untranslated(why, {**row.outcome.values, **values}))
        done.rows[done.rows.index(row)] = new
        done.values.update(new.outcome.values)
        done.origins |= {name: [new] for name in new.outcome.values}


def _without(row: TranslatedKey, silent: Mapping[str, str]) -> TranslatedKey | None:
    """Returns the row without keys that have no effect. None for a default of which nothing is left."""
    lost = [key for key in row.outcome.values if key in silent]
    if not lost:
        return row
    left = {key: value for key, value in row.outcome.values.items() if key not in silent}
    if left or row.outcome.status == "untranslated":
        return replace(row, outcome=replace(row.outcome, values=left))
    return replace(row, outcome=same(f"no effect: {silent[lost[0]]}")) if row.given else None
