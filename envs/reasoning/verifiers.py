"""Verifiers: functions from a `ScoreItem` to a score, built by name inside the scoring processes.

Built-in scores are in [0, 1]. A response that is wrong or cannot be parsed scores 0. A verifier raises only if it
cannot score, such as for an expected answer that it cannot parse; training then leaves the sample out. Every scoring
process imports this module, so it must not import torch or pydantic. Not covered: timeouts and processes, see
`scoring.py`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fractions import Fraction
from typing import Any

from rl_platform.user_function import load_function, misfit

KEY = "reward.type"
BUILT_IN = ("task", "math_verify", "exact_match")
DECIDING = (*BUILT_IN, "code")  # types of reward whose full score means that the response is right


@dataclass(frozen=True)
class ScoreItem:
    """A response and the fields of its question. last_turn: the policy's last turn; None if there is only one.
    messages: the prompt as a chat, if it is one."""

    response: str
    question: str
    answer: str
    metadata: dict[str, Any] = field(default_factory=dict)
    last_turn: str | None = None
    messages: tuple[dict[str, str], ...] = ()

    @property
    def final(self) -> str:
        """The text that built-in verifiers read: the policy's last turn. `response` also has the answers of tools."""
        return self.response if self.last_turn is None else self.last_turn


# A score, or a score and rewards of steps: (number of characters up to the end of the step, reward).
Verdict = float | tuple[float, Sequence[tuple[int, float]]]
Verifier = Callable[[ScoreItem], Verdict]


@dataclass(frozen=True)
class VerifierSpec:
    """The name of a verifier, `reward.type`, and for `task` the type, name and params of `data.task`, or the specs of
    `data.sources` by label."""

    type: str
    task_type: str = ""
    task_name: str | None = None
    task_params: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, VerifierSpec] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return KEY

    @property
    def built_in(self) -> bool:
        return self.type in BUILT_IN

    def load(self) -> Verifier:
        return load_verifier(self)


def load_verifier(spec: VerifierSpec) -> Verifier:
    """Returns the verifier. Raises ConfigError for an unknown name or a module that cannot be imported."""
    if spec.type == "exact_match":
        return exact_match
    if spec.type == "math_verify":
        return _math_verifier(_match_expressions)
    if spec.type == "task":
        return _task_verifier(spec)
    if ":" in spec.type:
        return _user_verifier(spec.type)
    near = get_close_matches(spec.type, BUILT_IN, n=1)
    hint = f"did you mean {near[0]}?" if near else ""
    raise misfit(KEY, spec.type, "no such verifier", f"{', '.join(BUILT_IN)}, or module:function", hint)


def exact_match(item: ScoreItem) -> float:
    """Returns 1 if response and answer are equal up to surrounding white space, else 0."""
    return float(item.final.strip() == item.answer.strip())


def match_digit(item: ScoreItem) -> float:
    """Returns 1 if the response starts with the answer, 0.1 if it starts with another digit, else 0.

    The reward of 0.1 makes the task learnable from random bytes.
    """
    first = item.final[:1]
    return 1.0 if first == item.answer else 0.1 if first and first in "0123456789" else 0.0


def match_quotient(item: ScoreItem) -> float:
    """Returns `match_digit` of the last turn, at least 0.05, if the first turn called the calculator; else 0.

    The 0.05 makes the call learnable from random bytes. A last turn that calls the calculator again scores 0.
    """
    if item.last_turn is None or not item.response.startswith("=") or item.last_turn.startswith("="):
        return 0.0
    return max(0.05, match_digit(item))


def _task_verifier(spec: VerifierSpec) -> Verifier:
    if spec.sources:
        verifiers = {label: _task_verifier(source) for label, source in spec.sources.items()}
        return lambda item: verifiers[item.metadata["source"]](item)
    if spec.task_type in ("jsonl", "file", "dataset"):
        return _math_verifier(_match_final)
    if spec.task_type != "reasoning_gym":
        return match_quotient if spec.task_params.get("operation") == "quotient" else match_digit
    import reasoning_gym

    dataset = reasoning_gym.create_dataset(spec.task_name, **{"seed": 0, **spec.task_params})

    def score(item: ScoreItem) -> float:
        entry = {"question": item.question, "answer": item.answer, "metadata": item.metadata}
        return float(dataset.score_answer(extract_answer(item.final, item.answer), entry))

    return score


def _user_verifier(name: str) -> Verifier:
    function = load_function(
        KEY, name, "function(response, answer, metadata) -> float, or (float, [(end of a step, its reward)])"
    )
    return lambda item: function(item.response, item.answer, item.metadata)


# Finding the answer in a response ------------------------------------------------------------------------------------

# A sign counts only where it cannot be an operator; commas only between groups of three digits.
_NUMBER = re.compile(r"(?:(?<![\w)\].])[-+])?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)(?:/\d+)?")
_LONGEST_NUMBER = 1_000  # characters; Python refuses to read integers of more than 4,300 digits
_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_HASHES = re.compile(r"####[ \t]*(\S[^\n]*)")


def extract_answer(response: str, answer: str) -> str:
    """Returns the answer in a response: the last <answer> tag, else \\boxed{}, else `####` line.

    Without any of them it is the last number if a number is expected, else the whole text.
    """
    text = response.replace("\N{MINUS SIGN}", "-")
    marked = _marked(text)
    if marked is not None:
        return marked
    numbers = _NUMBER.findall(text) if parse_number(answer) is not None else []
    return numbers[-1] if numbers else text.strip()


def _marked(text: str) -> str | None:
    """The text that the response marks as its answer; None without a mark."""
    answers = _TAGGED.findall(text) or boxed(text) or _HASHES.findall(text)
    return answers[-1].strip() if answers else None


def parse_number(text: str) -> Fraction | None:
    """Parses `1,234`, `-0.5`, `+3` or `1/2`, also in $...$ or with a full stop; returns None for other text."""
    bare = text.strip().strip("$").strip().removesuffix(".")
    if len(bare) > _LONGEST_NUMBER or not _NUMBER.fullmatch(bare):
        return None
    numerator, _, denominator = bare.replace(",", "").partition("/")
    if denominator and not int(denominator):
        return None
    return Fraction(numerator) / int(denominator or 1)


def boxed(text: str) -> list[str]:
    """The content of the last \\boxed{...}, braces balanced; empty if there is none."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return []
    start += len("\\boxed{")
    depth = 1
    for end in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return [text[start:end]]
    return []


# Comparing with math-verify -------------------------------------------------------------------------------------------


def _math_verifier(match: Verifier) -> Verifier:
    import math_verify  # imported before the process reports that it is ready

    # It would warn that its timeouts, which use signals, are off. The scoring pool has its own timeouts.
    logging.getLogger(math_verify.__name__).setLevel(logging.ERROR)
    return match


def _match_expressions(item: ScoreItem) -> float:
    """Compares the whole response by math-verify; an answer in words is compared as text."""
    if _in_words(item.answer):
        return _match_words(item)
    return _equivalent(item.answer, item.final, _marked(item.final))


def _match_final(item: ScoreItem) -> float:
    """Compares the extracted answer: numbers exactly, words as text, other answers by math-verify."""
    if _in_words(item.answer):
        return _match_words(item)
    given = extract_answer(item.final, item.answer)
    if given == item.answer.strip():
        return 1.0
    expected_number, given_number = parse_number(item.answer), parse_number(given)
    if expected_number is not None and given_number is not None:
        worked_out = "/" not in given or expected_number.denominator > 1  # as `_worked_out`
        return float(worked_out and expected_number == given_number)
    return _equivalent(item.answer, f"\\boxed{{{given}}}", given)


# math-verify parses letters as a product of symbols, so that `stop` and `pots` are equal.
_TEXT_COMMAND = re.compile(r"\\(?:text|textbf|textit|mathrm|mathbf|operatorname|boxed)\b\s*")
_COMMAND = re.compile(r"\\[A-Za-z]+")
_FORMULA = re.compile(r"[+*^=<>_$]|\\[A-Za-z]")
_WORD = re.compile(r"[^\W\d_]{2,}")
_LETTER = re.compile(r"[^\W\d_]")


def _words(text: str) -> list[str]:
    """Runs of two or more letters, without LaTeX commands."""
    return _WORD.findall(_COMMAND.sub(" ", _TEXT_COMMAND.sub(" ", text)))


def _in_words(answer: str) -> bool:
    """Whether an expected answer consists of words, without formulas and digits."""
    if _FORMULA.search(_TEXT_COMMAND.sub("", answer)) or any(character.isdigit() for character in answer):
        return False
    return bool(_words(answer))


def _match_words(item: ScoreItem) -> float:
    return float(_bare_words(extract_answer(item.final, item.answer)) == _bare_words(item.answer))


def _bare_words(text: str) -> str:
    """The text without LaTeX markup and without a full stop."""
    return " ".join(re.sub(r"[${}]|\\ ", " ", _TEXT_COMMAND.sub(" ", text)).split()).removesuffix(".").rstrip()


def _same_words(answer: str, given: str) -> bool:
    """Whether words beside numbers (units) equal those of the expected answer, in order, or are all missing."""
    expected = _words(answer)
    if not expected or _FORMULA.search(_TEXT_COMMAND.sub("", answer)):
        return True
    given_words = _words(given)
    return given_words == expected or not _LETTER.search(_COMMAND.sub(" ", _TEXT_COMMAND.sub(" ", given)))


def _equivalent(answer: str, response: str, marked: str | None) -> float:
    """Compares by math-verify. marked: the text that the response marks as its answer."""
    from math_verify import parse, verify

    gold = parse(answer if "$" in answer or "\\boxed" in answer else f"\\boxed{{{answer}}}", parsing_timeout=None)
    if not gold:
        raise ValueError(f"math-verify cannot read the expected answer {answer!r}")
    given = parse(response, parsing_timeout=None)
    if not (given and _worked_out(gold[0], given)):
        return 0.0
    if not _same_words(answer, str(given[-1]) if marked is None else marked):
        return 0.0
    return float(verify(gold, given, timeout_seconds=None))


_DIVISION = re.compile(r"/|\u00f7|\\[dt]?frac|\\div")
_QUOTIENT = re.compile(r"[-+]?[\d.,]+ */ *[\d.,]+|[-+]?[\d.,]+ *\\?%?")


def _worked_out(gold: object, given: Sequence[object]) -> bool:
    """Whether the answer is a number if a number is expected, and not an expression with that value.

    `(34 - 54)` equals -20, but a response that repeats the question is no answer, and training would exploit it.
    `given`: the expression that math-verify parsed and, if known, its text.
    """
    from sympy import Equality, Integer, Number

    if parse_number(str(gold)) is None:
        return True
    expression, text = given[0], str(given[-1])
    if isinstance(expression, Equality):
        expression, text = expression.rhs, text.rpartition("=")[2]
    if isinstance(gold, Integer):
        return isinstance(expression, Number) and not _DIVISION.search(text)
    return isinstance(expression, Number) or _QUOTIENT.fullmatch(text.strip()) is not None
