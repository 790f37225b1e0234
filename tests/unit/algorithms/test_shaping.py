"""From scores to outcome rewards: each operation alone, their order, and what is left untouched."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rl_platform.algorithms.shaping import ShapedRewards, overlong_penalty, scale_rewards, shape_rewards, whiten_rewards
from rl_platform.config.schema.algorithm import Algorithm, RewardScaling

NAN = float("nan")


def shape(scores: list[float], **options: Any) -> ShapedRewards:
    """shape(scores, lengths=, truncated=, scored=, and keys of `algorithm`); 8 tokens each, none truncated."""
    count = len(scores)
    columns = {"lengths": [8] * count, "truncated": [False] * count, "scored": [True] * count}
    columns = {name: torch.tensor(options.pop(name, column)) for name, column in columns.items()}
    return shape_rewards(torch.tensor(scores), algorithm=Algorithm(**options), longest_response=16, **columns)


def test_without_keys_the_score_is_the_reward() -> None:
    shaped = shape([0.25, 1.0, -3.0], truncated=[True, False, False])
    assert shaped.rewards.tolist() == [0.25, 1.0, -3.0]
    assert shaped.sample_mask.all()
    assert shaped.metrics == {}


def test_scaling() -> None:
    rewards, outside = scale_rewards(torch.tensor([0.0, 0.25, 1.0, 1.7]), RewardScaling())
    assert rewards.tolist() == [-1.0, -0.5, 1.0, 1.0]
    assert outside.tolist() == [False, False, False, True]


@given(score=st.floats(-100, 100), low=st.floats(-10, 10), width=st.floats(0.1, 10), target=st.floats(-10, 10))
def test_scaling_stays_in_its_target(score: float, low: float, width: float, target: float) -> None:
    scaling = RewardScaling(source_min=low, source_max=low + width, target_min=target, target_max=target + 2)
    reward, outside = scale_rewards(torch.tensor([score], dtype=torch.float64), scaling)
    assert target - 1e-9 <= reward.item() <= target + 2 + 1e-9
    assert outside.item() == (not low <= score <= low + width)


def test_soft_punishment_has_a_floor() -> None:
    """Without the upper clip a response of 18 tokens would lose 1.5."""
    lengths = torch.tensor([0, 12, 13, 14, 16, 18])
    assert overlong_penalty(lengths, 16, 4, 1.0).tolist() == [0, 0, 0.25, 0.5, 1.0, 1.0]
    assert overlong_penalty(lengths, 16, 4, 0.5).tolist() == [0, 0, 0.125, 0.25, 0.5, 0.5]


@pytest.mark.parametrize(("max_length", "expected"), [(None, [1.0, 0.75, 0.0]), (14, [0.75, 0.25, 0.0])])
def test_soft_punishment_ends_at_the_longest_response_or_before(max_length: int | None, expected: list[float]) -> None:
    overlong = {"buffer_length": 4, "max_length": max_length}
    assert shape([1.0] * 3, lengths=[11, 13, 16], overlong=overlong).rewards.tolist() == expected


def test_stop_properly() -> None:
    shaped = shape([1.0, 1.0, 0.5], truncated=[True, False, True], overlong={"stop_properly_coef": 0.25})
    assert shaped.rewards.tolist() == [0.25, 1.0, 0.125]
    assert shaped.sample_mask.all()


def test_filtered_responses_do_not_count_and_keep_their_reward() -> None:
    shaped = shape(
        [1.0, 0.5, 0.0], truncated=[True, False, True], scored=[True, True, False], overlong={"filter": True}
    )
    assert shaped.sample_mask.tolist() == [False, True, False]
    assert shaped.rewards.tolist() == [1.0, 0.5, 0.0]
    assert shaped.metrics == {"reward/filtered": 1.0}


@pytest.mark.parametrize(("ignore", "compared"), [(False, [True, True, False]), (True, [False, True, False])])
def test_filtered_responses_stay_in_the_statistics_of_their_group(ignore: bool, compared: list[bool]) -> None:
    shaped = shape_rewards(
        scores=torch.ones(3),
        scored=torch.tensor([True, True, False]),
        lengths=torch.full((3,), 4),
        truncated=torch.tensor([True, False, True]),
        algorithm=Algorithm(overlong={"filter": True}, group_ignore_masked=ignore),
        longest_response=4,
    )
    assert shaped.sample_mask.tolist() == [False, True, False]
    assert shaped.compared.tolist() == compared


def test_all_responses_may_be_filtered() -> None:
    shaped = shape([1.0, 0.5], truncated=[True, True], overlong={"filter": True}, reward_whitening=True)
    assert not shaped.sample_mask.any()
    assert torch.isfinite(shaped.rewards).all()


def test_whitening_scales_around_the_mean() -> None:
    counted = torch.tensor([True, True, True, False, True])
    rewards = whiten_rewards(torch.tensor([1.0, 2.0, 3.0, 100.0, 4.0]), counted)
    golden = torch.tensor([1.338105, 2.112702, 2.887298, 3.661895])
    torch.testing.assert_close(rewards[counted], golden, rtol=1e-5, atol=1e-6)
    assert rewards[3] == pytest.approx(2.5 + 97.5 * 0.7745967, rel=1e-5)  # mapped by the statistics of the others


@pytest.mark.parametrize("rewards", [[1.0, 1.0, 0.0], [0.1, 0.1, -7.0]])
def test_equal_rewards_have_no_scale(rewards: list[float]) -> None:
    """Divided by their deviation the uncounted third one would become a million."""
    given_rewards = torch.tensor(rewards)
    assert torch.equal(whiten_rewards(given_rewards, torch.tensor([True, True, False])), given_rewards)
    assert torch.equal(whiten_rewards(given_rewards, torch.tensor([False, False, True])), given_rewards)


def test_order_of_operations() -> None:
    """Scaled to [-1, 1], then punished, then whitened; another order gives other numbers."""
    shaped = shape(
        [1.0, 0.0, 2.0, 0.5],
        lengths=[12, 16, 14, 13],
        truncated=[False, True, False, False],
        reward_scaling={},
        overlong={"buffer_length": 4, "filter": True},
        reward_whitening=True,
    )
    punished = torch.tensor([1.0, -2.0, 0.5, -0.25])
    expected = whiten_rewards(punished, torch.tensor([True, False, True, True]))
    torch.testing.assert_close(shaped.rewards, expected)
    assert shaped.metrics == {"reward/out_of_range": 1.0, "reward/filtered": 1.0}


@pytest.mark.parametrize("garbage", [NAN, float("inf"), 1e30])
def test_nothing_leaks_from_responses_without_a_score(garbage: float) -> None:
    keys: dict[str, Any] = {"reward_scaling": {}, "overlong": {"buffer_length": 4}, "reward_whitening": True}
    clean = shape([1.0, 0.0, 0.5], **keys)
    dirty = shape([1.0, garbage, 0.0, 0.5], scored=[True, False, True, True], **keys)
    assert dirty.rewards[1] == 0
    assert not dirty.sample_mask[1]
    assert torch.equal(dirty.rewards[[0, 2, 3]], clean.rewards)
    assert dirty.metrics == clean.metrics


@given(st.permutations(range(5)))
def test_order_of_responses_does_not_matter(order: list[int]) -> None:
    keys: dict[str, Any] = {"reward_scaling": {}, "reward_whitening": True}
    scores, truncated = [0.0, 0.2, 1.0, 0.7, 0.2], [True, False, False, True, False]
    rewards: Tensor = shape(scores, truncated=truncated, overlong={"filter": True}, **keys).rewards
    shuffled = shape(
        [scores[i] for i in order], truncated=[truncated[i] for i in order], overlong={"filter": True}, **keys
    )
    torch.testing.assert_close(shuffled.rewards, rewards[torch.tensor(order)])
