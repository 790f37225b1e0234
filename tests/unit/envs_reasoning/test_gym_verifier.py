"""Scores of reasoning-gym answers, over all of its data sets, and answers that are programs."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from rl_platform.envs.reasoning.answers.gym_verifier import GymVerifier, calls_code

SCORES = """
import json
from contextlib import suppress
from reasoning_gym.factory import DATASETS
from rl_platform.envs.reasoning.answers.gym_verifier import GymVerifier

unpaid, paid, partial = [], [], 0
for name in sorted(DATASETS.keys() - {"composite"}):  # that one has no questions of its own
    verifier = GymVerifier(name, {"seed": 1}, exact=True)
    entry = verifier.dataset[0]
    answer = entry["answer"]
    if answer is None:  # there are several
        continue
    def score(response):
        return verifier.score(response, entry["question"], answer, entry["metadata"])
    if score(f"<answer>{answer}</answer>") != 1.0:
        unpaid.append(name)
    hedges = (f"<answer>{answer} or wrong</answer>", f"It is not {answer}", "")
    paid += [(name, hedge) for hedge in hedges if score(hedge)]
    with suppress(ValueError):
        partial += 0 < verifier.dataset.score_answer(f"{answer} or wrong", entry) < 1
print()  # data sets print, too
print(json.dumps([unpaid, paid, partial]))
"""


@pytest.mark.slow
def test_only_full_answers_are_paid() -> None:
    """In a process of its own: scoring forks hundreds of times, which takes long where torch is loaded."""
    command = [sys.executable, "-W", "ignore", "-c", SCORES]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    unpaid, paid, partial = json.loads(ended.stdout.splitlines()[-1])
    assert unpaid == []
    assert paid == []
    assert partial > 40  # data sets whose own score pays something


def score(verifier: GymVerifier, response: str, entry: dict[str, Any]) -> float:
    return verifier.score(response, entry["question"], entry["answer"], entry["metadata"])


def test_partial_scores_on_request() -> None:
    exact, own = (GymVerifier("countdown", {"seed": 1}, exact=exact) for exact in (True, False))
    entry = exact.dataset[0]
    assert [score(verifier, "<answer>1 + 1</answer>", entry) for verifier in (exact, own)] == [0.0, 0.05]


def test_an_answer_that_the_data_set_cannot_read_is_wrong() -> None:
    verifier = GymVerifier("prime_factorization", {}, exact=False)
    assert score(verifier, "<answer>one</answer>", verifier.dataset[0]) == 0.0


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os').system('true')",
        "  exec('1')",
        "(\n exec('1'))",
        "(lambda: 0)()",
        "5! != exec('1')",
        "5! + exec('1')",
        "sin('exec(1)')",
        "x + sympify('exec(1)')",
        "(1).__class__",
        "type('T', (), {'__eq__': lambda a, b: True})()",
        "'a'.join(x)",
        "f'{x.y}'",
    ],
)
def test_programs(text: str) -> None:
    assert calls_code(text)


@pytest.mark.parametrize(
    "text", ["94*4 - 61", "5!", "sin(x)**2 + C", "['a', 'b']", "[[1, 0], [0, 1]]", "A or B", "R U2 F'", "f(x", "-3.5"]
)
def test_answers_that_are_no_programs(text: str) -> None:
    assert not calls_code(text)
