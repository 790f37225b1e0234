"""The names by which the core finds accelerated implementations are those of `accel/build.py`."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

from rl_platform import acceleration
from rl_platform.accel import build

ROOT = Path(__file__).parents[2]


def found_names() -> set[str]:
    """The names in the calls of `acceleration.find` in the sources."""
    files = [path for folder in ("platform", "envs", "launch", "api") for path in (ROOT / folder).rglob("*.py")]
    calls = [
        node
        for path in files
        if "acceleration.find(" in (text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "acceleration.find"
    ]
    return {ast.literal_eval(call.args[0]) for call in calls}


def test_the_core_finds_every_function_of_the_folder_and_no_other_name() -> None:
    functions = inspect.getmembers(build, inspect.isfunction)
    assert found_names() == {
        name for name, function in functions if function.__module__ == build.__name__ and not name.startswith("_")
    }


def test_nothing_is_found_while_acceleration_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "normalizing_loops", lambda *arguments: arguments)
    assert acceleration.find("normalizing_loops", 1) == (1,)
    with acceleration.accelerating("off"):
        assert acceleration.find("normalizing_loops", 1) is None


def test_nothing_is_found_without_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceleration, "_present", lambda: False)
    assert acceleration.find("normalizing_loops") is None
