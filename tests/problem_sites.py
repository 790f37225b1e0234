"""Which `Problem(...)` of a module tests have reached: a rule without a case is found."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rl_platform.errors import Problem

Sites = set[tuple[str, int]]  # file and line of a call


@contextmanager
def recorded_sites() -> Iterator[Sites]:
    """Yields a set that receives the place of each problem made meanwhile."""
    sites: Sites = set()
    original = Problem.__init__

    def init(self: Problem, *arguments: str, **options: str) -> None:
        caller = sys._getframe(1)
        sites.add((caller.f_code.co_filename, caller.f_lineno))
        original(self, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Problem, "__init__", init)
        yield sites


def unreached(path: Path, sites: Sites) -> list[str]:
    """Returns `file:line` of each `Problem(...)` in a file that is not among the sites."""
    calls = [
        node
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Problem"
    ]
    lines = {line for name, line in sites if name == str(path)}
    return [f"{path}:{one.lineno}" for one in calls if lines.isdisjoint(range(one.lineno, (one.end_lineno or 0) + 1))]
