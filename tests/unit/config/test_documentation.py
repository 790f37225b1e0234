"""docs/configuration.md is up to date and complete."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args, get_origin

from rl_platform.config.describe import section_of
from rl_platform.config.explanations.foreign_names import foreign_keys, foreign_sections
from rl_platform.config.schema import Config
from rl_platform.config.schema.section import Section
from rl_platform.launch.tools.key_reference import render

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "rl-platform keys > docs/configuration.md"


def documented() -> set[str]:
    """The paths of all keys that the page describes; it says of some that they are as in another section."""
    paths: set[str] = set()
    for part in PAGE.read_text(encoding="utf-8").split("\n## ")[1:]:
        section = part.partition("`")[2].partition("`")[0]
        for line in part.splitlines():
            name = line.split("`")[1] if line.startswith("| `") else ""
            path = f"{section}.{name}" if name else section
            items = f"{path}[]" if " | list of sections | " in line else path
            if name:
                paths.add(path)
            if whole := re.search(r"keys as in `(.+?)`", line):
                paths |= {items + known.removeprefix(whole[1]) for known in paths if known.startswith(f"{whole[1]}.")}
            elif shared := re.search(r"((?:`\w+`(?:, )?)+) as in `(.+?)`", line):
                roots = [f"{shared[2]}.{key}" for key in re.findall(r"`(\w+)`", shared[1])]
                same = {known for known in paths for root in roots if f"{known}.".startswith(f"{root}.")}
                paths |= {items + known.removeprefix(shared[2]) for known in same}
    return paths


def keys(section: type[Section] = Config, prefix: str = "") -> set[str]:
    """The paths of all keys of the schema, those of the items of lists included."""
    paths = set()
    for name, field in section.model_fields.items():
        many = get_origin(field.annotation) is list
        inner = section_of(get_args(field.annotation)[0] if many else field.annotation)
        paths.add(f"{prefix}{name}")
        if inner is not None:
            paths |= keys(inner, f"{prefix}{name}{'[]' * many}.")
    return paths


def test_page_names_every_key_and_no_other() -> None:
    sections = set(Config.model_fields)
    assert documented() ^ (keys() - sections) == set()


def test_the_loader_says_what_the_table_of_foreign_names_says(problems: Any) -> None:
    """Every name of names.yaml, as a key inside a foreign section and, for a section, as the section itself."""
    names = [
        (name, (", ".join(f"`{here}`" for here in key.here) or "no key") + (f" ({key.note})" if key.note else ""))
        for name, key in foreign_keys().items()
    ]
    sections = [(name, target) for name, (_, target) in foreign_sections().items()]
    assert len(names) > 200

    nested: dict[str, Any] = {}
    for number, (name, _) in enumerate(names):
        value: Any = 1
        for step in reversed(name.split(".")):
            value = {step: value}
        nested[f"n{number}"] = value
    reported = problems("embodied", f"ppo={json.dumps(nested)}")

    for number, (name, here) in enumerate(names):
        problem = reported[f"ppo.n{number}.{name}"]
        keys = problem.message.partition("; here it is ")[2]
        nothing = "no key" if "there is no such key here" in problem.message else ""
        said = nothing or ", ".join(f"`{key}`" for key in keys.split(" and "))
        said += f" ({problem.hint})" if problem.hint else ""
        assert said == here, name
    reported = problems("embodied", *(f"{name}=1" for name, _ in sections))
    for name, here in sections:
        assert reported[name].message.endswith(f"; here its keys go to {here}")
