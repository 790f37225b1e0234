"""Scores answers to reasoning-gym questions by the data set's own function.

Some of these functions evaluate the answer as Python or sympy code. Answers other than words and numbers are therefore
scored in a copy of the process (`fork.py`), and answers that could do more than arithmetic score 0.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable

from rl_platform.envs.reasoning.answers.finding import find_answer, last_number, reserved
from rl_platform.envs.reasoning.answers.fork import in_fork
from rl_platform.envs.reasoning.answers.quantity import NUMBER, parse_number

_FUNCTIONS = {
    *("abs", "Abs", "sqrt", "cbrt", "root", "exp", "log", "ln", "erf", "gamma", "factorial", "Rational", "Integer"),
    *(f"{arc}{name}{h}" for arc in ("", "a") for name in ("sin", "cos", "tan", "cot", "sec", "csc") for h in ("", "h")),
}
_FACTORIAL = re.compile(r"!+(?!=)")  # sympy's notation
_PLAIN = re.compile(r"(?:[^\W_]|[\s,;:/+-]|(?<=\d)\.(?=\d))*")  # words and numbers do nothing if they are evaluated
NO_ANSWER = "None"  # of a data set whose questions have several answers


class GymVerifier:
    """The verifier of one data set. exact: 1 for a full score of an answer without reservations, else 0.

    Without `exact` the data set's partial scores are returned, of which many pay `answer or wrong` or any number.
    """

    def __init__(self, name: str | None, params: dict[str, object], exact: bool) -> None:
        import reasoning_gym

        self.dataset = reasoning_gym.create_dataset(name, **{"seed": 0, **params})
        self._exact = exact
        for index in range(2):  # fills the caches that copies of this process inherit
            entry = self.dataset[index]
            self._score(str(entry["answer"]), entry)

    def score(self, response: str, question: str, answer: str, metadata: dict[str, object]) -> float:
        """Returns a score in [0, 1]. Raises ValueError if the data set cannot score its own answer."""
        given = _find(response, answer)
        if given is None:
            return 0.0
        entry: dict[str, object] = {"question": question, "answer": answer, "metadata": metadata}
        score = guarded(given, answer, lambda: self._score(given, entry))
        if not self._exact:
            return score
        hedged = answer != NO_ANSWER and reserved(given) and not reserved(answer)
        return float(score >= 1.0 and not hedged)

    def _score(self, given: str, entry: dict[str, object]) -> float:
        try:
            return float(self.dataset.score_answer(given, entry))
        except Exception:
            if entry["answer"] != NO_ANSWER:
                self.dataset.score_answer(entry["answer"], entry)  # raises if the data are the cause
            return 0.0


def guarded(given: str, answer: str, score: Callable[[], float]) -> float:
    """Returns the number in [0, 1] that `score`, which may evaluate the text `given` of a model, returns.

    It runs in a copy of this process unless the text is words and numbers, and not at all for a text that calls code
    and is not the expected answer: that scores 0. Raises ValueError as `in_fork`.
    """
    if given != answer and calls_code(given):
        return 0.0
    return score() if _PLAIN.fullmatch(given) else in_fork(score)


def _find(response: str, answer: str) -> str | None:
    given = find_answer(response, answer)
    if given is None or parse_number(answer) is None or parse_number(given) is not None:
        return given
    number = last_number(given)
    return NUMBER.findall(number)[-1] if number else None


def calls_code(text: str) -> bool:
    """Returns whether a text is a Python expression that reads attributes or calls other than mathematical
    functions."""
    return any(map(_is_program, {text.strip(), " ".join(text.split()), _FACTORIAL.sub("", text).strip()}))


def _is_program(text: str) -> bool:
    try:
        nodes = list(ast.walk(ast.parse(text, mode="eval")))
    except (SyntaxError, ValueError):
        return False
    except (MemoryError, RecursionError):
        return True
    calls = [node.func for node in nodes if isinstance(node, ast.Call)]
    if any(not isinstance(function, ast.Name) or function.id not in _FUNCTIONS for function in calls):
        return True
    # sympy evaluates texts among the arguments of its functions
    has_text = any(isinstance(node, ast.Constant) and isinstance(node.value, str) for node in nodes)
    return bool(calls and has_text) or any(isinstance(node, ast.Attribute | ast.JoinedStr) for node in nodes)
