"""The tests of a question: columns `tests` and `entry_point` of its row. Expected results stay on this side."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

TESTS, ENTRY_POINT = "tests", "entry_point"
_PRINTED, _CALLED = {"input", "output"}, {"arguments", "result"}


@dataclass(frozen=True)
class Case:
    """One test. Of a program that reads and prints: `input` and `expected` are texts. Of a function, named by
    `entry_point`: `arguments` are a list, or an object with names; `expected` is a value of JSON."""

    expected: object
    input: str = ""
    entry_point: str = ""
    arguments: object = None

    def question(self) -> dict[str, object]:
        """Returns what the sandbox receives: everything but the expected result."""
        if self.entry_point:
            return {"entry_point": self.entry_point, "arguments": self.arguments}
        return {"input": self.input}


def cases_of(row: Mapping[str, object]) -> list[Case]:
    """Returns the tests of a row. Raises ValueError that names the column and the test."""
    tests, entry_point = row.get(TESTS), row.get(ENTRY_POINT)
    if isinstance(tests, str):  # of CSV and Parquet files
        try:
            tests = json.loads(tests)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"column '{TESTS}' is a text that is not JSON: {error}") from error
    if not isinstance(tests, list) or not tests:
        needed = "a list of tests, {input, output} each, or {arguments, result} with a column 'entry_point'"
        raise ValueError(f"column '{TESTS}' must be {needed}, not {_shown(tests)}")
    if entry_point is not None and not (
        isinstance(entry_point, str) and all(map(str.isidentifier, entry_point.split(".")))
    ):
        raise ValueError(
            f"column '{ENTRY_POINT}' must name a function, as add or Solution.add, not {_shown(entry_point)}"
        )
    return [_case(test, f"column '{TESTS}', test {number}", entry_point) for number, test in enumerate(tests, 1)]


def _case(test: object, where: str, entry_point: str | None) -> Case:
    wanted = _CALLED if entry_point else _PRINTED
    fields = test if isinstance(test, dict) else {}
    if not wanted <= fields.keys():
        why = f"with the entry point {entry_point}" if entry_point else f"without a column '{ENTRY_POINT}'"
        raise ValueError(f"{where}: must have the fields {' and '.join(sorted(wanted))} ({why}), not {_shown(test)}")
    if entry_point:
        arguments = fields["arguments"]
        if not isinstance(arguments, list | dict):
            raise ValueError(f"{where}: arguments must be a list, or an object with names, not {_shown(arguments)}")
        return Case(fields["result"], entry_point=entry_point, arguments=arguments)
    for name in sorted(wanted):
        if not isinstance(fields[name], str):
            raise ValueError(f"{where}: {name} must be a text, not {_shown(fields[name])}")
    return Case(fields["output"], input=fields["input"])


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."
