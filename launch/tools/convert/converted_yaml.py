"""Writes a converted config as YAML with comments, and the report of what became of each key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from rl_platform.config.schema import Config
from rl_platform.launch.tools.convert.conversion import Conversion, TranslatedKey
from rl_platform.launch.tools.convert.outcome import Unresolved, Value
from rl_platform.redact import MARK, is_secret, redacted

_LONGEST = 60  # characters of a value in the report
_PLACEMENT = "cluster.component_placement"


def as_yaml(done: Conversion, path: Path) -> str:
    """Returns the config. A comment names the foreign key of each value, and says where it differs."""
    lines = [f"# From {path.name} of {done.system.title}, by rl-platform convert."]
    rows = [row for row in done.rows if row.outcome.status == "untranslated"]
    lines += [f"# Not translated: {row.key} = {_shown(row)}: {row.outcome.why}" for row in rows]
    tree = done.tree()
    for section in Config.model_fields:
        if section in tree:
            lines += ["", *_lines(done, tree[section], section, 0)]
    return "\n".join(lines) + "\n"


def _lines(done: Conversion, value: Value, key: str, depth: int) -> Iterator[str]:
    name, indent = key.rpartition(".")[2], "  " * depth
    comment = f"  # {_origin(done.origins[key])}" if key in done.origins else ""
    if key == _PLACEMENT and isinstance(value, Mapping):
        yield f"{indent}{name}:{comment}"
        yield from (f"{indent}  {_flow(names)}: {_flow(place)}" for names, place in value.items())
    elif isinstance(value, list) and value and isinstance(value[0], Mapping):
        yield f"{indent}{name}:{comment}"
        yield from (f"{indent}  - {_flow(each)}" for each in value)
    elif key in done.origins or not isinstance(value, Mapping):
        yield f"{indent}{name}: {_flow(value)}{comment}"
    else:
        yield f"{indent}{name}:"
        for inner, each in value.items():
            yield from _lines(done, each, f"{key}.{inner}", depth + 1)


def _origin(rows: list[TranslatedKey]) -> str:
    keys = ", ".join(dict.fromkeys(row.key for row in rows))
    notes = "; ".join(dict.fromkeys(row.outcome.why for row in rows if row.outcome.why))
    return f"{'' if rows[0].given else 'default: '}{keys}{': ' if notes else ''}{notes}"


def _flow(value: Value) -> str:
    """Returns a value on one line. `${` is literal, except for our references to environment variables."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**9, allow_unicode=True, sort_keys=False)
    return re.sub(r"\$\{(?!env:\w+\})", "$${", text.removesuffix("\n").removesuffix("\n..."))


def report(done: Conversion) -> list[str]:
    """Returns the lines that the verb prints: translated, default and untranslated keys, and their numbers."""
    title, lines = done.system.title, []
    translated, alike, handed, lost = (done.of(status) for status in ("translated", "same", "passed", "untranslated"))
    lines += _table(f"Translated from {title}", [(row, _written(row)) for row in translated])
    groups: dict[str, list[str]] = {}
    for row in alike:
        groups.setdefault(row.outcome.why, []).append(row.key)
    if groups:
        lines += ["", f"The same here without a key ({len(alike)})"]
        lines += [f"  {why}: {', '.join(names)}" for why, names in groups.items()]
    lines += _table("Passed on to code that you write", [(row, _written(row)) for row in handed])
    defaults = done.of("translated", given=False)
    lines += _table(f"Defaults of {title} that differ from ours", [(row, _written(row)) for row in defaults])
    lines += _table(f"Not translated from {title}", [(row, _lost(row)) for row in lost])
    unsaid = done.of("untranslated", given=False)
    lines += _table(f"Defaults of {title} that are not translated", [(row, _lost(row)) for row in unsaid])
    number = len(translated) + len(alike) + len(handed) + len(lost)
    passed = f"{len(handed)} passed on to your code, " if handed else ""
    carried = (len(translated) + len(alike)) / number if number else 0
    lines += [
        "",
        f"{number} keys of {title}: {len(translated)} translated, {len(alike)} the same here, "
        f"{passed}{len(lost)} not translated ({carried:.0%} carried over); {len(defaults)} defaults of {title} written",
    ]
    return lines


def _table(title: str, entries: list[tuple[TranslatedKey, str]]) -> list[str]:
    if not entries:
        return []
    width = min(max(len(row.key) for row, _ in entries), _LONGEST)
    return [
        "",
        f"{title} ({len(entries)})",
        *(f"  {row.key:<{width}} = {_shown(row)} -> {text}" for row, text in entries),
    ]


def _written(row: TranslatedKey) -> str:
    outcome = row.outcome
    text = ", ".join(f"{key}: {_short(_flow(value))}" for key, value in outcome.values.items()) or f"in {outcome.into}"
    return f"{text} ({outcome.why})" if outcome.why and outcome.status != "untranslated" else text


def _lost(row: TranslatedKey) -> str:
    written = f"; written: {_written(row)}" if row.outcome.values else ""
    return f"{row.outcome.why}{written}"


def _shown(row: TranslatedKey) -> str:
    """Returns the foreign value, shortened and without secrets."""
    value = row.value.text if isinstance(row.value, Unresolved) else _flow(row.value)
    if is_secret(row.key) and row.value:
        return MARK
    return _short(redacted(value) if "://" in value else value)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
