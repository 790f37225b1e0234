"""Makes docs/configuration.md from the schema: `rl-platform keys > docs/configuration.md`."""

from __future__ import annotations

import inspect
import json

from pydantic.fields import FieldInfo

from rl_platform.config.describe import allowed, section_of
from rl_platform.config.foreign_names import foreign_keys, foreign_sections
from rl_platform.config.schema import Config
from rl_platform.config.schema.base import Section
from rl_platform.config.schema.cluster import NodeGroup
from rl_platform.config.schema.data import Source
from rl_platform.config.schema.env import EnvTask
from rl_platform.config.schema.reward import RewardFunction

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
| `key: !unset` | removes an inherited key |
| `section: !replace {...}` | replaces an inherited section instead of merging it |
| `${section.key}` | the value of another key; `$${` is a literal `${` |
| `null` | switches a key off where the table of the key says so |
| `1e-5`, `true`, `yes`, `1:0` | YAML 1.2: a number, a boolean, text, text |

* `extends` merges sections key by key; only `cluster.component_placement` is replaced as a whole.
* Inside braces a blank ends the tag: `{key: !unset }`. On the command line write `'key=!unset'`, in single quotes.
* `!unset` and `!replace` are refused where nothing is inherited.
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


def render() -> str:
    """The whole page."""
    parts = [_HEAD]
    shown: dict[type[Section], str] = {}  # the sections that have a table, and where it is
    for name, field in Config.model_fields.items():
        section = section_of(field.annotation)
        if section is not None:
            parts += _section(name, section, shown)
            if name == "cluster":
                parts += _section("cluster.node_groups[]", NodeGroup, shown)
            if name == "data":
                parts += _section("data.sources[]", Source, shown)
            if name == "reward":
                parts += _section("reward.functions[]", RewardFunction, shown)
            if name == "env":
                parts += _section("env.tasks[]", EnvTask, shown)
    return "\n".join([*parts, *_names()]) + "\n"


def _section(path: str, section: type[Section], shown: dict[type[Section], str]) -> list[str]:
    """Returns the table of `path` and those of the sections in it, except of classes that `shown` has already."""
    shown[section] = path
    rows = [f"## `{path}`" if "." not in path else f"### `{path}`", "", _first_line(section), ""]
    rows += ["| key | allowed | default | meaning |", "|---|---|---|---|"]
    inner: list[str] = []
    other, common = _common(path, section, shown)
    for name, field in section.model_fields.items():
        below = section_of(field.annotation)
        if name in common:
            continue
        if below is None:
            rows.append(_row(name, field))
            continue
        where = "below" if below not in shown else f"of `{shown[below]}`"
        rows.append(
            f"| `{name}` | {'null or the' if field.default is None else 'the'} keys {where} | | {field.description} |"
        )
        if below not in shown:
            inner += _section(f"{path}.{name}", below, shown)
    if common:
        rows += ["", f"As in `{other}`: {', '.join(f'`{name}`' for name in common)}."]
    return [*rows, "", *inner]


def _common(path: str, section: type[Section], shown: dict[type[Section], str]) -> tuple[str, list[str]]:
    """Returns the section in `shown` that shares most keys with `section`, and these keys; ("", []) for few of them."""
    best: tuple[str, list[str]] = ("", [])
    for other, where in shown.items():
        if other is section or where.count(".") != path.count("."):
            continue
        same = [
            name
            for name, field in section.model_fields.items()
            if name in other.model_fields
            and section_of(field.annotation) is None
            and _row(name, field) == _row(name, other.model_fields[name])
        ]
        best = max(best, (where, same), key=lambda pair: len(pair[1]))
    return best if len(best[1]) >= _REPEATED else ("", [])


def _first_line(section: type[Section]) -> str:
    first = inspect.cleandoc(section.__doc__ or "").splitlines()[0]
    text = first.partition(": ")[2] or first
    return text[0].upper() + text[1:]


def _row(name: str, field: FieldInfo) -> str:
    if field.is_required():
        default = "required"
    else:
        value = field.get_default(call_default_factory=True)
        default = f"`{json.dumps(value) if not isinstance(value, str) or not value else value}`"
    meaning = (field.description or "").replace("|", "\\|")
    accepted = allowed(field)
    for words, short in _SHORT.items():
        accepted = accepted.replace(words, short)
    return f"| `{name}` | {accepted} | {default} | {meaning} |"


def _names() -> list[str]:
    rows = ["## Names of other systems", "", "The loader refuses these names and names the key to use instead."]
    system = ""
    sections = [(system, f"{name}:", target, "") for name, (system, target) in foreign_sections().items()]
    keys = [
        (key.system, name, ", ".join(f"`{here}`" for here in key.here) or "no key", key.note)
        for name, key in foreign_keys().items()
    ]
    for its_system, name, here, note in sorted([*sections, *keys], key=lambda row: (row[0].lower(), row[1])):
        if its_system != system:
            system = its_system
            rows += ["", f"### {system}", "", "| there | here |", "|---|---|"]
        rows.append(f"| `{name}` | {here}{f' ({note})' if note else ''} |")
    return rows
