"""Makes docs/configuration.md from the schema: `python -m rl_platform.config.documentation > docs/configuration.md`."""

from __future__ import annotations

import inspect
import json
import sys

from pydantic.fields import FieldInfo

from rl_platform.config.describe import allowed, section_of
from rl_platform.config.foreign_names import FOREIGN_SECTIONS, all_names
from rl_platform.config.schema import Config
from rl_platform.config.schema.base import Section
from rl_platform.config.schema.cluster import NodeGroup
from rl_platform.config.schema.env import EnvTask
from rl_platform.standard_streams import never_fail

_HEAD = """# Configuration

<!-- Made from the schema by `python -m rl_platform.config.documentation > docs/configuration.md`. Do not edit. -->

A run is one YAML file. Every key of it is used or refused: typos, wrong types, impossible combinations and keys that
would have no effect are all listed at once, with their lines, before anything is started (exit code 2).

* `platform-launch CONFIG section.key=value ...` overrides keys. A value is read as YAML and replaces what stands there:
  `algorithm.gamma=0.99`, `actor.optim.betas=[0.9, 0.95]`, `cluster.component_placement.rollout=4-7`. The last one wins.
* `extends: ../ppo_tiny.yaml` takes all keys from another file, relative to this one, which may extend a third. Sections
  are merged key by key; what this file writes replaces what stands there, `cluster.component_placement` as a whole.
* `key: !unset` takes an inherited key away, `section: !replace {...}` replaces a section instead of merging it. Inside
  braces a blank ends the tag, `{key: !unset }`; on the command line it is `'key=!unset'`, in single quotes. Both tags
  are refused where nothing is inherited.
* A file that changes a choice (`data.task.type`, `reward.type`, `actor.model.type`, `env.backend`, `rollout.backend`,
  a switch) does not inherit the keys that only the former choice reads. The command line treats the file likewise. The
  run notes each such key.
* A file has at most 200,000 bytes, 50 levels, 500,000 characters with its aliases repeated, and 32 files that extend
  each other. Whole numbers have 64 bits, and text holds no NUL.
* `${section.key}` stands for the value of another key, `$${` for a literal `${`.
* Scalars are those of YAML 1.2: `1e-5` is a number, `yes` and `1:0` are text, `true` and `false` are the only booleans.
* `null` switches a key off where it says so.

With `extends`, this trains on questions of a file instead of those that the shipped config generates:

<!-- config: extends configs/reasoning/ppo_tiny.yaml -->
```yaml
data:
  task: {type: jsonl, path: questions.jsonl}
  train_size: !unset
actor:
  model:
    random_init: !replace {hidden_size: 64, num_layers: 2, num_heads: 4, max_positions: 512}
```

`data.task.params` is not inherited, because it belongs to generated tasks.
"""


def render() -> str:
    """The whole page."""
    parts = [_HEAD]
    for name, field in Config.model_fields.items():
        section = section_of(field.annotation)
        if section is not None:
            parts += _section(name, section)
            if name == "cluster":
                parts += _section("cluster.node_groups[]", NodeGroup)
            if name == "env":
                parts += _section("env.tasks[]", EnvTask)
    return "\n".join([*parts, *_names()]) + "\n"


def _section(path: str, section: type[Section]) -> list[str]:
    rows = [f"## `{path}`" if "." not in path else f"### `{path}`", "", _first_line(section), ""]
    rows += ["| key | allowed | default | meaning |", "|---|---|---|---|"]
    inner: list[str] = []
    for name, field in section.model_fields.items():
        below = section_of(field.annotation)
        if below is None:
            rows.append(_row(name, field))
            continue
        rows.append(
            f"| `{name}` | {'null or the' if field.default is None else 'the'} keys below | | {field.description} |"
        )
        inner += _section(f"{path}.{name}", below)
    return [*rows, "", *inner]


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
    return f"| `{name}` | {allowed(field)} | {default} | {meaning} |"


def _names() -> list[str]:
    rows = ["## Names of other systems", ""]
    rows += [
        "They are refused with the name that is right here.",
        "",
        "| there | system | here | |",
        "|---|---|---|---|",
    ]
    rows += [f"| `{name}:` | {system} | {target} | |" for name, (system, target) in FOREIGN_SECTIONS.items()]
    for name, found in sorted(all_names().items(), key=lambda item: (item[1].system, item[0])):
        here = ", ".join(f"`{key}`" for key in found.here)
        rows.append(f"| `{name}` | {found.system} | {here} | {found.note} |")
    return rows


if __name__ == "__main__":
    never_fail()
    sys.stdout.write(render())
