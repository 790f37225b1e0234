"""The page of the results: a table of the parts, then the numbers and targets of each part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import fill
from typing import Any, NamedTuple

from gpu_parts.table import PARTS

Results = Mapping[str, Mapping[str, Any]]
NO = "**no**"
INTRODUCTION = (
    "Written by `python benchmarks/gpu.py`. [GPUs](../gpu.md) explains the parts and the targets. Each part ran in a "
    "process of its own. A commit with a + had uncommitted changes."
)
SMALL = "This was a **small run on the CPU**: it shows that the parts work. Its speeds mean nothing."


def page_of(content: Mapping[str, Any], notes: str = "") -> str:
    """Returns the page in Markdown from the content of the JSON file. notes: paragraphs written by hand."""
    machine, results = content["machine"], content["parts"]
    lines = [
        "# One GPU",
        "",
        fill(INTRODUCTION, 120),
        counts(results),
        "",
        *([notes.strip(), ""] if notes.strip() else []),
        *([SMALL, ""] if content["small"] else []),
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
        Row(figure["what"], number(figure["value"]), figure["unit"], figure["target"], verdict(figure))
        for figure in found["figures"]
    ]
    return lines + numbers(rows)


class Row(NamedTuple):
    """A measured number, as text. `what`: "CASE" or "CASE: QUANTITY"."""

    what: str
    value: str
    unit: str
    target: str
    met: str

    @property
    def case(self) -> str:
        return self.what.partition(": ")[0]

    @property
    def column(self) -> tuple[str, str, str]:
        return self.what.partition(": ")[2], self.unit, self.target


def numbers(rows: Sequence[Row]) -> list[str]:
    """Returns a table of the quantities that three cases or more have, with a line for each case; then the rest."""
    cases_of: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        cases_of.setdefault(row.column, []).append(row.case)
    often = {column: cases for column, cases in cases_of.items() if len(cases) >= 3}
    named = {case for (quantity, _, _), cases in often.items() if quantity for case in cases}
    columns = [column for column, cases in often.items() if named.issuperset(cases)]
    cells = {(row.case, row.column): row for row in rows if row.column in columns}
    lines = []
    if columns:
        head = [(quantity or unit) + f" ({target})" * bool(target) for quantity, unit, target in columns]
        cases = dict.fromkeys(case for case, _ in cells)
        body = [(case, *(cell(cells.get((case, column))) for column in columns)) for case in cases]
        lines += table(("case", *head), body)
    rest = [row for row in rows if row.column not in columns]
    if any(row.target for row in rest):
        body = [(row.what, f"{row.value} {row.unit}".strip(), row.target, row.met) for row in rest]
        lines += table(("number", "value", "target", "met"), body)
    elif rest:
        lines += table(("number", "value"), [(row.what, f"{row.value} {row.unit}".strip()) for row in rest])
    return lines


def cell(row: Row | None) -> str:
    """Returns the value, with its unit unless that is the head of the column, and whether it missed the target."""
    if row is None:
        return ""
    words = (row.value, row.unit if row.column[0] else "", "**missed**" if row.met == NO else "")
    return " ".join(filter(None, words))


def verdict(figure: Mapping[str, Any]) -> str:
    return {True: "yes", False: NO, None: ""}[figure["met"]]


def number(value: object) -> str:
    if not isinstance(value, (int, float)):
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    cells = [head, ("---",) * len(head), *rows]
    return [*("| " + " | ".join(str(cell).replace("|", "/") for cell in row) + " |" for row in cells), ""]
