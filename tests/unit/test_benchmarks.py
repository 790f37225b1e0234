"""Benchmarks run by hand only: what they import of the package must be there nevertheless."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[2] / "benchmarks").glob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_names_of_the_package_are_there(script: Path) -> None:
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if not (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rl_platform")):
            continue
        module = importlib.import_module(str(node.module))
        for alias in node.names:
            submodule = f"{node.module}.{alias.name}"
            in_package = hasattr(module, "__path__") and importlib.util.find_spec(submodule) is not None
            found = hasattr(module, alias.name) or in_package
            assert found, f"line {node.lineno}: {submodule}"
