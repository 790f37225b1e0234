"""The table of right and wrong answers, and generated hedged answers, by a scoring process of the built-in verifier."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import pytest
from hedges import hedged_answers

from rl_platform.envs.reasoning.answers.notation import normalized
from rl_platform.envs.reasoning.answers.quantity import parse_quantity
from rl_platform.envs.reasoning.scoring import ScoringPool
from rl_platform.envs.reasoning.verifiers import ScoreItem, VerifierSpec

NEW_LINE = "\N{RETURN SYMBOL}"  # in the table
with (Path(__file__).parent / "pairs.tsv").open() as table:
    PAIRS = list(csv.DictReader(table, delimiter="\t", quoting=csv.QUOTE_NONE, restval=""))


@pytest.fixture(scope="module")
def pool() -> Iterator[ScoringPool]:
    pool = ScoringPool(VerifierSpec("math_verify"), num_workers=1, timeout_s=60.0)
    yield pool
    pool.close()


def test_the_table_of_pairs(pool: ScoringPool) -> None:
    assert len(PAIRS) >= 200
    items = [ScoreItem(row["response"].replace(NEW_LINE, "\n"), row["question"], row["expected"]) for row in PAIRS]
    scores = pool.score(items)
    assert all(score.valid for score in scores)
    wrong = [row for row, score in zip(PAIRS, scores, strict=True) if score.value != float(row["paid"])]
    assert wrong == []


def test_no_hedged_answer_is_paid(pool: ScoringPool) -> None:
    hedges = list(hedged_answers(2_000))
    scores = pool.score([ScoreItem(response, "", expected) for response, expected in hedges])
    assert [hedge for hedge, score in zip(hedges, scores, strict=True) if not score.valid or score.value > 0] == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("5 km/h", "5 kilometers per hour"),
        ("3 ft^2", "3 square feet"),
        ("3 square feet", "3 feet squared"),
        ("2 h", "7200 s"),
        ("$1.50", "150 cents"),
        ("2 years", "24 months"),
        ("1.5 million", "1,500,000"),
        ("5 m/s^2", "5 meters per second squared"),
    ],
)
def test_units_that_are_equal(one: str, other: str) -> None:
    first, second = parse_quantity(normalized(one)), parse_quantity(normalized(other))
    assert first is not None
    assert second is not None
    assert first.equals(second)


@pytest.mark.parametrize(
    "text", ["2x", "42 x", "2xy", "1/0", "84:2", "not 42", "42 or 43", "9" * 5000, "", "km", "1e9999"]
)
def test_what_is_no_quantity(text: str) -> None:
    assert parse_quantity(text) is None
