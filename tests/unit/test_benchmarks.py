"""Benchmarks run by hand only: what they import of the package must be there nevertheless."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from pathlib import Path

SCRIPTS = sorted((Path(__file__).parents[2] / "benchmarks").glob("*.py"))


def test_names_of_the_package_are_there() -> None:
    missing = []
    for script in SCRIPTS:
        nodes = [node for node in ast.walk(ast.parse(script.read_text("utf-8"))) if isinstance(node, ast.ImportFrom)]
        for node in nodes:
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                if name.startswith("rl_platform") and not exists(str(node.module), name):
                    missing.append(f"{script}:{node.lineno}: {name}")
    assert missing == []


def exists(module: str, name: str) -> bool:
    """A module has a name, or there is a submodule of that name."""
    try:
        loaded = importlib.import_module(module)
    except ModuleNotFoundError:
        return False
    in_package = hasattr(loaded, "__path__") and importlib.util.find_spec(name) is not None
    return in_package or hasattr(loaded, name.rpartition(".")[2])
