"""Makes docs/configuration.md from the schema: `rl-platform keys > docs/configuration.md`."""

from __future__ import annotations

import inspect
import json
from typing import get_args, get_origin

from pydantic.fields import FieldInfo

from rl_platform.config.describe import section_of
from rl_platform.config.explanations.accepted_values import allowed, choices
from rl_platform.config.explanations.foreign_names import foreign_keys
from rl_platform.config.schema import Config
from rl_platform.config.schema.section import Section

_HEAD = """# Configuration

<!-- Made from the schema by `rl-platform keys > docs/configuration.md`. Do not edit. -->

A run is one YAML file. The loader uses or refuses every key. It lists all typos, wrong types, impossible combinations
and keys without effect at once, with their lines, before anything starts (exit code 2).

```bash
platform-launch configs/reasoning/ppo.yaml algorithm.gamma=0.99 'actor.optim.betas=[0.9, 0.95]'   # overrides
platform-launch --print-config configs/reasoning/ppo.yaml                                        # with all defaults
```

| syntax | meaning |
|---|---|
| `section.key=value` on the command line | the value is read as YAML and replaces that of the key; the last one wins |
| `extends: ../ppo_tiny.yaml` | inherits the keys of another file; the path is relative to this file |
| `key: !unset`, `~section.key` on the command line | removes an inherited key |
| `section: !replace {...}` | replaces an inherited section instead of merging it |
| `${section.key}` | the value of another key; `$${` is a literal `${` |
| `null`, `{}` | switches a key off where its row says so; switches a section on, with its defaults |
| `1e-5`, `true`, `yes`, `1:0` | YAML 1.2: a number, a boolean, text, text |

* `extends` merges sections key by key; only `cluster.component_placement` is replaced as a whole.
* Inside braces a blank ends the tag: `{key: !unset }`.
* `!unset`, `~` and `!replace` are refused where nothing is inherited.
* A file or a command line that changes a choice does not inherit the keys that only the former choice reads; the run
  notes each such key. Choices are `data.task.type`, `reward.type`, `actor.model.type`, `env.backend`,
  `rollout.backend` and all switches.
* Limits: 200,000 bytes and 50 levels per file, 500,000 characters with aliases expanded, 32 files that extend each
  other, integers of 64 bits, no NUL.

This file trains the shipped config on questions of a file. `data.task.params` belongs to generated tasks and is not
inherited:

<!-- config: extends configs/reasoning/ppo_tiny.yaml -->
```yaml
data:
  task: {type: jsonl, path: questions.jsonl}
  train_size: !unset
actor:
  model:
    random_init: !replace {hidden_size: 64, num_layers: 2, num_heads: 4, max_positions: 512}
```
"""

# What messages say in words, short enough for a table; the first that fits comes first.
_SHORT = {
    "a whole number": "integer",
    "a number": "number",
    "true or false": "boolean",
    "text, not empty": "text",
    "a mapping": "mapping",
    "a list, each item ": "list of ",
    "a list of 2, each ": "2 x ",
    "a list of: ": "list of: ",
    ", or null": " or null",
    " and below ": ", < ",
    " and at most ": ", <= ",
    ", at least ": " >= ",
    ", above ": " > ",
}
_REPEATED = 3  # rows that two sections have in common, from which on the second refers to the first

_NAMES = """## Names of other systems

The loader refuses key names of {systems}. The message gives the key to use
and the difference in meaning. [names.yaml](../platform/config/explanations/names.yaml) lists all of them by system.
[`rl-platform convert`](convert.md) writes a whole config from one of five systems.
"""


def render() -> str:
    """Returns the whole page."""
    parts = [_HEAD]
    shown: dict[type[Section], str] = {}  # the sections whose keys the page has, and where
    for name, field in Config.model_fields.items():
        section = section_of(field.annotation)
        if section is not None:
            rows, common = _rows(name, "", section, shown)
            parts += [
                f"## `{name}`",
                "",
                f"{_first_line(section)}{common and f' {common[0].upper()}{common[1:]}.'}",
                "",
            ]
            parts += ["| key | default, other values | meaning |", "|---|---|---|", *rows, ""]
    systems = sorted({key.system for key in foreign_keys().values()}, key=str.lower)
    return "\n".join([*parts, _NAMES.format(systems=f"{', '.join(systems[:-1])} and {systems[-1]}")])


def _rows(path: str, prefix: str, section: type[Section], shown: dict[type[Section], str]) -> tuple[list[str], str]:
    """Returns the rows of `section` and of the sections in it, and which keys are as in an earlier section."""
    shown[section] = path
    other, common = _common(section, shown)
    rows: list[str] = []
    for name, field in section.model_fields.items():
        below, many = _inner(field)
        if name in common:
            continue
        if below is None:
            rows.append(_row(prefix + name, field))
            continue
        inner: list[str] = []
        meaning = field.description or ""
        accepted = "list of sections" if many else "`null` or section" if field.default is None else "section"
        if below in shown:
            meaning += f"; keys as in `{shown[below]}`"
        else:
            name += "[]" * many
            inner, same = _rows(f"{path}.{name}", f"{prefix}{name}.", below, shown)
            meaning += f"; {same}" if same else ""
        rows += [f"| `{prefix}{name.removesuffix('[]')}` | {accepted} | {_cell(meaning)} |", *inner]
    return rows, f"{', '.join(f'`{name}`' for name in common)} as in `{other}`" if common else ""


def _inner(field: FieldInfo) -> tuple[type[Section] | None, bool]:
    """Returns the section that is the value of a field, or an item of its list, and whether it is a list."""
    many = get_origin(field.annotation) is list
    return section_of(get_args(field.annotation)[0] if many else field.annotation), many


def _common(section: type[Section], shown: dict[type[Section], str]) -> tuple[str, list[str]]:
    """Returns the section in `shown` that shares most keys with `section`, and these keys; ("", []) for few of them."""
    best: tuple[str, list[str]] = ("", [])
    for other, where in shown.items():
        same = [
            name
            for name, field in section.model_fields.items()
            if other is not section
            and name in other.model_fields
            and _says(name, field) == _says(name, other.model_fields[name])
        ]
        best = max(best, (where, same), key=lambda pair: len(pair[1]))
    return best if len(best[1]) >= _REPEATED else ("", [])


def _says(name: str, field: FieldInfo) -> object:
    """Returns what the page says of a field: two fields with equal values need one row."""
    section, _ = _inner(field)
    return (section, field.description) if section else _row(name, field)


def _first_line(section: type[Section]) -> str:
    first = inspect.cleandoc(section.__doc__ or "").splitlines()[0]
    text = first.partition(": ")[2] or first
    return text[0].upper() + text[1:]


def _row(name: str, field: FieldInfo) -> str:
    return f"| `{name}` | {_values(field)} | {_cell(field.description or '')} |"


def _values(field: FieldInfo) -> str:
    """Returns the default, and what else the key accepts if the default does not show it."""
    accepted = allowed(field)
    for words, short in _SHORT.items():
        accepted = accepted.replace(words, short)
    if field.is_required():
        return f"required: {accepted}"
    value = field.get_default(call_default_factory=True)
    default = f"`{json.dumps(value) if not isinstance(value, str) or not value else value}`"
    if value is None:
        return f"{default} or {accepted.removesuffix(' or null')}"
    if names := choices(field.annotation):
        others = [name for name in names if name != value] + ["null"] * accepted.endswith(" or null")
        return f"{default}, {', '.join(others)}" if not isinstance(value, list) else f"{default}, {accepted}"
    return default if accepted in ("boolean", "mapping", "text") else f"{default}, {accepted}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
