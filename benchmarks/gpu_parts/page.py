"""The page of the results: a table of the parts, then the numbers and targets of each part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpu_parts.table import PARTS

Results = Mapping[str, Mapping[str, Any]]


def page_of(content: Mapping[str, Any]) -> str:
    """Returns the page in Markdown from the content of the JSON file."""
    machine, results = content["machine"], content["parts"]
    small = "\nThis was a **small run on the CPU**: it shows that the parts work. Its speeds mean nothing."
    lines = [
        "# One GPU",
        "",
        "Written by `python benchmarks/gpu.py`. [GPUs](../gpu.md) explains the parts and the targets.",
        counts(results),
        *([small] if content["small"] else []),
        "",
        *table(("machine", ""), list(machine.items())),
        "## Parts",
        "",
        *table(("part", "what", "result", "seconds", "date", "commit"), [part_row(name, results) for name in NAMES]),
    ]
    for name in NAMES:
        found = results.get(name)
        if found is not None and (found.get("figures") or found.get("error")):
            lines += [f"## {name}", "", *section(found)]
    return "\n".join(lines).rstrip() + "\n"


NAMES = [part.name for part in PARTS]
WHAT = {part.name: part.what for part in PARTS}


def counts(results: Results) -> str:
    """Returns in words how many parts have each state."""
    states = [results[name]["state"] if name in results else "not run" for name in NAMES]
    found = {state: states.count(state) for state in dict.fromkeys(states)}
    return f"Of {len(NAMES)} parts: {', '.join(f'{count} {state}' for state, count in found.items())}."


def part_row(name: str, results: Results) -> tuple[str, ...]:
    found = results.get(name)
    if found is None:
        return name, WHAT[name], "not run", "", "", ""
    result = found["state"] + (f" ({found['reason']})" if "reason" in found else "")
    return name, WHAT[name], result, number(found.get("seconds")), found.get("date", ""), found.get("commit", "")


def section(found: Mapping[str, Any]) -> list[str]:
    lines = [f"{found['state']}: {found['error']}".replace("\n", " "), ""] if "error" in found else []
    rows = [
        (figure["what"], f"{number(figure['value'])} {figure['unit']}".strip(), figure["target"], verdict(figure))
        for figure in found["figures"]
    ]
    return [*lines, *(table(("number", "value", "target", "met"), rows) if rows else [])]


def verdict(figure: Mapping[str, Any]) -> str:
    return {True: "yes", False: "**no**", None: ""}[figure["met"]]


def number(value: object) -> str:
    if not isinstance(value, (int, float)):
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    cells = [head, ("---",) * len(head), *rows]
    return [*("| " + " | ".join(str(cell).replace("|", "/") for cell in row) + " |" for row in cells), ""]
