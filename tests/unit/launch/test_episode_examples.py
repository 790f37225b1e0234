"""`--check` calls every method of a text environment of the user, before a run would."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_configs import GAME

from rl_platform.config import load_config
from rl_platform.errors import ConfigError
from rl_platform.launch.check.episode_examples import KEY, episode_examples

DERIVED = "class Own(Game):\n    def {}\n        {}\n"


def lines(body: str, folder: Path, *more: str) -> list[str]:
    (folder / "own.py").write_text(GAME + body)
    agent = "rollout.agent={environment: {type: 'own.py:Own', timeout_s: 2}, max_calls: 8}"
    return list(episode_examples(load_config(folder / "reasoning.yaml", [agent, *more]).config))


def test_the_rewards_of_two_episodes_are_shown(folder: Path) -> None:
    (line,) = lines("class Own(Game): ...\n", folder)
    assert line.startswith(f"{KEY} own.py:Own gave the reward ")
    assert " after 2 steps for the expected answer '" in line
    assert " after 2 steps for an empty response" in line
    (line,) = lines(DERIVED.format("step(self, text):", 'return "", 0.5, False'), folder)
    assert "1.5 after 3 steps, which did not end it, for an empty response" in line


def test_questions_that_are_not_here_are_no_error(folder: Path) -> None:
    (line,) = lines("class Own(Game): ...\n", folder, "data.task={type: jsonl, path: none.jsonl}")
    assert line.startswith("the text environment was not called: none.jsonl: cannot be read")


@pytest.mark.parametrize(
    ("signature", "statement", "message"),
    [
        (
            "reset(self, question, seed):",
            "return quest",
            "raised NameError: name 'quest' is not defined (at own.py:",
        ),
        (
            "step(self, text):",
            "return '', 1 / len(text), True",
            "raised ZeroDivisionError: division by zero (at own.py:",
        ),
        (
            "step(self, text):",
            "return '', 1.0",
            "TypeError: step() returns (text, reward, done), not ('', 1.0) (of own",
        ),
        (
            "step(self, text):",
            "return '', float('nan'), True",
            "ValueError: a reward must be a finite number, not nan (",
        ),
        ("step(self, text):", "__import__('time').sleep(60)", "gave no result within 2 s, for the expected answer"),
        ("step(self, text):", "__import__('os')._exit(3)", "its process ended: exit code 3 (of own.py:"),
        ("score(self):", "return self.totl", "raised AttributeError: 'Own' object has no attribute 'totl' (at own.py:"),
        (
            "close(self):",
            "self.file.close()",
            "raised AttributeError: 'Own' object has no attribute 'file' (at own.py:",
        ),
    ],
)
def test_a_method_that_fails_is_told_with_its_line(folder: Path, signature: str, statement: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        lines(DERIVED.format(signature, statement), folder)
    (problem,) = caught.value.problems
    assert problem.key == KEY
    assert problem.value == "own.py:Own"
    assert problem.message.startswith(message)


def test_the_check_ends_with_the_line_of_a_typo(folder: Path, command) -> None:
    (folder / "own.py").write_text(GAME + DERIVED.format("step(self, text):", "return txt, 1.0, True"))
    ended = command("reasoning.yaml", "--check", "rollout.agent={environment: {type: 'own.py:Own'}}")
    assert ended.code == 2, ended.err
    assert "raised NameError: name 'txt' is not defined (at own.py:" in ended.err
    assert "Traceback" not in ended.err
