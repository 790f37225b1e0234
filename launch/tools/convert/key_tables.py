"""Reads the table of a system (`rlinf.yaml`, ...): what becomes of its keys, as far as no computation is needed.

A table is a list of blocks. A block groups keys, separated by blanks, by our key that they share, or by the reason.
A key with `*` is a pattern. `<name>` is replaced by each entry of `roles`, or by a text of `REASONS`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, Field

from rl_platform.launch.tools.convert.outcome import (
    REASONS,
    ForeignConfig,
    Rule,
    Scalar,
    choice,
    contained,
    detail,
    dtype,
    interval,
    lacking,
    off,
    only,
    to,
    top_k,
    while_,
)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class _Renamed(_Strict):
    """to: one of our keys, or several that get the same value; why: a note."""

    to: str | list[str]
    why: str = ""


class _Only(_Strict):
    """values: those that need no key here, for the reason `why`; otherwise: why the others cannot be expressed."""

    values: list[Scalar | dict[str, str]]
    why: str
    otherwise: str


class _Choice(_Strict):
    """names: our value for each of the system's, or the names that both have."""

    to: str | list[str]
    names: list[str] | dict[Scalar, Scalar]
    why: str = ""


_Condition = dict[str, bool | list[Scalar]]


class Block(_Strict):
    """Keys under one condition. If it does not hold, the system does not read them, for the reason `otherwise`.

    under: begins every foreign key of the block. applies: keys of which one must be true, or have one of the listed
    values; excluded: none may. unchanged: keys that have the same name here. to: our key of each. contained: for each
    of our keys, those whose values the rule of another key writes into it. same, if_off, lacking: for each reason, keys
    that need no key here, that must be off, or that cannot be expressed. only, choice: by value. dtype, interval,
    top_k: our key of each, converted by the function of that name in `outcome.py`.
    """

    under: str = ""
    applies: _Condition = Field(default={}, alias="if")
    excluded: _Condition = Field(default={}, alias="unless")
    otherwise: str = Field(default="", alias="else")
    unchanged: str = ""
    to: dict[str, str | _Renamed] = {}
    contained: dict[str, str | dict[str, str]] = {}
    same: dict[str, str] = {}
    if_off: dict[str, str] = {}
    lacking: dict[str, str] = {}
    only: dict[str, _Only] = {}
    choice: dict[str, _Choice] = {}
    dtype: dict[str, str] = {}
    interval: dict[str, str] = {}
    top_k: dict[str, str] = {}

    def rules(self) -> Iterator[tuple[str, str | Rule]]:
        """Foreign keys, and our key or a rule of each."""
        for keys, rule in self._groups():
            for key in keys.split():
                entry = self.under + key if rule == "" else rule
                conditional = bool(self.applies or self.excluded)
                yield self.under + key, while_(self._holds, entry, self.otherwise) if conditional else entry

    def _groups(self) -> Iterator[tuple[str, str | Rule]]:
        yield self.unchanged, ""
        for key, ours in self.to.items():
            yield key, ours if isinstance(ours, str) else to(*_listed(ours.to), why=ours.why)
        for target, keys in self.contained.items():
            for note, noted in (("", keys),) if isinstance(keys, str) else keys.items():
                yield noted, contained(target, note)
        for make, reasons in ((detail, self.same), (off, self.if_off), (lacking, self.lacking)):
            for why, keys in reasons.items():
                yield keys, make(why)
        for key, one in self.only.items():
            yield key, only(*one.values, why=one.why, otherwise=one.otherwise)
        for key, chosen in self.choice.items():
            names = chosen.names if isinstance(chosen.names, dict) else {name: name for name in chosen.names}
            yield key, choice(_listed(chosen.to), names, chosen.why)
        for convert, keys_of in ((dtype, self.dtype), (interval, self.interval), (top_k, self.top_k)):
            for key, target in keys_of.items():
                yield key, convert(target)

    def _holds(self, source: ForeignConfig) -> bool:
        return (not self.applies or _any_of(self.applies, source)) and not _any_of(self.excluded, source)


def _any_of(condition: _Condition, source: ForeignConfig) -> bool:
    return any(
        source(key) in wanted if isinstance(wanted, list) else bool(source(key)) is wanted
        for key, wanted in condition.items()
    )


def _listed(names: str | list[str]) -> list[str]:
    return [names] if isinstance(names, str) else names


class KeyTable(_Strict):
    """A file. defaults: the system's values of keys that a config may leave out, by the kind of config.

    They are listed where they differ from ours, or decide what another key means.
    """

    defaults: dict[str, dict[str, Scalar | list[int]]]
    blocks: list[Block]

    def rules(self) -> dict[str, str | Rule]:
        """Raises ValueError if two blocks have the same key."""
        rules: dict[str, str | Rule] = {}
        for block in self.blocks:
            for key, rule in block.rules():
                if key in rules:
                    raise ValueError(f"two rules of {key}")
                rules[key] = rule
        return rules


def read_table(system: str) -> KeyTable:
    """Raises ValueError for a table that is not as described above."""
    tree = yaml.safe_load(Path(__file__).with_name(f"{system}.yaml").read_text(encoding="utf-8"))
    blocks = [_filled(block, {**REASONS, **role}) for block in tree["blocks"] for role in block.pop("roles", [{}])]
    return KeyTable.model_validate({**tree, "blocks": blocks})


def _filled(tree: object, names: dict[str, str]) -> object:
    if isinstance(tree, str):
        return re.sub(r"<(\w+)>", lambda name: names[name[1]], tree)
    if isinstance(tree, list):
        return [_filled(each, names) for each in tree]
    if isinstance(tree, dict):
        return {_filled(key, names): _filled(value, names) for key, value in tree.items()}
    return tree
