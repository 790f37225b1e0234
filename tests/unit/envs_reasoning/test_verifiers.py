"""Scores of the built-in verifiers, and finding the answer in a response."""

from __future__ import annotations

import pickle
import random
import subprocess
import sys
from fractions import Fraction
from functools import cache
from pathlib import Path

import pytest

from rl_platform.config.schema.reward import VERIFIERS
from rl_platform.envs.reasoning.answers.finding import find_answer
from rl_platform.envs.reasoning.answers.quantity import parse_number
from rl_platform.envs.reasoning.verifiers import BUILT_IN, ScoreItem, Verifier, VerifierSpec
from rl_platform.errors import ConfigError

PAGE = Path(__file__).parents[3] / "docs" / "reasoning.md"


@cache
def loaded(*names: str) -> Verifier:
    """Loads at the first call: every process of a test run imports this module, and one of them calls it."""
    return VerifierSpec(*names).load()


def score_math(item: ScoreItem) -> float:
    return loaded("math_verify")(item)


def score_jsonl(item: ScoreItem) -> float:
    return loaded("task", "jsonl")(item)


def score_digit(item: ScoreItem) -> float:
    return loaded("task", "digits")(item)


BOTH = pytest.mark.parametrize("verifier", [score_math, score_jsonl], ids=["math_verify", "jsonl"])


def item(response: str, answer: str) -> ScoreItem:
    return ScoreItem(response, "question", answer)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1,234", Fraction(1234)),
        ("-0.5", Fraction(-1, 2)),
        ("1/2", Fraction(1, 2)),
        ("$18", Fraction(18)),
        ("7.", Fraction(7)),
        (".25", Fraction(1, 4)),
        ("+3", Fraction(3)),
        ("1/0", None),
        ("12,34", None),
        ("1e5", None),
        ("x", None),
        ("", None),
        ("9" * 5000, None),
    ],
)
def test_parse_number(text: str, value: Fraction | None) -> None:
    assert parse_number(text) == value


@pytest.mark.parametrize(
    ("response", "answer", "given"),
    [
        ("42", "42", "42"),
        ("The answer is 42.", "1", "42."),
        ("12 + 30 = 42", "1", "12 + 30 = 42"),
        ("so x = -7", "1", "-7"),
        ("so x = \N{MINUS SIGN}7", "1", "-7"),
        ("$1,234.50 in all", "1", "$1,234.50 in all"),
        ("10-3", "1", None),
        ("1, 2, 3", "1", None),
        ("no number", "1", None),
        ("<answer> 6 </answer> 7", "1", "6"),
        ("<answer>5</answer> and <answer> 6 </answer> 7", "1", None),
        (r"so \boxed{\frac{1}{2}} or 3", "1", None),
        (r"so \boxed{\frac{1}{2}}, not before 3", "1", None),
        (r"so \boxed{\frac{1}{2}}", "1", r"\frac{1}{2}"),
        (r"\boxed{1", "1", "1"),
        ("text\n#### 18\nmore 5", "1", "18"),
        ("the red door ", "blue", "the red door"),
        ("The answer is the red door.", "blue", "the red door"),
        ("The formula is $2x$.", "x", "$2x$"),
        ("<think>5 or 6?</think> 7", "1", "7"),
    ],
)
def test_find_answer(response: str, answer: str, given: str | None) -> None:
    assert find_answer(response, answer) == given


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("The result is 0.5", "1/2", 1.0),
        (r"\boxed{\frac{2}{4}}", "0.5", 1.0),
        (r"\boxed{1 + x^2}", "x^2+1", 1.0),
        ("$0.51$", "1/2", 0.0),
        ("I do not know", "1/2", 0.0),
        ("", "1/2", 0.0),
    ],
)
@BOTH
def test_equivalent_expressions(verifier, response: str, answer: str, score: float) -> None:
    assert verifier(item(response, answer)) == score


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("... so 1,234 apples", "1234", 1.0),
        ("#### 1234", "1234", 1.0),
        ("#### 1234.0", "1234", 1.0),
        ("1234 minus 1 is 1233", "1234", 0.0),
        (r"\boxed{\frac{1}{2}}", r"\frac12", 1.0),
        ("9" * 5000, "9", 0.0),
    ],
)
def test_task_verifier_of_jsonl(response: str, answer: str, score: float) -> None:
    assert score_jsonl(item(response, answer)) == score


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        (" (34 - 54)", "-20", 0.0),
        (" 34 - 54", "-20", 0.0),
        (r"\boxed{34 - 54}", "-20", 0.0),
        ("$2 \\cdot 10$", "20", 0.0),
        (r"\boxed{\frac{6}{2}}", "3", 0.0),
        (r"\boxed{6 \div 2}", "3", 0.0),
        ("6/2", "3", 0.0),
        (r"$\sqrt{4}$", "2", 0.0),
        ("1/4 + 1/4", "1/2", 0.0),
        ("34 - 54 = -20", "-20", 1.0),
        ("$34 - 54 = -20$", "-20", 1.0),
        (" -20.", "-20", 1.0),
        ("20.0", "20", 1.0),
        ("$-20$", "-20", 1.0),
        ("2/4", "1/2", 1.0),
        (r"\boxed{50\%}", "1/2", 1.0),
        (r"$\sqrt{8}$", r"$2\sqrt{2}$", 1.0),
    ],
)
def test_a_calculation_is_not_the_number_it_leads_to(response: str, answer: str, score: float) -> None:
    assert score_math(item(response, answer)) == score


@pytest.mark.parametrize(
    ("response", "answer", "score"),
    [
        ("What is 84/2? 84/2", "42", 0.0),
        ("#### 84/2", "42", 0.0),
        ("<answer>84/2</answer>", "42", 0.0),
        (r"\boxed{84/2}", "42", 0.0),
        (r"\boxed{42}", "42", 1.0),
        ("pots", "stop", 0.0),
        (r"\boxed{pots}", "stop", 0.0),
        (r"\boxed{p o t s}", "stop", 0.0),
        (r"\boxed{s*t*o*p}", "stop", 0.0),
        (r"\boxed{on}", "no", 0.0),
        (r"\boxed{York New}", "New York", 0.0),
        (r"\boxed{no}", "no", 1.0),
        (r"\boxed{\text{New York}}", "New York", 1.0),
        (r"\boxed{3 mc}", "3 cm", 0.0),
        (r"\boxed{3 cm}", "3 cm", 1.0),
        (r"\boxed{3}", "3 cm", 1.0),
        (r"\boxed{1}", "__import__('os')", 0.0),
        (r"\boxed{(0, 1]}", "[0, 1)", 0.0),
        (r"\boxed{[0, 1)}", "[0, 1)", 1.0),
        (r"\boxed{\{2, 1\}}", r"\{1, 2\}", 1.0),
        (r"\boxed{1,000}", "1000", 1.0),
        (r"\boxed{0.5}", r"\frac{1}{2}", 1.0),
        (r"\boxed{y + x}", "x + y", 1.0),
        (r"\boxed{yx}", "$xy$", 1.0),
    ],
)
@BOTH
def test_words_are_text_and_calculations_are_no_answers(verifier, response: str, answer: str, score: float) -> None:
    assert verifier(item(response, answer)) == score


@BOTH
def test_random_words_and_numbers_pay_only_if_they_are_equal(verifier) -> None:
    generator = random.Random(0)
    for _ in range(2_000):
        word = "".join(generator.choices("abcdefinopst", k=generator.randint(2, 7)))
        other = "".join(generator.sample(word, len(word)))
        assert verifier(item(f"\\boxed{{{other}}}", word)) == float(other == word), (word, other)
    for _ in range(50):
        numerator, denominator = generator.randint(-99, 99), generator.randint(2, 20)
        value, other = Fraction(numerator, denominator), Fraction(generator.randint(-9, 9), denominator)
        if value.denominator > 1:
            assert verifier(item(f"\\boxed{{{numerator}/{denominator}}}", str(value))) == 1.0
        assert verifier(item(f"\\boxed{{{other}}}", str(value))) == float(other == value), (value, other)


def test_an_expected_answer_that_cannot_be_read_is_no_zero() -> None:
    with pytest.raises(ValueError, match="cannot read the expected answer"):
        score_math(item("1", "   "))


@pytest.mark.parametrize(
    ("response", "score"), [("7", 1.0), ("7x", 1.0), ("5", 0.1), (" 7", 0.0), ("x", 0.0), ("", 0.0)]
)
def test_task_verifier_of_digits(response: str, score: float) -> None:
    assert score_digit(item(response, "7")) == score


def test_every_built_in_verifier_is_built_and_documented() -> None:
    """`VerifierSpec.load` takes a type without a branch for a function of the user, which has no module."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert [name for name in BUILT_IN if not any(row.startswith(f"| `{name}` | ") for row in rows)] == []
    assert all(callable(VerifierSpec(name, "digits").load()) for name in BUILT_IN)


def test_exact_match() -> None:
    exact = VerifierSpec("exact_match").load()
    assert [exact(item(text, "Paris ")) for text in ("Paris", " Paris\n", "paris", "")] == [1.0, 1.0, 0.0, 0.0]


def test_task_verifier_of_reasoning_gym_is_the_datasets_own() -> None:
    import reasoning_gym

    entry = reasoning_gym.create_dataset("countdown", seed=1, size=1)[0]
    solution = entry["metadata"]["expression"]
    score = VerifierSpec("task", "reasoning_gym", "countdown").load()
    right, wrong = (
        score(ScoreItem(text, entry["question"], entry["answer"], entry["metadata"]))
        for text in (f"Let me think. <answer>{solution}</answer>", "<answer>1</answer>")
    )
    assert right == 1.0 > wrong


def test_user_function_and_names_that_do_not_exist(tmp_path, monkeypatch) -> None:
    (tmp_path / "my_reward.py").write_text(
        "def half(response, answer, metadata):\n    return metadata['half'] / 2\nx = 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert VerifierSpec("my_reward:half").load()(ScoreItem("", "", "", {"half": 1})) == 0.5
    for name, expected in [
        ("my_reward:third", "AttributeError"),
        ("no_such_module:f", "ModuleNotFoundError"),
        ("my_reward:x", "is not a function"),
    ]:
        with pytest.raises(ConfigError) as caught:
            VerifierSpec(name).load()
        assert expected in str(caught.value)


def test_a_function_that_changes_the_metadata_changes_its_own(tmp_path, monkeypatch) -> None:
    """The samples of a question that are scored together share the metadata: the first one took it from the others."""
    code = "def take(response, answer, metadata):\n    return metadata['bounds'].pop() + metadata.pop('bonus')\n"
    (tmp_path / "taking_reward.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    items = [ScoreItem(text, "?", "", metadata) for metadata in [{"bonus": 1, "bounds": [2, 3]}] for text in "abc"]
    verifier = VerifierSpec("taking_reward:take").load()
    assert [verifier(item) for item in pickle.loads(pickle.dumps(items))] == [4, 4, 4]


def test_a_scoring_process_imports_neither_torch_nor_pydantic() -> None:
    code = (
        "import sys, rl_platform.envs.reasoning.scoring_worker;"
        "from rl_platform.components.agents.turn_tool import ToolSpec;"
        "from rl_platform.envs.reasoning.verifiers import VerifierSpec;"
        "VerifierSpec('math_verify').load(); ToolSpec('calculator').load();"
        "print([m for m in ('torch', 'pydantic', 'transformers') if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


def test_the_config_accepts_the_built_in_verifiers() -> None:
    assert VERIFIERS == BUILT_IN


def test_built_in_verifiers_read_the_last_turn_only() -> None:
    """The text of a tool is not the policy's answer; a function of the user receives all of it."""
    exact, jsonl = VerifierSpec("exact_match").load(), VerifierSpec("task", "jsonl").load()
    for verifier in (exact, jsonl):
        assert verifier(ScoreItem("3+4=7I do not know", "?", "7", last_turn="I do not know")) == 0.0
        assert verifier(ScoreItem("3+4=77", "?", "7", last_turn="7")) == 1.0


@pytest.mark.parametrize(
    ("response", "last_turn", "score"),
    [("=66", "6", 1.0), ("=65", "5", 0.1), ("=6?", "?", 0.05), ("=6=", "=", 0.0), ("6", "6", 0.0), ("=", None, 0.0)],
)
def test_quotients_are_scored_after_the_calculator_was_asked(
    response: str, last_turn: str | None, score: float
) -> None:
    verifier = VerifierSpec("task", "digits", None, {"operation": "quotient"}).load()
    assert verifier(ScoreItem(response, "12/2", "6", last_turn=last_turn)) == score
