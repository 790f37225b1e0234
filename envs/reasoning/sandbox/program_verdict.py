"""The verdict on a program: compares its results with the expected ones, outside the sandbox.

A test is passed if the program ended with exit code 0 in time and its result is the expected one. Nothing that the
program prints has another meaning. Not covered: running the program (`process.py`, `fusion.py`).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence

from rl_platform.envs.reasoning.sandbox.cases import Case
from rl_platform.envs.reasoning.sandbox.process import ENDED, TIMEOUT, Result
from rl_platform.envs.reasoning.score import NO_PROGRAM, PASSED, WRONG, Score

_BLOCK = re.compile(r"```[ \t]*(?:python3?|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)
_SHOWN = 80  # characters of a text in a detail
_RELATIVE, _ABSOLUTE = 1e-6, 1e-9  # how much a number with a fraction may differ


def program_of(response: str) -> str:
    """Returns the last fenced block of Python in a response, or the whole response if there is none."""
    blocks = _BLOCK.findall(response)
    return blocks[-1] if blocks else response


def judge(program: str, cases: Sequence[Case], run: Callable[[Case], Result], *, partial: bool) -> Score:
    """Returns 1 if the program passes all tests, else 0, or with `partial` the fraction of tests that it passes.

    Stops at the first failure, with `partial` at the first timeout. `reason` and `detail` of the score are those of the
    first failure.
    """
    if not program.strip():
        return Score(0.0, reason=NO_PROGRAM, detail="the response holds no program")
    passed, reason, detail = 0, PASSED, f"passed {len(cases)} of {len(cases)} tests"
    for number, case in enumerate(cases, 1):
        result = run(case)
        if passes(case, result):
            passed += 1
            continue
        if reason == PASSED:
            reason = WRONG if result.status == ENDED else result.status
            detail = f"test {number} of {len(cases)}: {reason}: {_why(case, result)}"
        if not partial or result.status == TIMEOUT:
            break
    return Score(passed / len(cases) if partial else float(passed == len(cases)), reason=reason, detail=detail)


def passes(case: Case, result: Result) -> bool:
    """Returns whether the result is the expected one. Texts may differ in white space at ends of lines and of the
    text."""
    if result.status != ENDED:
        return False
    if not case.entry_point:
        return _lines(result.output) == _lines(str(case.expected).encode(errors="surrogatepass"))
    try:
        value = json.loads(result.output)
    except (ValueError, RecursionError):
        return False
    return same(value, case.expected)


def same(value: object, expected: object) -> bool:
    """Returns whether two values of JSON are equal; numbers with a fraction up to a relative difference of 1e-6."""
    if isinstance(expected, bool) or isinstance(value, bool):
        return value is expected
    if isinstance(expected, int | float) and isinstance(value, int | float):
        if isinstance(expected, int) and isinstance(value, int):
            return value == expected
        try:
            return math.isclose(value, expected, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)
        except OverflowError:  # an integer beyond the largest float
            return False
    if isinstance(expected, list) and isinstance(value, list):
        return len(value) == len(expected) and all(map(same, value, expected))
    if isinstance(expected, dict) and isinstance(value, dict):
        return value.keys() == expected.keys() and all(same(value[name], expected[name]) for name in expected)
    return type(value) is type(expected) and value == expected


def _lines(text: bytes) -> list[bytes]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def _why(case: Case, result: Result) -> str:
    if result.status != ENDED:
        return result.note.rpartition("\n")[2][-2 * _SHOWN :] or "no output"
    given = result.output[: 4 * _SHOWN].decode(errors="replace")
    expected = json.dumps(case.expected) if case.entry_point else repr(case.expected)
    return f"{_short(given if case.entry_point else repr(given))} instead of {_short(expected)}"


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."
