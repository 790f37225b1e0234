"""The calculator, and which tools there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_platform.components.agents.turn_tool import ToolCall, ToolSpec, calculator, load_tool
from rl_platform.envs.reasoning.score import RAISED
from rl_platform.envs.reasoning.scoring_worker import score_one
from rl_platform.errors import ConfigError


@pytest.mark.parametrize(
    ("turn", "observation"),
    [
        ("3+4=", "7"),
        ("It is (1 + 2) * 3 / 2 =\n", "4.5"),
        ("0.1+0.2=", "0.3"),
        ("1/3=", "0.3333333333"),
        ("-4--2=", "-2"),
        ("first 1+1=2, then 2*5=", "10"),
        ("1/0=", "error: division by zero"),
        ("2**999999=", "error: only numbers, + - * / and parentheses"),
        ("x=", "error: only numbers, + - * / and parentheses"),
        ("2^3+1=", "error: only numbers, + - * / and parentheses"),
        ("1,000+2=", "error: only numbers, + - * / and parentheses"),
        ("2x + 1=", "error: only numbers, + - * / and parentheses"),
        ("sqrt(4)=", "error: only numbers, + - * / and parentheses"),
        ("(=", "error: not an expression"),
        ("So:3+4=", "7"),
        ("it is\n3+4=", "7"),
        ("Add both. 3+4.5=", "7.5"),
        ("I have 5. 3+4=", "7"),
        ("minus -4=", "-4"),
        ("(" * 150 + "=", "error: not an expression"),
        ("1+" * 100 + "1=", "error: the expression is too long"),
        ("=", "6"),
        ("The answer is 7.", None),
        ("3+4=7", None),
        ("", None),
    ],
)
def test_calculator(turn: str, observation: str | None) -> None:
    assert calculator(["What is 12/2", turn], {}) == observation


def test_what_went_before_the_turn_is_not_read() -> None:
    assert calculator(["9*9", "1+1=", "2", "the end"], {}) is None
    assert calculator(["9*9", "1+1=", "2", "2+5="], {}) == "7"


def test_unknown_tools() -> None:
    with pytest.raises(ConfigError, match="cannot be imported") as caught:
        load_tool("no_such_module:f")
    assert "rollout.multi_turn.tool" in str(caught.value)


def test_a_tool_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_tool.py").write_text("def f(conversation, metadata): return metadata['answers'][len(conversation)]")
    monkeypatch.syspath_prepend(tmp_path)
    tool = ToolSpec("my_tool:f").load()
    metadata = {"answers": [None, None, "two", 3]}
    assert score_one(tool, ToolCall(("?", "a"), metadata)).text == "two"
    wrong = score_one(tool, ToolCall(("?", "a", "b"), metadata))
    assert (wrong.valid, wrong.reason) == (False, RAISED)
    assert "not with 3" in wrong.detail


def test_a_tool_that_changes_the_metadata_changes_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples of a question that are answered together share the metadata."""
    (tmp_path / "taking_tool.py").write_text("def f(conversation, metadata): return metadata['answers'].pop()")
    monkeypatch.syspath_prepend(tmp_path)
    tool, metadata = ToolSpec("taking_tool:f").load(), {"answers": ["one", "two"]}
    assert [tool(ToolCall(("?", text), metadata)).text for text in "ab"] == ["two", "two"]
