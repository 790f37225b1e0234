"""The smaller controls: each acts where it can, and is refused with the reason where it cannot."""

from __future__ import annotations

from typing import Any

import pytest

NLL = "algorithm.positive_nll_norm=all_tokens"
NOMINAL = "algorithm.loss_agg_denominator=nominal"

REFUSED = [
    # overrides, key, part of the reason
    ([NOMINAL], "algorithm.loss_agg_denominator", "token-mean does not divide by a number of sequences"),
    ([NOMINAL, "algorithm.loss_agg_func=token-sum"], "algorithm.loss_agg_denominator", "token-sum does not divide"),
    ([NLL], "algorithm.positive_nll_norm", "the term is off"),
]
ACCEPTED = [
    [NOMINAL, "algorithm.loss_agg_func=seq-mean-token-sum"],
    ["algorithm.loss_agg_func=token-sum"],
    [NLL, "algorithm.positive_nll_coef=0.1"],
]


@pytest.mark.parametrize(("overrides", "key", "reason"), REFUSED, ids=str)
def test_refused(problems: Any, overrides: list[str], key: str, reason: str) -> None:
    (problem,) = problems("reasoning", *overrides).values()
    assert problem.key == key
    assert reason in problem.message


@pytest.mark.parametrize("overrides", ACCEPTED, ids=str)
def test_accepted(problems: Any, overrides: list[str]) -> None:
    assert problems("reasoning", *overrides) == {}
