"""For tables that say which test guards what."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def test_exists() -> Callable[[str], bool]:
    """test_exists("unit/test_docs.py::test_name"): whether that file, below tests/, defines the test."""

    @cache
    def names(file: str) -> set[str]:
        tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
        return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}

    def exists(test: str) -> bool:
        file, _, name = test.partition("::")
        return name.startswith("test_") and (TESTS / file).is_file() and name in names(file)

    return exists
