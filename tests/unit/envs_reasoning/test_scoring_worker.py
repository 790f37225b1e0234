"""What a reward function may return, and what is said about the rest."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
import torch

from rl_platform.envs.reasoning.scoring_worker import score_one
from rl_platform.envs.reasoning.verifiers import ScoreItem

ITEM = ScoreItem("four", "?", "4")


@pytest.mark.parametrize(
    ("returned", "value"),
    [
        (1, 1.0),
        (True, 1.0),
        (Fraction(1, 2), 0.5),
        (np.float32(0.5), 0.5),
        (np.int64(2), 2.0),
        (np.bool_(True), 1.0),
        (np.array(0.5), 0.5),
        (torch.tensor(0.5), 0.5),
        (torch.tensor(True), 1.0),
    ],
)
def test_numbers_of_python_numpy_and_torch(returned: object, value: float) -> None:
    score = score_one(lambda _: returned, ITEM)
    assert (score.valid, score.value, type(score.value)) == (True, value, float)


@pytest.mark.parametrize(
    "steps", [[(2, 0.1), (4, 0.2)], ((2, 0.1), [4, 0.2]), [(np.int64(2), np.float64(0.1)), (4, 0.2)]]
)
def test_rewards_of_steps(steps: object) -> None:
    score = score_one(lambda _: (1.0, steps), ITEM)
    assert (score.value, score.steps) == (1.0, ((2, 0.1), (4, 0.2)))


@pytest.mark.parametrize(
    "returned", [None, "1.0", [1.0], {"score": 1.0}, np.array([1.0]), torch.ones(1), float("nan"), 1j]
)
def test_other_values_have_no_score(returned: object) -> None:
    score = score_one(lambda _: returned, ITEM)
    assert not score.valid
    assert "a reward must be a finite number, not " in score.detail


@pytest.mark.parametrize(
    "returned",
    [(1.0, 0.5), (1.0, {}), (1.0, "ab"), (1.0, ["ab"]), (1.0, [0.1]), (1.0, [(1, 0.1, 2)]), (1.0, [], 0.5), (1.0,), ()],
)
def test_a_tuple_of_another_form_has_no_score(returned: object) -> None:
    score = score_one(lambda _: returned, ITEM)
    assert not score.valid
    assert "a tuple must be (reward, [(end of a step, its reward), ...]), not (" in score.detail
