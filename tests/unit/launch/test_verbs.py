"""`rl-platform`: its help, wrong usage, and an installation without it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs" / "configuration.md"


def test_help_names_every_verb(tool) -> None:
    ended = tool("--help")
    assert ended.code == 0
    verbs = ("plot", "timeline", "snapshot", "work-shares", "export", "keys", "data", "sweep", "doctor")
    assert all(verb in ended.out for verb in verbs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "Missing command"),
        (["plot"], "Missing argument"),
        (["plan"], "plan"),
        (["plot", "-x", "years", "a"], "years"),
    ],
)
def test_wrong_usage(tool, arguments: list[str], message: str) -> None:
    ended = tool(*arguments)
    assert ended.code == 2
    assert message in ended.err
    verb = "plot " if arguments[:1] == ["plot"] else ""
    assert f"try: rl-platform {verb}--help" in ended.err


def test_keys_are_the_configuration_page(tool) -> None:
    assert tool("keys").out == PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize("extra", ["planner", "launch.plans", "launch.check", "launch.tools"])
def test_an_extra_that_is_not_installed(command, tool, monkeypatch: pytest.MonkeyPatch, extra: str) -> None:
    name = f"rl_platform.{extra}"

    class Missing:
        def find_spec(self, module: str, *_: object) -> None:
            if f"{module}.".startswith(f"{name}."):
                raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    users = (f"{name}.", "rl_platform.launch.plans.")  # those import the planner when they are imported
    for module in [module for module in sys.modules if f"{module}.".startswith(users)]:
        monkeypatch.delitem(sys.modules, module)
    option = {"planner": "--plan", "launch.plans": "--plan", "launch.check": "--check", "launch.tools": "rl-platform"}[
        extra
    ]
    ended = tool("keys") if extra == "launch.tools" else command("reasoning.yaml", option)
    assert ended.code == 2
    assert ended.err == f"1 problem:\n{option}: {name} is not installed\n"
