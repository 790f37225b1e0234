"""docs/configuration.md is up to date and complete."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rl_platform.config.describe import walk
from rl_platform.config.documentation import render

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == render(), "rl-platform keys > docs/configuration.md"


def test_page_names_every_key() -> None:
    page = render()
    assert [path for path, _ in walk() if f"`{path.rpartition('.')[2]}`" not in page and f"`{path}`" not in page] == []


def test_the_loader_says_what_the_table_of_foreign_names_says(problems: Any) -> None:
    """Every row of the committed page, as a key inside a foreign section and, for a section, as the section itself."""
    table = PAGE.read_text(encoding="utf-8").partition("## Names of other systems")[2]
    rows = [line.strip("|").split(" | ") for line in table.splitlines() if line.startswith("| `")]
    there = [(name.strip(" `"), here.strip()) for name, here in rows]
    assert len(there) > 200
    names = [(name, here) for name, here in there if not name.endswith(":")]
    sections = [(name.removesuffix(":"), here) for name, here in there if name.endswith(":")]

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
